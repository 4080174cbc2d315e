"""Many arrays as one run of memory, and back.

Collectives that take a list of arrays (scatter, gather, alltoall ...) move one contiguous
block per rank. Arrays that already lie one after the other are used where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from hpcdist.arrays.buffer import Buffer
from hpcdist.arrays.device import align_streams
from hpcdist.arrays.libraries import NumpyArray


def join(
    buffers: Sequence[Buffer], empty: Callable[[int, np.dtype], NumpyArray] | None = None
) -> NumpyArray:
    """Return the memory of `buffers` (one dtype) as one flat array, copied only if apart.

    `empty` makes the memory for a copy; by default it is where the first one is.
    """
    adjacent = adjacent_view(buffers)
    if adjacent is not None:
        return adjacent
    flats = [buffer.data.reshape(-1) for buffer in buffers]
    count = sum(flat.size for flat in flats)
    if empty is None:
        align_streams(flats[0])
        return np.concatenate(flats, out=np.empty_like(flats[0], shape=(count,)))
    return np.concatenate(flats, out=empty(count, flats[0].dtype))


def adjacent_view(buffers: Sequence[Buffer]) -> NumpyArray | None:
    """Return one flat array over `buffers` if they follow each other in memory."""
    first = buffers[0].data.reshape(-1)
    base = first.base
    if len(buffers) == 1:
        return first
    if not isinstance(base, np.ndarray) or base.nbytes < sum(each.data.nbytes for each in buffers):
        return None
    if not base.flags.c_contiguous:
        return None
    if base.dtype == np.uint8 and base.size % first.itemsize == 0:  # memory made by `empty`
        base = base.reshape(-1).view(first.dtype)
    if base.dtype != first.dtype:
        return None
    expected = start = _address(first)
    for buffer in buffers:
        if buffer.home is not None or _address(buffer.data) != expected:
            return None
        expected += buffer.data.nbytes
    offset, unaligned = divmod(start - _address(base), first.itemsize)
    count = (expected - start) // first.itemsize
    whole = base.reshape(-1)
    if unaligned or offset < 0 or offset + count > whole.size:
        return None
    return whole[offset : offset + count]


def scatter_into(flat: NumpyArray, buffers: Sequence[Buffer]) -> None:
    """Copy consecutive runs of `flat` into `buffers` and unpack them."""
    start = 0
    for buffer in buffers:
        stop = start + buffer.data.size
        target = buffer.data.reshape(-1)
        if not np.may_share_memory(target, flat):
            target[...] = flat[start:stop]
        buffer.unpack()
        start = stop


def same_memory(one: NumpyArray, other: NumpyArray) -> bool:
    """Return whether two contiguous host arrays are the same bytes."""
    return one.nbytes == other.nbytes and _address(one) == _address(other)


def overlap(arrays: Sequence[NumpyArray], others: Sequence[NumpyArray]) -> bool:
    """Return whether contiguous host arrays have memory in common with others."""
    ends = [0, 0]
    spans = [(array, whose) for whose, given in enumerate((arrays, others)) for array in given]
    for begin, end, whose in sorted(_span(array, whose) for array, whose in spans if array.nbytes):
        if begin < ends[1 - whose]:
            return True
        ends[whose] = max(ends[whose], end)
    return False


def overlap_each_other(arrays: Sequence[NumpyArray]) -> bool:
    """Return whether any two of these contiguous host arrays have memory in common."""
    spans = sorted(_span(array) for array in arrays if array.nbytes)
    return any(after[0] < before[1] for before, after in pairwise(spans))


def _span(array: NumpyArray, whose: int = 0) -> tuple[int, int, int]:
    begin = _address(array)
    return begin, begin + array.nbytes, whose


def _address(array: NumpyArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
