"""Indexing by integers, slices, `newaxis` and masks, and assignment to what is indexed.

A slice leaves each rank the part of it that it has: nothing is moved, the result is a view, and
its cuts are those of the array, as far as the slice reaches. An integer along a cut dimension
takes one place of it to all ranks along the axes that cut it.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.boxes import Box
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules import masks, taking
from hpcdist.mesh.rules.basis import (
    arranged,
    broadcast,
    cutting,
    is_dist,
    make,
    mesh_of,
    own_box,
    own_slices,
    resharded,
    settled,
)
from hpcdist.mesh.rules.pointwise import part_of
from hpcdist.mesh.rules.shapes import flip, reshape, without_cuts

_NUMBERS = (bool, int, float, complex, np.generic)


class Selection(NamedTuple):
    """What a basic index means for arrays of one layout."""

    layout: Layout
    """Of the elements selected, before integers drop their dimensions."""
    steps: tuple[range, ...]
    """The places along each dimension, ascending."""
    reversed: tuple[int, ...]
    """The dimensions that a negative step reverses."""
    dropped: tuple[int, ...]
    """The dimensions that an integer drops."""
    final: tuple[int | None, ...]
    """The dimensions of the result: those of `layout`, or None for a new one."""

    def here(self, box: Box) -> tuple[slice, ...]:
        """Return where what is selected lies in the part that has a box."""
        return tuple(
            [_within(places, lo, hi) for places, (lo, hi) in zip(self.steps, box, strict=True)]
        )


def _within(places: range, lo: int, hi: int) -> slice:
    first, last = _before(places, lo), _before(places, hi)
    if first == last:
        return slice(0, 0)
    return slice(places[first] - lo, places[last - 1] - lo + 1, places.step)


def _before(places: range, bound: int) -> int:
    """Return how many of some ascending places are before a boundary."""
    return min(max(-((places.start - bound) // places.step), 0), len(places))


def getitem(x: DistArray, key: Any) -> Any:
    """Return ``x[key]``."""
    items = key if key.__class__ is tuple else (key,)
    try:
        told = "index", x.layout.mesh.coordinate, *[_hashable(item) for item in items]
        found = x.layout.memo.get(told)
    except TypeError:
        return _by_arrays(x, items)
    if found is None:
        found = _plan(x, items, told)
    local, layout, selection = found
    if selection is None:
        return make(_array(x.local[local]), layout)
    part = _reversed(make(x.local[local], layout), selection)
    return _finished(without_cuts(part, selection.dropped), selection)


def _hashable(item: Any) -> Any:
    """Return an item of a basic index as a key; raise TypeError for any other."""
    if item.__class__ is slice:
        start, stop, step = item.start, item.stop, item.step
        for bound in (start, stop, step):
            if bound is not None and bound.__class__ is not int:
                return tuple([each and operator.index(each) for each in (start, stop, step)])
        return start, stop, step
    if item.__class__ is int or item is None or item is Ellipsis:
        return item
    if isinstance(item, (bool, np.bool_)) or (is_dist(item) and item.shape):
        raise TypeError
    return operator.index(item)


def _plan(x: DistArray, items: tuple[Any, ...], told: Any) -> Any:
    """Return the index into this rank's part, the layout of that, and what is left to be done."""
    layout = x.layout
    if layout.is_partial:
        raise UsageError(
            f"an index needs values, but {layout!r} has contributions to them; combine them first, "
            "by dist.reshard(a, mesh, placements) without Partial"
        )
    selection = selected(layout, items)
    here = selection.here(own_box(layout))
    if (
        selection.reversed
        or cutting(selection.layout, selection.dropped)
        or layout.mesh.coordinate is None
    ):
        return layout.remember(told, (here, selection.layout, selection))
    local: list[Any] = [
        each.start if dim in selection.dropped else each for dim, each in enumerate(here)
    ]
    for place, dim in enumerate(_with_dropped(selection)):
        if dim is None:
            local.insert(place, None)
    return layout.remember(told, (tuple(local), arranged(selection.layout, selection.final), None))


def _with_dropped(selection: Selection) -> list[int | None]:
    """Return the dimensions of the result with those that are dropped, in their order."""
    dims, rest = [*selection.final], [*selection.dropped]
    for dropped in rest:
        place = next(
            (place for place, dim in enumerate(dims) if dim is not None and dim > dropped),
            len(dims),
        )
        dims.insert(place, dropped)
    return dims


def selected(layout: Layout, items: tuple[Any, ...]) -> Selection:
    """Return what a basic index means."""
    ndim = len(layout.shape)
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > ndim:
        raise IndexError(
            f"too many indices: the array has {ndim} dimensions, but {used} were indexed"
        )
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not any(item is Ellipsis for item in items):
        items = (*items, Ellipsis)
    steps: list[range] = []
    final: list[int | None] = []
    backwards, dropped = [], []
    for item in items:
        if item is None:
            final.append(None)
        elif item is Ellipsis:
            for _ in range(ndim - used):
                final.append(len(steps))
                steps.append(range(layout.shape[len(steps)]))
        elif item.__class__ is slice:
            places = range(*item.indices(layout.shape[len(steps)]))
            if places.step < 0:
                backwards.append(len(steps))
                places = places[::-1] if places else range(0)
            final.append(len(steps))
            steps.append(places)
        else:
            dropped.append(len(steps))
            steps.append(_place(operator.index(item), len(steps), layout.shape))
    cuts = [
        tuple([_before(places, cut) for cut in each])
        for places, each in zip(steps, layout.cuts, strict=True)
    ]
    chosen = make_layout(layout.mesh, [*map(len, steps)], layout.axes, cuts)
    return Selection(chosen, tuple(steps), tuple(backwards), tuple(dropped), tuple(final))


