"""Whether boxes are all of an array, each element once: exact, without looking at elements. Pure.

Boxes that divide an array like a grid, as ranks do, are known by their offsets alone. Others are
cut apart: along a dimension in which boxes stand behind each other, each group of them must fill
its own slab. Only boxes that no cut separates are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hpcdist.checkpoint.boxes import Box, Shape, between, intersection, unfolded, whole
from hpcdist.named_tuple import NamedTuple


class Flaw(NamedTuple):
    """Elements that are in no box, or in two."""

    box: Box
    is_double: bool


_Slab = tuple[Box, Sequence[Box]]
"""A region, and the boxes that must fill it."""


def flaw_of(boxes: Collection[Box], shape: Shape) -> Flaw | None:
    """Return the first elements that are not in exactly one of the boxes; None if there are none.

    The answer is a run of elements if all boxes are runs.
    """
    if len(boxes) == 1 and whole(shape) in boxes:
        return None
    boxes, region = in_one_view(boxes, shape)
    if grid_of(boxes, region) is not None:
        return None
    todo: list[_Slab] = [(region, boxes)] if region.size else []
    while todo:
        region, boxes = todo.pop()
        flaw, parts = _divided(region, boxes)
        if flaw is not None:
            return flaw
        todo += reversed(parts)  # the first slab is popped first, so that the first flaw is found
    return None


def in_one_view(boxes: Collection[Box], shape: Shape) -> tuple[Sequence[Box], Box]:
    """Return boxes and the whole array as runs, if all boxes are, or else in all dimensions."""
    filled = [box for box in boxes if box.size]
    if all(box.is_run for box in filled):
        return filled, whole(shape)
    parts = [part for box in filled for part, _ in unfolded(box, shape)]
    return parts, Box((0,) * len(shape), shape)


def grid_of(boxes: Sequence[Box], region: Box) -> tuple[int, ...] | None:
    """Return how many boxes there are along each dimension, if they divide a region like a grid.

    None for any other boxes. Where they are a grid, every element is in one of them: the boxes that
    begin at one index all end where the next ones begin, and there are as many boxes as cells.
    """
    following = []
    for axis, (start, stop) in enumerate(zip(region.offsets, region.ends, strict=True)):
        starts = sorted({box.offsets[axis] for box in boxes})
        if not starts or starts[0] != start:
            return None
        following.append(dict(zip(starts, [*starts[1:], stop], strict=True)))
    counts = tuple(map(len, following))
    cells = 1
    for count in counts:
        cells *= count
    if not cells == len(boxes) == len({box.offsets for box in boxes}):
        return None
    right = all(
        after[start] == start + length
        for box in boxes
        for after, start, length in zip(following, *box, strict=True)
    )
    return counts if right else None


def _divided(region: Box, boxes: Sequence[Box]) -> tuple[Flaw | None, list[_Slab]]:
    """Cut a region where boxes stand behind each other; return what is left to look at."""
    for axis in range(len(region.offsets)):
        slabs: list[_Slab] = []
        position = region.offsets[axis]
        for start, stop, group in _groups(boxes, axis):
            if start > position:
                return Flaw(between(region, axis, position, start), False), []
            slabs.append((between(region, axis, start, stop), group))
            position = stop
        if position < region.ends[axis]:
            return Flaw(between(region, axis, position, region.ends[axis]), False), []
        if len(slabs) > 1:
            return None, slabs
    return (_compared(region, boxes) if len(boxes) > 1 else None), []


def _groups(boxes: Sequence[Box], axis: int) -> Iterator[tuple[int, int, list[Box]]]:
    """Give groups of boxes that are apart along a dimension, with start and end, in order."""
    group: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda each: each.offsets[axis]):
        if group and box.offsets[axis] >= end:
            yield group[0].offsets[axis], end, group
            group = []
        group.append(box)
        end = max(end, box.ends[axis])
    if group:
        yield group[0].offsets[axis], end, group


def _compared(region: Box, boxes: Sequence[Box]) -> Flaw | None:
    """Compare boxes in pairs, those that can meet; then they fill the region if they can."""
    near: list[Box] = []
    for box in sorted(boxes):
        near = [each for each in near if each.ends[0] > box.offsets[0]]
        for each in near:
            common = intersection(each, box)
            if common is not None:
                return Flaw(common, True)
        near.append(box)
    # No two overlap and all are inside, so they fill the region exactly if the sizes add up.
    if sum(box.size for box in boxes) == region.size:
        return None
    left = [region]
    for box in boxes:
        left = [part for each in left for part in _without(each, box)]
    return Flaw(min(left), False)


def _without(box: Box, other: Box) -> list[Box]:
    """Return boxes that are together what is not in the other one."""
    common = intersection(box, other)
    if common is None:
        return [box]
    parts = []
    for axis in range(len(box.offsets)):
        for start, stop in (
            (box.offsets[axis], common.offsets[axis]),
            (common.ends[axis], box.ends[axis]),
        ):
            if start < stop:
                parts.append(between(box, axis, start, stop))
        box = between(box, axis, common.offsets[axis], common.ends[axis])
    return parts
