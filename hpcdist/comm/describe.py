"""From a user's arguments to a `Call`: one function per array collective, no communication.

Wrong arguments become the call's `error`, which is raised on every rank: they may be wrong on one
rank only, and the others shall not wait for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output, is_numpys_own, ordinary
from hpcdist.arrays.dtypes import Dtype
from hpcdist.comm.members import Members
from hpcdist.comm.tensor_lists import (
    Given,
    Room,
    as_buffers,
    as_outputs,
    blocks_to_send,
    cannot,
    check_fillable,
    disentangled,
    fill,
    gathered_into,
    is_list,
    keep,
    memory_of,
    one_dtype,
    room_in,
)
from hpcdist.errors import UsageError
from hpcdist.transport.call.call import (
    UNEVEN,
    Barrier,
    Call,
    Distribution,
    Gathering,
    Reduction,
    Refusal,
    shape_detail,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, ReductionRule, check_op, rule_for
from hpcdist.transport.call.runs import counts_of

C = TypeVar("C", bound=Call)


def or_cannot(kind: Kind, describe: Callable[..., C | Refusal]) -> Callable[..., C | Refusal]:
    """Let all ranks raise the `UsageError` of a function that describes a `kind` of call."""

    @wraps(describe)
    def described(group: Members, *args: Any) -> C | Refusal:
        try:
            return describe(group, *args)
        except UsageError as error:
            return cannot(kind, group, error)

    return described


def barrier(group: Members) -> Barrier:
    return _BARRIER


_BARRIER = Barrier()


# ---- reductions


def _in_place(kind: Kind, group: Members, tensor: Any, op: Any) -> Reduction:
    if type(tensor) is _ndarray and type(op) is ReduceOp and tensor.flags.carray:
        known = _KNOWN[op].get(id(tensor.dtype))
        if known is not None:  # the hot path: no buffer, and not through the type's own constructor
            dtype, rule = known
            return _new_tuple(
                Reduction, (kind, None, tensor, dtype, tensor.shape, 0, op, rule, *_REST)
            )
    op, buffer = check_op(op), as_output(tensor)
    rule = rule_for(op, buffer.dtype)
    if buffer.data is tensor and is_numpys_own(tensor.dtype):
        _KNOWN[op][id(tensor.dtype)] = buffer.dtype, rule
    _, data, dtype, shape, _ = buffer
    return Reduction(kind, None, data, dtype, shape, 0, op, rule, finish=buffer.finish)


_KNOWN: list[dict[int, tuple[Dtype, ReductionRule]]] = [{} for _ in ReduceOp]
"""Per operator, what `ordinary` and `rule_for` return, by NumPy's own dtype objects met so far."""

all_reduce = or_cannot(Kind.ALL_REDUCE, partial(_in_place, Kind.ALL_REDUCE))
scan = or_cannot(Kind.SCAN, partial(_in_place, Kind.SCAN))
exscan = or_cannot(Kind.EXSCAN, partial(_in_place, Kind.EXSCAN))

_ndarray, _new_tuple = np.ndarray, tuple.__new__
_REST = tuple(Reduction._field_defaults[name] for name in Reduction._fields[8:])


@partial(or_cannot, Kind.REDUCE)
def reduce(group: Members, tensor: Any, dst: Any, op: Any) -> Reduction:
    root = group.root_of(dst, "dst")
    at_root = root == group.rank
    buffer = as_output(tensor) if at_root else as_buffer(tensor)
    op = check_op(op)
    rule = rule_for(op, buffer.dtype)
    _, data, dtype, shape, _ = buffer
    finish = buffer.finish if at_root else None
    return Reduction(Kind.REDUCE, None, data, dtype, shape, root, op, rule, finish=finish)


@partial(or_cannot, Kind.REDUCE_SCATTER)
def reduce_scatter(group: Members, tensor: Any, tensor_list: Any, op: Any) -> Reduction:
    out = as_output(tensor)
    op = check_op(op)
    rule = rule_for(op, out.dtype)
    send, sends, shapes = blocks_to_send(group, tensor_list, out, "tensor_list")
    shape: Any = shapes or out.shape
    kind = Kind.REDUCE_SCATTER
    call = Reduction(kind, send, out.data, out.dtype, shape, 0, op, rule, finish=out.finish)
    if not sends and not shapes:
        return call
    counts = (counts_of(call, shapes), None) if shapes else None
    return disentangled(call._replace(sends=sends, counts=counts), group.rank)


# ---- moving data


@partial(or_cannot, Kind.BROADCAST)
def broadcast(group: Members, tensor: Any, src: Any) -> Distribution:
    root = group.root_of(src, "src")
    dtype = ordinary(tensor)
    if dtype is not None:
        return Distribution(Kind.BROADCAST, None, tensor, dtype, tensor.shape, root)
    at_root = root == group.rank
    buffer = as_buffer(tensor) if at_root else as_output(tensor)
    _, data, dtype, shape, home = buffer
    finish = None if home is None else keep if at_root else buffer.finish
    return Distribution(Kind.BROADCAST, None, data, dtype, shape, root, finish=finish)


@partial(or_cannot, Kind.ALL_GATHER)
def all_gather(group: Members, tensor_or_list: Any, tensor: Any) -> Gathering:
    own = as_buffer(tensor)
    room = gathered_into(group, tensor_or_list, own, tensor, "tensor_list")
    return _gathering(Kind.ALL_GATHER, group, own, room, 0)


