"""From a user's arguments to a `Call`: one function per array collective, no communication.

Wrong arguments that a rank can see alone raise `UsageError` here. Wrong lists are often given
on one rank only (the root); they become the call's `error`, which is raised on every rank, so
that nobody is left waiting.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output, ordinary, wrap_like
from hpcdist.arrays.layout import adjacent_view, join, spread
from hpcdist.comm.group import Group
from hpcdist.comm.lists import (
    as_buffers,
    as_outputs,
    blocks_to_send,
    cannot,
    check_fillable,
    empty_for,
    gathered_into,
    is_list,
    keep,
    one_dtype,
    unpack,
)
from hpcdist.errors import UsageError
from hpcdist.transport.call import UNEVEN, Call, Kind, shape_detail
from hpcdist.transport.recipes import ReduceOp, check_op, recipe_for


def barrier(group: Group) -> Call:
    return _BARRIER


_BARRIER = Call(Kind.BARRIER)


# ---- reductions


def _in_place(kind: Kind, group: Group, tensor: Any, op: Any) -> Call:
    if type(op) is not ReduceOp:
        op = check_op(op)
    dtype = ordinary(tensor)
    if dtype is not None:  # the hot path: no buffer, and not through Call's own constructor
        recipe = recipe_for(op, dtype)
        return _new_tuple(Call, (kind, None, tensor, dtype, tensor.shape, 0, op, recipe, *_REST))
    buffer = as_output(tensor)
    return Call(
        kind,
        recv=buffer.data,
        dtype=buffer.dtype,
        shape=buffer.shape,
        op=op,
        recipe=recipe_for(op, buffer.dtype),
        finish=None if buffer.home is None else unpack(buffer),
    )


all_reduce = partial(_in_place, Kind.ALL_REDUCE)
scan = partial(_in_place, Kind.SCAN)
exscan = partial(_in_place, Kind.EXSCAN)

_new_tuple = tuple.__new__
_REST = tuple(Call._field_defaults[name] for name in Call._fields[8:])


def reduce(group: Group, tensor: Any, dst: Any, op: Any) -> Call:
    root = group.root_of(dst, "dst")
    at_root = root == group.rank
    try:
        buffer = as_output(tensor) if at_root else as_buffer(tensor)
    except UsageError as error:
        return cannot(Kind.REDUCE, group, error, root)
    op = check_op(op)
    recipe = recipe_for(op, buffer.dtype)
    send, recv = (None, buffer.data) if at_root else (buffer.data, None)
    finish = unpack(buffer) if at_root else None
    return Call(
        Kind.REDUCE, send, recv, buffer.dtype, buffer.shape, root, op, recipe, finish=finish
    )


def reduce_scatter(group: Group, tensor: Any, tensor_list: Any, op: Any) -> Call:
    out = as_output(tensor)
    op = check_op(op)
    recipe = recipe_for(op, out.dtype)
    try:
        send = blocks_to_send(group, tensor_list, out, "tensor_list")
    except UsageError as error:
        return cannot(Kind.REDUCE_SCATTER, group, error)
    finish = unpack(out)
    return Call(
        Kind.REDUCE_SCATTER, send, out.data, out.dtype, out.shape, 0, op, recipe, finish=finish
    )


# ---- moving data


def broadcast(group: Group, tensor: Any, src: Any) -> Call:
    root = group.root_of(src, "src")
    dtype = ordinary(tensor)
    if dtype is not None:
        return Call(Kind.BROADCAST, None, tensor, dtype, tensor.shape, root)
    at_root = root == group.rank
    try:
        buffer = as_buffer(tensor) if at_root else as_output(tensor)
    except UsageError as error:
        return cannot(Kind.BROADCAST, group, error, root)
    finish = None if buffer.home is None else keep if at_root else unpack(buffer)
    return Call(Kind.BROADCAST, None, buffer.data, buffer.dtype, buffer.shape, root, finish=finish)


def all_gather(group: Group, tensor_or_list: Any, tensor: Any) -> Call:
    own = as_buffer(tensor)
    try:
        recv, finish = gathered_into(group, tensor_or_list, own, tensor, "tensor_list")
    except UsageError as error:
        return cannot(Kind.ALL_GATHER, group, error)
    _, data, dtype, shape, _ = own
    detail = shape_detail(shape)
    return Call(Kind.ALL_GATHER, data, recv, dtype, shape, detail=detail, finish=finish)


def gather(group: Group, tensor: Any, gather_list: Any, dst: Any) -> Call:
    root = group.root_of(dst, "dst")
    own = as_buffer(tensor)
    recv, finish = None, None
    if root == group.rank:
        try:
            recv, finish = gathered_into(group, gather_list, own, tensor, "gather_list")
        except UsageError as error:
            return cannot(Kind.GATHER, group, error, root)
    _, data, dtype, shape, _ = own
    detail = shape_detail(shape)
    return Call(Kind.GATHER, data, recv, dtype, shape, root, detail=detail, finish=finish)


def scatter(group: Group, tensor: Any, tensor_or_list: Any, src: Any) -> Call:
    root = group.root_of(src, "src")
    out = as_output(tensor)
    send = None
    if root == group.rank:
        try:
            send = blocks_to_send(group, tensor_or_list, out, "tensor_list")
        except UsageError as error:
            return cannot(Kind.SCATTER, group, error, root)
    return Call(Kind.SCATTER, send, out.data, out.dtype, out.shape, root, finish=unpack(out))


def alltoall(group: Group, out: Any, given: Any) -> Call:
    """Describe both forms: two lists of one array per rank, or two arrays cut along dim 0."""
    if not is_list(out) and not is_list(given):
        return alltoall_single(group, out, given, None, None)
    try:
        return _alltoall_lists(group, out, given)
    except UsageError as error:
        return cannot(Kind.ALLTOALL, group, error)


def _alltoall_lists(group: Group, out: list[Any], given: Sequence[Any]) -> Call:
    if not is_list(out) or not is_list(given):
        raise UsageError(
            "The output and input should be both tensor or tensor list, got "
            f"{type(out).__name__} and {type(given).__name__}"
        )
    sent = as_buffers(group, given, "in_tensor_list")
    dtype = one_dtype(sent, "in_tensor_list")
    shapes = {buffer.shape for buffer in sent}
    new: list[Buffer] = []
    if len(out) == 0:
        check_fillable(out, "out_tensor_list")
        if len(shapes) > 1:
            raise UsageError(
                f"in_tensor_list has different shapes {sorted(shapes)}, so out_tensor_list must "
                "hold arrays of the shapes to receive instead of being empty"
            )
        new = [buffer._replace(data=np.empty_like(buffer.data), home=None) for buffer in sent]
    received = new or as_outputs(group, out, "out_tensor_list")
    if one_dtype(received, "out_tensor_list") != dtype:
        raise UsageError(
            f"in_tensor_list is {dtype.name} but out_tensor_list is {received[0].dtype.name}; "
            "give both one dtype"
        )
    shapes |= {buffer.shape for buffer in received}
    staged = adjacent_view(received)
    recv = empty_for(received) if staged is None else staged

    def finish(_: Any) -> None:
        spread(recv, received)
        out.extend(wrap_like(given[0], each.data, dtype, each.shape) for each in new)

    even = len(shapes) == 1
    return Call(
        Kind.ALLTOALL,
        send=join(sent),
        recv=recv,
        dtype=dtype,
        shape=sent[0].shape,
        detail=shape_detail(sent[0].shape) if even else UNEVEN,
        counts=(
            [buffer.data.size for buffer in sent],
            [buffer.data.size for buffer in received],
        ),
        finish=finish,
    )


def alltoall_single(
    group: Group, out_tensor: Any, in_tensor: Any, in_split_sizes: Any, out_split_sizes: Any
) -> Call:
    own, out = as_buffer(in_tensor, "in_tensor"), as_output(out_tensor, "out_tensor")
    try:
        if own.dtype != out.dtype:
            raise UsageError(
                f"in_tensor is {own.dtype.name} but out_tensor is {out.dtype.name}; give both one "
                "dtype"
            )
        sent = _split_counts(group, own, in_split_sizes, "in_split_sizes")
        received = _split_counts(group, out, out_split_sizes, "out_split_sizes")
    except UsageError as error:
        return cannot(Kind.ALLTOALL, group, error)
    even = in_split_sizes is None and out_split_sizes is None and own.shape == out.shape
    return Call(
        Kind.ALLTOALL,
        send=own.data,
        recv=out.data,
        dtype=own.dtype,
        shape=own.shape,
        detail=shape_detail(own.shape) if even else UNEVEN,
        counts=(sent, received),
        finish=unpack(out),
    )


def _split_counts(group: Group, buffer: Buffer, sizes: Any, what: str) -> list[int]:
    """Turn split sizes along dim 0 into elements of the buffer's memory per rank."""
    rows = buffer.shape[0] if buffer.shape else 0
    if sizes is None:
        if rows % group.nranks or not buffer.shape:
            raise UsageError(
                f"an array of shape {buffer.shape} cannot be cut into {group.nranks} equal parts "
                f"along dim 0; give {what}"
            )
        return [buffer.data.size // group.nranks] * group.nranks
    try:
        sizes = [operator.index(size) for size in sizes]
    except TypeError as error:
        raise UsageError(
            f"{what} must be {group.nranks} integers, got {sizes!r} ({error})"
        ) from None
    if len(sizes) != group.nranks or min(sizes) < 0 or sum(sizes) != rows:
        raise UsageError(
            f"{what}={sizes} must be {group.nranks} sizes, none negative, whose sum is the length "
            f"{rows} of dim 0 of the array of shape {buffer.shape}"
        )
    per_row = buffer.data.size // rows if rows else 0
    return [size * per_row for size in sizes]
