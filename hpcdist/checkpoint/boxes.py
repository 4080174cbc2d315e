"""`Box`: a part of an array, told by where it begins and how long it is along each dimension. Pure.

[Note: runs] A box with one offset and one length is a *run*: elements that follow each other in the
array flattened in C order, whatever dimensions the array has. `simplest` makes a run of every box
that is one, so that two boxes are equal if and only if they have the same elements. `unfolded` cuts
a run into boxes of all dimensions; it takes fewer than two for each dimension.
"""

from __future__ import annotations

import math
from operator import add, le, sub

from hpcdist.boxes import position_of, strides_of
from hpcdist.named_tuple import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of an array: `lengths` elements from `offsets` on; see [Note: runs]."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index along each dimension that is behind the box."""
        return tuple(map(add, *self))

    @property
    def is_run(self) -> bool:
        """Whether it is given as elements of the flattened array."""
        return len(self.offsets) == 1

    def __str__(self) -> str:
        pairs = zip(self.offsets, self.ends, strict=True)
        return f"[{', '.join(f'{start}:{stop}' for start, stop in pairs)}]"


EMPTY = Box((0,), (0,))
"""The simplest box without elements."""


def run(start: int, stop: int) -> Box:
    """Return the elements from `start` to before `stop` of a flattened array."""
    return Box((start,), (stop - start,))


def whole(shape: Shape) -> Box:
    """Return all of an array."""
    return run(0, math.prod(shape))


def lies_in(box: Box, shape: Shape) -> bool:
    """Return whether an array of this shape has such a box."""
    ends = (math.prod(shape),) if box.is_run else shape
    return (
        len(box.offsets) == len(box.lengths) == len(ends)
        and min(box.offsets + box.lengths, default=0) >= 0
        and all(map(le, box.ends, ends))
    )


def simplest(box: Box, shape: Shape) -> Box:
    """Return a box of an array of this shape as a run, if it is one."""
    if not box.size:
        return EMPTY
    axis = _first_axis(box)
    if box.is_run or box.lengths[axis + 1 :] != shape[axis + 1 :]:
        return box
    start = position_of(box.offsets, strides_of(shape))
    return run(start, start + box.size)


def _first_axis(box: Box) -> int:
    """Return the first dimension along which a box has more than one element, or the last one."""
    long = (axis for axis, length in enumerate(box.lengths) if length > 1)
    return next(long, len(box.lengths) - 1)


def unfolded(box: Box, shape: Shape) -> list[tuple[Box, int]]:
    """Return boxes of all dimensions which together are a box of an array, in C order.

    With each comes how many elements of the box are before its own.
    """
    if not box.size:
        return []
    if not box.is_run or len(shape) == 1:
        return [(box, 0)]
    before, found = 0, []
    for each in boxes_of_run(box.offsets[0], box.ends[0], shape):
        found.append((each, before))
        before += each.size
    return found


def boxes_of_run(start: int, stop: int, shape: Shape) -> list[Box]:
    """Return boxes of all dimensions with the elements from `start` to before `stop`, in C order.

    They are the end of a row, whole rows, and the beginning of a row, which are cut likewise.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row
    if first > last:
        return _in_row(last, start - last * row, stop - last * row, inner)
    head = _in_row(first - 1, start - (first - 1) * row, row, inner) if start < first * row else []
    rows = Box((first, *(0,) * len(inner)), (last - first, *inner))
    return [*head, *([rows] if rows.size else []), *_in_row(last, 0, stop - last * row, inner)]


def _in_row(row: int, start: int, stop: int, inner: Shape) -> list[Box]:
    found = boxes_of_run(start, stop, inner)
    return [Box((row, *each.offsets), (1, *each.lengths)) for each in found]


def position_in(box: Box, part: Box) -> int:
    """Return how many elements of a box, in C order, are before the first one of a part of it."""
    return position_of(tuple(map(sub, part.offsets, box.offsets)), strides_of(box.lengths))


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes of equally many dimensions have in common; None for nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    lengths = tuple(map(sub, map(min, one.ends, other.ends), offsets))
    return Box(offsets, lengths) if min(lengths, default=1) > 0 else None


def contains(box: Box, part: Box) -> bool:
    """Return whether a part, given as the box is, lies in it."""
    return (
        len(box.offsets) == len(part.offsets)
        and all(map(le, box.offsets, part.offsets))
        and all(map(le, part.ends, box.ends))
    )


def between(box: Box, axis: int, start: int, stop: int) -> Box:
    """Return a box which is from `start` to before `stop` along one dimension."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[axis], lengths[axis] = start, stop - start
    return Box(tuple(offsets), tuple(lengths))


def row_size(box: Box) -> int:
    """Return how many elements a row has: the smallest part that `split` cuts off."""
    return box.size // max(1, box.lengths[_first_axis(box)])


def split(box: Box, rows: int) -> tuple[Box, Box]:
    """Return the first rows of a box, and the others; a row of a run is an element."""
    axis = _first_axis(box)
    cut = box.offsets[axis] + rows
    return (
        between(box, axis, box.offsets[axis], cut),
        between(box, axis, cut, box.ends[axis]),
    )