def _place(index: int, dim: int, shape: tuple[int, ...]) -> range:
    length = shape[dim]
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of bounds for axis {dim} with size {length}")
    return range(index % length, index % length + 1)


def _reversed(part: DistArray, selection: Selection) -> DistArray:
    return flip(part, selection.reversed) if selection.reversed else part


def _finished(part: DistArray, selection: Selection) -> DistArray:
    """Return what is selected with the dimensions of the result."""
    layout = arranged(part.layout, selection.final)
    here = layout.mesh.coordinate
    if here is None:
        return make(np.empty((0,) * len(layout.shape), part.dtype), layout)
    return make(part.local.reshape(layout.local_shape(here)), layout)


def _array(part: Any) -> Any:
    return np.asarray(part) if isinstance(part, np.generic) else part


# ---- arrays as indices


def _by_arrays(x: DistArray, items: tuple[Any, ...]) -> Any:
    """Return what a mask or integer arrays select."""
    if len(items) == 1 and _is_mask(items[0]):
        return masks.chosen(x, items[0])
    where = [place for place, item in enumerate(items) if not _is_basic(item)]
    if len(where) == 1 and not _is_mask(items[where[0]]):
        (place,) = where
        rest = (*items[:place], slice(None), *items[place + 1 :])
        if not any(item is None or isinstance(item, (int, np.integer)) for item in rest):
            dims = [item for item in rest if item is not Ellipsis]
            dim = place if Ellipsis not in items[:place] else x.ndim - (len(items) - place)
            if len(dims) <= x.ndim:
                index = items[place]
                if isinstance(index, list) and not np.size(index):
                    index = np.asarray(index, np.intp)
                return taking.take(getitem(x, rest), index, axis=dim)
    return without_rule("indexing by arrays", operator.getitem, (x, items), {}, _ARRAYS_HINT)


_ARRAYS_HINT = "Index one dimension by an array at a time, as take(a, indices, axis=0) does"


def _is_basic(item: Any) -> bool:
    try:
        _hashable(item)
    except TypeError:
        return False
    return True


def _is_mask(item: Any) -> bool:
    if isinstance(item, (bool, np.bool_)):
        return True
    return (is_dist(item) or isinstance(item, (np.ndarray, list))) and _dtype(item).kind == "b"


def _dtype(item: Any) -> Any:
    return item.dtype if hasattr(item, "dtype") else np.asarray(item).dtype


# ---- assignment


def setitem(x: DistArray, key: Any, value: Any) -> None:
    """Write ``x[key] = value``: each rank its own part."""
    if x.layout.is_partial:
        raise UsageError(
            f"there is no one place for a value in {x.layout!r}, which has contributions; combine "
            "them first, by dist.reshard(a, mesh, placements) without Partial"
        )
    items = key if key.__class__ is tuple else (key,)
    if not all(map(_is_basic, items)):
        if len(items) == 1 and _is_mask(items[0]):
            masks.assign(x, items[0], value)
            return
        raise UsageError(
            f"assignment to elements chosen by integer arrays has no rule for {x.layout!r}; assign "
            "to slices, or where a mask is true"
        )
    selection = selected(x.layout, items)
    here: Any = (*selection.here(own_box(x.layout)), ...)
    part = x.local[here]
    if isinstance(value, _NUMBERS) or (not is_dist(value) and np.ndim(value) == 0):
        part[...] = value
        return
    shape = [1 if dim is None else selection.layout.shape[dim] for dim in selection.final]
    wanted = [
        1 if dim in selection.dropped else length
        for dim, length in enumerate(selection.layout.shape)
    ]
    if is_dist(value):
        mesh_of(x, value)
        value = _trimmed(settled(value), len(shape))
        if broadcast(value.shape, shape) != tuple(shape):
            raise ValueError(f"cannot broadcast an array of shape {value.shape} to {tuple(shape)}")
        # It is moved as it is, and broadcast where it is written.
        own = dict(zip(reversed(selection.final), reversed(value.shape), strict=False))
        narrow = tuple([own.get(dim, 1) for dim in range(len(wanted))])
        value = reshape(value, narrow)
        backwards = [dim for dim in selection.reversed if narrow[dim] != 1]
        value = flip(value, tuple(backwards)) if backwards else value
        part[...] = resharded(value, part_of(selection.layout, narrow)).local
        return
    array = np.asarray(value)
    while array.ndim > len(shape) and array.shape[0] == 1:
        array = array[0]
    array = np.broadcast_to(array, shape).reshape(wanted)
    part[...] = np.flip(array, selection.reversed)[own_slices(selection.layout)]


def _trimmed(value: DistArray, ndim: int) -> DistArray:
    """Return the value without leading dimensions of length 1 that the target does not have."""
    spare = value.ndim - ndim
    if spare > 0 and value.shape[:spare] == (1,) * spare:
        return reshape(value, value.shape[spare:])  # type: ignore[no-any-return]
    return value