@partial(or_cannot, Kind.GATHER)
def gather(group: Members, tensor: Any, gather_list: Any, dst: Any) -> Gathering:
    root = group.root_of(dst, "dst")
    own, room = as_buffer(tensor), _NO_ROOM
    if root == group.rank:
        room = gathered_into(group, gather_list, own, tensor, "gather_list")
    return _gathering(Kind.GATHER, group, own, room, root)


_NO_ROOM: Room = (None, (), (), None)
_NOTHING_GIVEN: Given = (None, (), ())


def _gathering(kind: Kind, group: Members, own: Buffer, room: Room, root: int) -> Gathering:
    _, data, dtype, shape, _ = own
    recv, receives, shapes, finish = room
    detail = UNEVEN if shapes else shape_detail(shape) | bool(receives)
    call = Gathering(kind, data, recv, dtype, shape, root, detail, finish=finish)
    if not receives and not shapes:
        return call
    return disentangled(call._replace(receives=receives, shapes=shapes), group.rank)


@partial(or_cannot, Kind.SCATTER)
def scatter(group: Members, tensor: Any, tensor_or_list: Any, src: Any) -> Distribution:
    root = group.root_of(src, "src")
    out, given = as_output(tensor), _NOTHING_GIVEN
    if root == group.rank:
        given = blocks_to_send(group, tensor_or_list, out, "tensor_list")
    send, sends, shapes = given
    _, data, dtype, shape, _ = out
    detail = UNEVEN if shapes else shape_detail(shape) | bool(sends)
    call = Distribution(Kind.SCATTER, send, data, dtype, shape, root, detail, finish=out.finish)
    if not sends and not shapes:
        return call
    counts = (counts_of(call, shapes), None) if shapes else None
    return disentangled(call._replace(sends=sends, shapes=shapes, counts=counts), group.rank)


@partial(or_cannot, Kind.ALLTOALL)
def alltoall(group: Members, out: Any, given: Any) -> Gathering | Refusal:
    """Describe both forms: two lists of one array per rank, or two arrays cut along dim 0."""
    if not is_list(out) and not is_list(given):
        return alltoall_single(group, out, given, None, None)
    return _alltoall_lists(group, out, given)


def _alltoall_lists(group: Members, out: list[Any], given: Sequence[Any]) -> Gathering:
    if not is_list(out) or not is_list(given):
        raise UsageError(
            "The output and input should be both tensor or tensor list, got "
            f"{type(out).__name__} and {type(given).__name__}"
        )
    sent = as_buffers(group, given, "in_tensor_list")
    dtype = one_dtype(sent, "in_tensor_list")
    shape, shapes = sent[0].shape, tuple(buffer.shape for buffer in sent)
    room, expected, all_shapes = _NO_ROOM, None, set(shapes)
    if len(out) == 0:
        check_fillable(out, "out_tensor_list")
        room = None, (), (), fill(out, sent[0], given[0])
    else:
        received = as_outputs(group, out, "out_tensor_list")
        if one_dtype(received, "out_tensor_list") != dtype:
            raise UsageError(
                f"in_tensor_list is {dtype.name} but out_tensor_list is {received[0].dtype.name}; "
                "give both one dtype"
            )
        room, expected = room_in(received), [buffer.data.size for buffer in received]
        all_shapes.update(buffer.shape for buffer in received)
    send, sends = memory_of(sent)
    recv, receives, _, finish = room
    call = Gathering(
        Kind.ALLTOALL,
        send=np.empty(0, sends[0].dtype) if send is None else send,
        recv=recv,
        dtype=dtype,
        shape=shape,
        detail=UNEVEN if len(all_shapes) > 1 else shape_detail(shape) | bool(sends or receives),
        counts=([buffer.data.size for buffer in sent], expected),
        finish=finish,
        sends=sends,
        receives=receives,
        shapes=shapes,
    )
    return disentangled(call, group.rank)


@partial(or_cannot, Kind.ALLTOALL)
def alltoall_single(
    group: Members, out_tensor: Any, in_tensor: Any, in_split_sizes: Any, out_split_sizes: Any
) -> Gathering:
    own, out = as_buffer(in_tensor, "in_tensor"), as_output(out_tensor, "out_tensor")
    if own.dtype != out.dtype:
        raise UsageError(
            f"in_tensor is {own.dtype.name} but out_tensor is {out.dtype.name}; give both one dtype"
        )
    rows, sent = _split_counts(group, own, in_split_sizes, "in_split_sizes")
    _, received = _split_counts(group, out, out_split_sizes, "out_split_sizes")
    even = in_split_sizes is None and out_split_sizes is None and own.shape == out.shape
    parts = [] if even else [(length, *own.shape[1:]) for length in rows]
    return Gathering(
        Kind.ALLTOALL,
        send=own.data,
        recv=out.data,
        dtype=own.dtype,
        shape=own.shape,
        detail=shape_detail(own.shape) if even else UNEVEN,
        counts=(sent, received),
        finish=out.finish,
        shapes=parts,
    )


def _split_counts(
    group: Members, buffer: Buffer, sizes: Any, what: str
) -> tuple[list[int], list[int]]:
    """Return, per rank, the rows along dim 0 and the elements of the buffer's memory."""
    rows = buffer.shape[0] if buffer.shape else 0
    if sizes is None:
        if rows % group.nranks or not buffer.shape:
            raise UsageError(
                f"an array of shape {buffer.shape} cannot be cut into {group.nranks} equal parts "
                f"along dim 0; give {what}"
            )
        n = group.nranks
        return [rows // n] * n, [buffer.data.size // n] * n
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
    return sizes, [size * per_row for size in sizes]
