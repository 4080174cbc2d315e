"""Cut an operation on device memory into steps in host memory: pure, with plain integers.

A step copies pieces of the device's arrays out, runs the same operation on host memory, and copies
pieces of its result back. Steps are independent, so the copies of one run during the
operation of another. All ranks cut alike, because they cut by the shape they have agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import AnyArrays, Reduction, is_even
from hpcdist.transport.call.kinds import ARRAYS, LOOSE, Kind, table_for


class Piece(NamedTuple):
    """`items` elements, from `device` of the flat device array and from `host` of the host's."""

    device: int
    host: int
    items: int


class Step(NamedTuple):
    """One step; `send` and `recv` are elements of host memory, None where the call has none.

    `items` is the length of the block that all ranks have in common. Where the call has only
    `recv`, it is copied out from there.
    """

    items: int
    send: int | None
    recv: int | None
    out: tuple[Piece, ...]
    into: tuple[Piece, ...]


class Shape(NamedTuple):
    """What a plan depends on: elements of `send` and `recv`, ranks, and the place of this one."""

    send: int
    recv: int
    size: int
    rank: int
    at_root: bool


def is_whole(call: AnyArrays, detail: tuple[int, int]) -> bool:
    """Return whether the ranks' blocks differ, so that the operation cannot be cut."""
    if call.kind in LOOSE:
        return not is_even(detail)
    return isinstance(call, Reduction) and call.counts is not None


def plan_steps(kind: Kind, shape: Shape, chunk: int) -> Iterator[Step]:
    """Cut an operation into steps of at most `chunk` elements of host memory; at least one.

    `shape.recv` is, for gathers, that of all ranks together, also where it is still to be made.
    """
    row = _ROWS[kind]
    block, blocks = row.block(shape), shape.size if row.spread else 1
    length = max(1, chunk // blocks)
    for first in range(0, max(1, block), length):
        yield row.step(shape, block, first, min(length, block - first))


class _Row(NamedTuple):
    """`block` is what is cut; `spread` says that a step has a part of every rank's block."""

    block: Callable[[Shape], int]
    spread: bool
    step: Callable[[Shape, int, int, int], Step]


def _one(first: int, count: int) -> tuple[Piece, ...]:
    return (Piece(first, 0, count),)


def _each(shape: Shape, block: int, first: int, count: int) -> tuple[Piece, ...]:
    return tuple(Piece(rank * block + first, rank * count, count) for rank in range(shape.size))


def _in_place(shape: Shape, block: int, first: int, count: int) -> Step:
    part = _one(first, count)
    return Step(count, None, count, part, part)


def _broadcast(shape: Shape, block: int, first: int, count: int) -> Step:
    part = _one(first, count)
    return Step(count, None, count, *((part, ()) if shape.at_root else ((), part)))


def _reduce(shape: Shape, block: int, first: int, count: int) -> Step:
    part = _one(first, count)
    return Step(count, None, count, part, part if shape.at_root else ())


def _reduce_scatter(shape: Shape, block: int, first: int, count: int) -> Step:
    out = _each(shape, block, first, count)
    return Step(count, shape.size * count, count, out, _one(first, count))


def _all_gather(shape: Shape, block: int, first: int, count: int) -> Step:
    into = _each(shape, block, first, count)
    return Step(count, count, shape.size * count, _one(first, count), into)


def _gather(shape: Shape, block: int, first: int, count: int) -> Step:
    if shape.at_root:
        return _all_gather(shape, block, first, count)
    return Step(count, count, None, _one(first, count), ())


def _scatter(shape: Shape, block: int, first: int, count: int) -> Step:
    if shape.at_root:
        return _reduce_scatter(shape, block, first, count)
    return Step(count, None, count, (), _one(first, count))


def _alltoall(shape: Shape, block: int, first: int, count: int) -> Step:
    pieces = _each(shape, block, first, count)
    return Step(count, shape.size * count, shape.size * count, pieces, pieces)


def _received(shape: Shape) -> int:
    return shape.recv


def _sent(shape: Shape) -> int:
    return shape.send


_STEPS: dict[Kind, _Row] = {
    Kind.ALL_REDUCE: _Row(_received, False, _in_place),
    Kind.SCAN: _Row(_received, False, _in_place),
    Kind.EXSCAN: _Row(_received, False, _in_place),
    Kind.BROADCAST: _Row(_received, False, _broadcast),
    Kind.REDUCE: _Row(_received, False, _reduce),
    Kind.REDUCE_SCATTER: _Row(_received, True, _reduce_scatter),
    Kind.ALL_GATHER: _Row(_sent, True, _all_gather),
    Kind.GATHER: _Row(_sent, True, _gather),
    Kind.SCATTER: _Row(_received, True, _scatter),
    Kind.ALLTOALL: _Row(lambda shape: shape.recv // shape.size, True, _alltoall),
}
_ROWS = table_for("the steps of staged operations", ARRAYS, _STEPS)
