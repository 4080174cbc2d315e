"""`exchange`: each rank takes boxes of the arrays of all ranks; what moves arrays between layouts.

Every rank knows what it takes and what is taken from it, so nobody tells sizes or places. Inside a
node boxes are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.boxes import Slices, extents, volume_of
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.members import Members
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import (
    Exchange,
    Gathering,
    Give,
    Read,
    Refusal,
    Shape,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, check_op, rule_for
from hpcdist.transport.shm.boxes import as_alltoall
from hpcdist.transport.waiting.work import Work


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
        reads: what this rank takes, in the order in which it is combined; where nothing is, no two
            targets overlap. Tuples that are given again are not checked again.
        gives: what the ranks take from this one; what one rank takes in the order of its reads.
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
        boxes = _checked(_Pair(reads, gives), group.rank, group.nranks, own.shape, out.shape)
        call = _as_call(own, out, boxes, op, key, words)
    except UsageError as error:
        return cannot(Kind.EXCHANGE, group, error)
    assert group.transport is not None
    on_host = type(call.send) is np.ndarray and type(call.recv) is np.ndarray
    if on_host and group.transport.takes_exchanges:
        return call
    return as_alltoall(call, group.nranks)


def _as_call(own: Buffer, out: Buffer, boxes: _Boxes, op: Any, key: int, words: str) -> Exchange:
    dtype = own.dtype
    if dtype.code != out.dtype.code:
        raise UsageError(f"send is {dtype.name} but recv is {out.dtype.name}; give both one dtype")
    rule = None
    if op is not None:
        op = check_op(op)
        rule = rule_for(op, dtype)
    elif boxes.combines:
        raise UsageError("reads combine what they take, but rule_op is None; give an operator")
    return Exchange(
        Kind.EXCHANGE,
        _in_shape(own),
        _in_shape(out),
        dtype,
        own.shape,
        boxes.reads,
        boxes.gives,
        rule,
        op,
        key,
        words,
        boxes.most * dtype.numpy.itemsize,
        out.finish,
    )


def _in_shape(buffer: Buffer) -> NumpyArray:
    """Return memory in the shape of its array, with one axis more where it holds parts of it."""
    per_element = buffer.dtype.numpy.itemsize // buffer.data.dtype.itemsize
    shape = buffer.shape if per_element == 1 else (*buffer.shape, per_element)
    return buffer.data if buffer.data.shape == shape else buffer.data.reshape(shape)


# ---- what is checked once


class _Pair:
    """The boxes of one rank, as a key: those who move arrays give the same objects every time."""

    __slots__ = ("gives", "reads")

    def __init__(self, reads: Sequence[Read], gives: Sequence[Give]) -> None:
        self.reads = reads if type(reads) is tuple else tuple(reads)  # which nobody changes
        self.gives = gives if type(gives) is tuple else tuple(gives)

    def __hash__(self) -> int:
        return hash((id(self.reads), id(self.gives)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pair) and self.reads is other.reads and self.gives is other.gives


class _Boxes(NamedTuple):
    """The reads and gives that move anything.

    `most` is the larger of the numbers of elements that come from other ranks, and go to them.
    """

    reads: tuple[Read, ...]
    gives: tuple[Give, ...]
    combines: bool
    most: int


@lru_cache(maxsize=1024)
def _checked(pair: _Pair, rank: int, size: int, own: Shape, filled: Shape) -> _Boxes:
    """Check the boxes of a rank, whose arrays have these shapes; `UsageError` for one amiss."""
    for read in pair.reads:
        _check_rank(read, size)
        if read.rank == rank and read.shape != own:
            raise UsageError(f"{read} is of this rank's own array, whose shape is {own}")
        _check_within(read, read.source, read.shape)
        _check_within(read, read.target, filled)
        if extents(read.source) != extents(read.target):
            raise UsageError(f"{read} has a source and a target of different shapes")
    for give in pair.gives:
        _check_rank(give, size)
        _check_within(give, give.source, own)
    reads = tuple(read for read in pair.reads if volume_of(read.source))
    gives = tuple(give for give in pair.gives if volume_of(give.source))
    most = max(
        sum(volume_of(each.source) for each in boxes if each.rank != rank)
        for boxes in (reads, gives)
    )
    return _Boxes(reads, gives, any(read.combine for read in reads), most)


def _check_rank(what: Read | Give, size: int) -> None:
    if not 0 <= what.rank < size:
        raise UsageError(f"{what} is of rank {what.rank}, but the group has {size} ranks")


def _check_within(what: Read | Give, box: Slices, shape: Shape) -> None:
    if len(box) != len(shape) or not all(
        each.step is None and 0 <= each.start <= each.stop <= length
        for each, length in zip(box, shape, strict=True)
    ):
        raise UsageError(f"{what} has a box that is not one of an array of shape {shape}")
