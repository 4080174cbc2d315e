"""What goes from rank to rank in one operation, as flat runs of memory; pure.

A call has them as one array to be cut, or each where it lies (`sends`, `receives`). Ranks
of one operation may differ in this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import MismatchError
from hpcdist.transport.call.call import AnyArrays, Block, Distribution, Gathering, Reduction, Shape
from hpcdist.transport.call.kinds import ROOTED, Family, Kind, table_for

APART_FROM = 64 << 10
"""Bytes of the largest array of a list from which on none is copied to lie next to the others.

Larger than what travels in a control block (`shm.control.PAYLOAD`), so that small operations have
one array, on all ranks alike.
"""


def cut(flat: NumpyArray, counts: Iterable[int]) -> list[NumpyArray]:
    """Cut a flat array into runs of `counts` elements."""
    runs, start = [], 0
    for count in counts:
        runs.append(flat[start : start + count])
        start += count
    return runs


def to_each(call: AnyArrays, size: int) -> Sequence[NumpyArray]:
    """Return what `call` sends to each of `size` ranks."""
    if call.sends:
        return call.sends
    return _cut_whole(call.send, call.counts[0] if call.counts else None, size)


def from_each(call: Gathering, size: int) -> Sequence[NumpyArray]:
    """Return where `call` receives from each of `size` ranks."""
    if call.receives:
        return call.receives
    return _cut_whole(call.recv, call.counts[1] if call.counts else None, size)


def _cut_whole(
    whole: NumpyArray | None, counts: Sequence[int] | None, size: int
) -> list[NumpyArray]:
    assert whole is not None
    flat = whole.reshape(-1)
    return cut(flat, counts or [flat.size // size] * size)


def shapes_to_each(call: Gathering, size: int) -> list[Shape]:
    """Return the shapes of what an alltoall sends to each of `size` ranks."""
    if call.shapes:
        return list(call.shapes)
    return [(call.shape[0] // size, *call.shape[1:])] * size


def counts_of(call: AnyArrays, shapes: Iterable[Shape]) -> list[int]:
    """Return of how many elements of `call`'s memory arrays of these shapes are."""
    per_element = call.dtype.numpy.itemsize // _some_memory(call).dtype.itemsize
    return [math.prod(shape) * per_element for shape in shapes]


def _some_memory(call: AnyArrays) -> NumpyArray:
    """Return memory of the kind that `call` moves, sent if there is any."""
    whole = [each for each in (call.send, call.recv) if each is not None]
    return next(iter((*call.sends, *whole, *call.receives)))


def with_room(call: Gathering, counts: Sequence[int]) -> Gathering:
    """Return `call` with room for `counts` elements from each rank: what is given, or new."""
    call = call._replace(counts=(call.counts[0] if call.counts else (), counts))
    if call.receives or call.recv is not None:
        return call
    return call._replace(recv=np.empty_like(_some_memory(call), shape=(sum(counts),)))


def new_blocks(call: Gathering, filled: Gathering, shapes: Sequence[Shape]) -> list[Block]:
    """Return what `filled` has received if `call` had no room for it; nothing if it had."""
    if call.receives or call.recv is not None:
        return []
    return list(map(Block, from_each(filled, len(shapes)), shapes))


_C = TypeVar("_C", Reduction, Distribution, Gathering)


def joined(call: _C) -> _C:
    """Return `call` with what it sends in one array, copied if it lies apart."""
    if not call.sends:
        return call
    return call._replace(send=np.concatenate(call.sends), sends=())


def contribution(call: Reduction) -> NumpyArray:
    """Return what this rank gives to a reduction, as one flat array; copied if it lies apart."""
    if call.sends:
        return np.concatenate(call.sends)
    return (call.recv if call.send is None else call.send).reshape(-1)


def pieces(data: NumpyArray, nbytes: int) -> Iterator[NumpyArray]:
    """Cut `data` into flat runs of at most `nbytes` bytes; one empty run if it is empty."""
    flat = data.reshape(-1)
    step = max(1, nbytes // max(1, flat.itemsize))
    for start in range(0, max(1, flat.size), step):
        yield flat[start : start + step]


# ---- what does not fit


def unfitting(
    call: Gathering | Distribution, ranks: Sequence[int], rank: int, shapes: Sequence[Shape]
) -> list[str]:
    """Describe the arrays that `rank` gives in `call`, one per rank, if not of `shapes`."""
    words, given = _UNFITTING[call.kind], entries(call, rank, len(shapes))
    return [
        words.format(own=ranks[rank], given=mine, other=ranks[other], shape=theirs)
        for other, (mine, theirs) in enumerate(zip(given, shapes, strict=False))
        if mine != theirs
    ]


def entries(call: Gathering | Distribution, rank: int, size: int) -> Sequence[Shape]:
    """Return the shapes of what `rank` gives for each in a gather or scatter; none: any fit."""
    if call.kind in ROOTED and rank != call.root:
        return ()
    if call.shapes:
        return call.shapes
    whole, runs = call.recv, call.receives
    if call.kind is Kind.SCATTER:
        whole, runs = call.send, call.sends
    return () if whole is None and not runs else (call.shape,) * size


def expected_counts(call: Gathering, size: int) -> Sequence[int] | None:
    """Return how many elements an alltoall expects from each rank; None: whatever comes."""
    if call.counts is not None:
        return call.counts[1]
    return None if call.recv is None else [call.recv.size // size] * size


def wrong_counts(
    ranks: Sequence[int], rank: int, expected: Sequence[int] | None, incoming: Sequence[int]
) -> list[str]:
    """Describe from whom `rank` expects other numbers of elements than are sent to it."""
    return [
        f"  rank {ranks[rank]} expects {count} elements from rank {ranks[source]}, which sends "
        f"{found}"
        for source, (count, found) in enumerate(zip(expected or (), incoming, strict=False))
        if count != found
    ]


def misfit(kind: Kind, lines: Iterable[str]) -> MismatchError:
    """Build the error that names what was given and what there is room for."""
    return MismatchError(
        f"the ranks disagree in {kind.name.lower()}; nothing was sent:\n"
        + "\n".join(lines)
        + "\nLet what one rank gives and the array that takes it on the other agree in shape (or "
        "split size); an empty list takes any"
    )


_GATHERED = "  rank {own} has an array of shape {given} for rank {other}, which gives {shape}"
_UNFITTING = table_for(
    "of the words for what does not fit",
    {Family.GATHERING, Family.DISTRIBUTION},
    {
        Kind.ALL_GATHER: _GATHERED,
        Kind.GATHER: _GATHERED,
        Kind.SCATTER: "  rank {own} gives shape {given} to rank {other}, whose array has {shape}",
    },
    without=(Kind.ALLTOALL, Kind.BROADCAST),  # their ranks compare counts, or shapes
)
FITTING = frozenset(_UNFITTING)
"""Operations in which one rank's list must fit the shapes of all ranks."""
