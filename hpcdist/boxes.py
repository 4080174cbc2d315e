"""Boxes: parts of an array, told as a pair ``(lo, hi)`` for each dimension. Pure.

The box of an array without dimensions is ``()`` and has one element. What is sent is told as
`Slices`, which show it of an array; files of checkpoints have boxes of their own, which may be runs
of elements (`checkpoint/boxes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Box = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]
"""A box as an index: slices with a start and a stop."""


def whole(shape: tuple[int, ...]) -> Box:
    """Return all of an array."""
    return tuple((0, length) for length in shape)


def meet(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one array have in common; None for nothing."""
    common = []
    for (x, y), (u, v) in zip(a, b):  # noqa: B905 - both are of one array
        lo, hi = x if x > u else u, y if y < v else v
        if lo >= hi:
            return None
        common.append((lo, hi))
    return tuple(common)


def volume(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod([hi - lo for lo, hi in box])


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of an array that holds a box."""
    return tuple([hi - lo for lo, hi in box])


def within(box: Box, outer: Box) -> Slices:
    """Return where a box is in an array that holds the box `outer` around it."""
    return tuple([slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(box, outer, strict=True)])


# ---- elements in memory


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return how many elements apart neighbours along each dimension are, in C order."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def position_of(index: Sequence[int], strides: Sequence[int]) -> int:
    """Return where an element is in memory, in elements."""
    return sum(map(mul, index, strides))


# ---- as slices


def slices(box: Box) -> Slices:
    """Return a box as an index."""
    return tuple([slice(lo, hi) for lo, hi in box])


def bounds(index: Slices) -> Box:
    """Return the box that slices show."""
    return tuple([(each.start, each.stop) for each in index])


def extents(index: Slices) -> tuple[int, ...]:
    """Return the shape of what slices show."""
    return tuple([each.stop - each.start for each in index])


def volume_of(index: Slices) -> int:
    """Return how many elements slices show."""
    return math.prod(extents(index))
