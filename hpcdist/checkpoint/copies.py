"""`Copy`: elements that go from a stored box to a wanted one, as strides. Pure.

Both boxes lie in memory of their own, in C order. What they have in common is strided in both, as
MPI's vector types are; dimensions that follow each other in both are joined, so that what is
contiguous is one run. A file is read in blocks, so a copy can be cut into the parts that are in
each block (`in_blocks`); blocks without any are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcdist.boxes import position_of, strides_of
from hpcdist.checkpoint.boxes import (
    Box,
    Shape,
    boxes_of_run,
    intersection,
    position_in,
    unfolded,
)
from hpcdist.named_tuple import NamedTuple

Strides = tuple[int, ...]


class Copy(NamedTuple):
    """So many elements along each dimension, from and to memory; all counts are in elements."""

    lengths: Shape
    source: int
    """Where the first one is."""
    source_strides: Strides
    target: int
    target_strides: Strides

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def is_run(self) -> bool:
        """Whether the elements follow each other in both."""
        return len(self.lengths) == self.source_strides[0] == self.target_strides[0] == 1


def copies_between(stored: Box, wanted: Box, shape: Shape) -> list[Copy]:
    """Return what to copy from one box of an array to another, in the order of the source."""
    if stored.is_run and wanted.is_run:
        return _between_runs(stored, wanted)
    sources, targets = unfolded(stored, shape), unfolded(wanted, shape)
    return [
        _copy(common, source, before, target, behind)
        for source, before in sources
        for target, behind in targets
        if (common := intersection(source, target)) is not None
    ]


def _between_runs(stored: Box, wanted: Box) -> list[Copy]:
    """Return the copy between runs, which most boxes of most checkpoints are."""
    (here,), (length,) = stored
    (there,), (other,) = wanted
    start = max(here, there)
    size = min(here + length, there + other) - start
    return [Copy((size,), start - here, (1,), start - there, (1,))] if size > 0 else []


def _copy(common: Box, source: Box, before: int, target: Box, behind: int) -> Copy:
    """Return the copy of elements of two boxes that have so many elements before them."""
    here, there = strides_of(source.lengths), strides_of(target.lengths)
    return _merge_dims(
        Copy(
            common.lengths,
            before + position_in(source, common),
            here,
            behind + position_in(target, common),
            there,
        )
    )


def _merge_dims(copy: Copy) -> Copy:
    """Join dimensions that follow each other in both memories."""
    # From the innermost dimension outwards: one joins the last if in both memories its stride is
    # the whole extent of that one.
    axes: list[tuple[int, int, int]] = []
    for length, here, there in reversed(
        list(zip(copy.lengths, copy.source_strides, copy.target_strides, strict=True))
    ):
        if length == 1:
            continue
        inner, *steps = axes[-1] if axes else (0, 0, 0)
        if axes and [here, there] == [inner * step for step in steps]:
            axes[-1] = (inner * length, steps[0], steps[1])
        else:
            axes.append((length, here, there))
    lengths, heres, theres = zip(*reversed(axes or [(1, 1, 1)]), strict=True)
    return Copy(lengths, copy.source, heres, copy.target, theres)


def in_bytes(copy: Copy, itemsize: int) -> Copy:
    """Return a copy whose elements are the bytes of elements."""
    return _merge_dims(
        Copy(
            (*copy.lengths, itemsize),
            copy.source * itemsize,
            (*(each * itemsize for each in copy.source_strides), 1),
            copy.target * itemsize,
            (*(each * itemsize for each in copy.target_strides), 1),
        )
    )


def in_blocks(copy: Copy, block: int) -> Iterator[tuple[int, list[Copy]]]:
    """Give the numbers of the blocks of the source that have elements, and the parts in each.

    Args:
        copy: from a stored box, whose elements are in C order.
        block: how many elements a block of the source has.

    """
    return _run_in_blocks(copy, block) if copy.is_run else _strided_in_blocks(copy, block)


def _strided_in_blocks(copy: Copy, block: int) -> Iterator[tuple[int, list[Copy]]]:
    done, inner = 0, strides_of(copy.lengths)
    while done < copy.size:
        number = _place(copy.source, copy.source_strides, done, inner) // block
        upto = _before(copy, (number + 1) * block, inner)
        yield number, [_part(copy, box) for box in boxes_of_run(done, upto, copy.lengths)]
        done = upto


def _run_in_blocks(copy: Copy, block: int) -> Iterator[tuple[int, list[Copy]]]:
    (size,), source, _, target, _ = copy
    for number in range(source // block, -(-(source + size) // block)):
        first = max(source, number * block)
        stop = min(source + size, number * block + block)
        yield number, [Copy((stop - first,), first, (1,), target + first - source, (1,))]


def _place(start: int, strides: Strides, count: int, inner: Strides) -> int:
    """Return where the element is that has `count` others before it."""
    for stride, size in zip(strides, inner, strict=True):
        start += count // size * stride
        count %= size
    return start


def _before(copy: Copy, limit: int, inner: Strides) -> int:
    """Return how many elements of a copy are in the source before `limit`, where its first is."""
    # The index of the last element before the limit: outer dimensions first, each as far as it
    # goes. That is exact because an outer stride is at least the extent of what is inside.
    left, count = limit - copy.source, 0
    for length, stride, size in zip(copy.lengths, copy.source_strides, inner, strict=True):
        last = min(length, -(-left // stride)) - 1
        count += last * size
        left -= last * stride
    return count + 1


def _part(copy: Copy, box: Box) -> Copy:
    return _merge_dims(
        copy._replace(
            lengths=box.lengths,
            source=copy.source + position_of(box.offsets, copy.source_strides),
            target=copy.target + position_of(box.offsets, copy.target_strides),
        )
    )
