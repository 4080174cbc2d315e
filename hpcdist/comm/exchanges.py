"""`exchange`: each rank takes boxes of the arrays of all ranks; what moves arrays between layouts.

Every rank knows what it takes and what is taken from it, so nobody tells sizes or places. Inside a
node boxes are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.members import Members
from hpcdist.comm.tensor_lists import cannot, unpack
from hpcdist.errors import UsageError
from hpcdist.transport.base import Work
from hpcdist.transport.boxes import as_alltoall
from hpcdist.transport.call import (
    Box,
    Exchange,
    Gathering,
    Give,
    Kind,
    Read,
    Refusal,
    Shape,
    volume_of,
)
from hpcdist.transport.reduction import ReduceOp, check_op, rule_for


def exchange(
    send: Any,
    recv: Any,
    reads: Sequence[Read],
    gives: Sequence[Give],
    *,
    rule_op: ReduceOp | None,
    key: int,
    words: str,
    group: Members | None = None,
    sync_op: bool = True,
) -> Work:
    """Fill boxes of `recv` with boxes of what the ranks of the group `send`. Collective.

    Args:
        send: the array of this rank, of any shape; other ranks read it until this has ended.
        recv: the array that is filled; what no read takes stays.
        reads: what this rank takes, in the order in which it is combined.
        gives: what the ranks take from this one. Those of one rank are in the order of its reads.
        rule_op: how pieces of one target are combined; None where none are.
        key: equal on all ranks, and other for each other exchange: ranks with one key have reads
            and gives that fit each other.
        words: what is exchanged, for errors.
        group: whose ranks the reads and the gives name, counted in the group.
        sync_op: False returns at once.

    """
    return dispatch(group, sync_op, _describe, send, recv, reads, gives, rule_op, key, words)


def _describe(
    group: Members,
    send: Any,
    recv: Any,
    reads: Sequence[Read],
    gives: Sequence[Give],
    op: Any,
    key: int,
    words: str,
) -> Exchange | Gathering | Refusal:
    try:
        own, out = as_buffer(send, "send"), as_output(recv, "recv")
        call = _as_call(group, own, out, reads, gives, op, key, words)
    except UsageError as error:
        return cannot(Kind.EXCHANGE, group, error)
    assert group.transport is not None
    on_host = type(call.send) is np.ndarray and type(call.recv) is np.ndarray
    if on_host and group.transport.takes_exchanges:
        return call
    return as_alltoall(call, group.nranks)


def _as_call(
    group: Members,
    own: Buffer,
    out: Buffer,
    reads: Sequence[Read],
    gives: Sequence[Give],
    op: Any,
    key: int,
    words: str,
) -> Exchange:
    if own.dtype.code != out.dtype.code:
        raise UsageError(
            f"send is {own.dtype.name} but recv is {out.dtype.name}; give both one dtype"
        )
    op = None if op is None else check_op(op)
    taken = _checked_reads(group, reads, own.shape, out.shape)
    given = _checked_gives(group, gives, own.shape)
    if op is None and any(read.combine for read in taken):
        raise UsageError("reads combine what they take, but rule_op is None; give an operator")
    volumes = (sum(volume_of(each.source) for each in boxes) for boxes in (taken, given))
    return Exchange(
        Kind.EXCHANGE,
        send=_in_shape(own),
        recv=_in_shape(out),
        dtype=own.dtype,
        shape=own.shape,
        reads=taken,
        gives=given,
        rule=None if op is None else rule_for(op, own.dtype),
        op=op,
        key=key,
        words=words,
        detail=max(volumes) * own.dtype.numpy.itemsize,
        finish=unpack(out),
    )


def _in_shape(buffer: Buffer) -> NumpyArray:
    """Return memory in the shape of its array, with one axis more where it holds parts of it."""
    per_element = buffer.dtype.numpy.itemsize // buffer.data.dtype.itemsize
    trail = () if per_element == 1 else (per_element,)
    return buffer.data.reshape((*buffer.shape, *trail))


def _checked_reads(
    group: Members, reads: Sequence[Read], own: Shape, target: Shape
) -> tuple[Read, ...]:
    """Return the reads that take anything; `UsageError` for one that cannot be done."""
    for read in reads:
        _check_rank(group, read.rank)
        if read.rank == group.rank and read.shape != own:
            raise UsageError(f"{read} is of this rank's own array, whose shape is {own}")
        _check_within(read, read.source, read.shape)
        _check_within(read, read.target, target)
        if _extents(read.source) != _extents(read.target):
            raise UsageError(f"{read} has a source and a target of different shapes")
    return tuple(read for read in reads if volume_of(read.source))


def _checked_gives(group: Members, gives: Sequence[Give], own: Shape) -> tuple[Give, ...]:
    for give in gives:
        _check_rank(group, give.rank)
        _check_within(give, give.source, own)
    return tuple(give for give in gives if volume_of(give.source))


def _check_rank(group: Members, rank: int) -> None:
    if not 0 <= rank < group.nranks:
        raise UsageError(f"rank {rank} is none of the {group.nranks} ranks of group {group.name}")


def _check_within(what: Read | Give, box: Box, shape: Shape) -> None:
    if len(box) != len(shape) or not all(
        each.step is None and 0 <= each.start <= each.stop <= length
        for each, length in zip(box, shape, strict=True)
    ):
        raise UsageError(f"{what} has a box that is not one of an array of shape {shape}")


def _extents(box: Box) -> list[int]:
    return [each.stop - each.start for each in box]
