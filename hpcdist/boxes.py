"""Boxes: parts of an array, told as a pair ``(lo, hi)`` for each dimension. Pure.

The box of an array without dimensions is ``()`` and has one element.
"""

from __future__ import annotations

import math

Box = tuple[tuple[int, int], ...]


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


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box is in an array that holds the box `outer` around it."""
    return tuple([slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(box, outer, strict=True)])
