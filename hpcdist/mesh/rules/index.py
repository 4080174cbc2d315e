"""Indexing by integers, slices, `newaxis` and masks, and assignment to what is indexed.

A slice leaves each rank the part of it that it has: nothing is moved, the result is a view, and
its cuts are those of the array, as far as the slice reaches. An integer along a cut dimension
takes one place of it to all ranks along the axes that cut it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from hpcdist.boxes import Box
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules import masks, placing, taking
from hpcdist.mesh.rules.basis import (
    arranged,
    as_dist,
    broadcast,
    check_writable,
    cutting,
    detached,
    failing_alike,
    is_dist,
    make,
    mesh_of,
    own_box,
    own_slices,
    resharded,
    settled,
    view_of,
)
from hpcdist.mesh.rules.pointwise import part_of
from hpcdist.mesh.rules.shapes import flip, moveaxis, reshape, without_cuts
from hpcdist.named_tuple import NamedTuple

_NUMBERS = (bool, int, float, complex, np.generic)


class Selection(NamedTuple):
    """A basic index, resolved for arrays of one layout."""

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
    local, layout, selection, shows = found
    if selection is None:
        part = x.local[local]
        if isinstance(part, np.generic):
            return make(np.asarray(part), layout)
        return view_of(x, part, layout)
    part = _reversed(make(x.local[local], layout), selection)
    result = _finished(without_cuts(part, selection.dropped), selection)
    if not shows:
        return detached(result, x)
    return view_of(x, result.local, result.layout) if selection.final else result


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
    """Return the index into this rank's part, the layout of that, and what is left to be done.

    The last of the four tells whether the result shows the elements of the array, as a view does,
    or is a number of its own, as to NumPy.
    """
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
        moved = cutting(selection.layout, (*selection.dropped, *selection.reversed))
        own = not selection.final and all(item is not Ellipsis for item in items)
        return layout.remember(told, (here, selection.layout, selection, own or not moved))
    local: list[Any] = [
        each.start if dim in selection.dropped else each for dim, each in enumerate(here)
    ]
    for place, dim in enumerate(_with_dropped(selection)):
        if dim is None:
            local.insert(place, None)
    if not selection.final and any(item is Ellipsis for item in items):
        local.append(...)  # without dimensions, but a view
    final = arranged(selection.layout, selection.final)
    return layout.remember(told, (tuple(local), final, None, True))


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


# ---- arrays as indices


def _by_arrays(x: DistArray, items: tuple[Any, ...]) -> Any:
    """Return what a mask or integer arrays select.

    Several arrays are one array of indices into the dimensions that they index, taken as one.
    """
    if len(items) == 1 and _is_mask(items[0]):
        return masks.chosen(x, items[0])
    if _is_field(x, items):
        return view_of(x, x.local[items[0]], x.layout)
    found = _divided(items, x)
    return _taken(getitem(x, found.rest), found)


class _Chosen(NamedTuple):
    """An index by arrays."""

    rest: tuple[Any, ...]
    """It without them: a basic index, which leaves the dimensions whole that they index."""
    dims: list[int]
    """The dimensions that they index of what that selects."""
    indices: list[DistArray]
    home: int
    """The first dimension of the result that they have."""


def _divided(items: tuple[Any, ...], x: DistArray) -> _Chosen:
    items = _without_masks(items, x)
    chosen = [place for place, item in enumerate(items) if not _is_basic(item) or _is_number(item)]
    rest = tuple(slice(None) if place in chosen else item for place, item in enumerate(items))
    of_rest = _dims(rest, x.ndim + sum(item is None for item in rest))
    dims = [of_rest[place] for place in chosen]
    if x.layout.mesh.coordinate is None:
        for place, dim in zip(chosen, dims, strict=True):
            _check_outside(items[place], dim - rest[:place].count(None), x.shape)
    indices = [taking.as_indices(items[place], x.layout.mesh) for place in chosen]
    together = chosen == [*range(chosen[0], chosen[-1] + 1)]
    return _Chosen(rest, dims, indices, dims[0] if together else 0)


def _without_masks(items: tuple[Any, ...], x: DistArray) -> tuple[Any, ...]:
    """Return an index with the places where masks are true instead of the masks."""
    spans = [
        0 if item is None or item is Ellipsis else np.ndim(item) if _is_mask(item) else 1
        for item in items
    ]
    found: list[Any] = []
    dim = 0
    for item, span in zip(items, spans, strict=True):
        if not _is_mask(item):
            found.append(item)
        elif span:
            mask = masks.over(as_dist(item, x.layout.mesh), x.shape[dim:])
            found += masks.nonzero(mask) if is_dist(item) else _nonzero(item, mask.shape)
        else:
            raise UsageError(
                "a mask without dimensions is an index of its own, not one of several; take it by "
                "itself first, a[mask]"
            )
        dim += x.ndim - sum(spans) if item is Ellipsis else span
    return tuple(found)


def _nonzero(mask: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return where a mask that every rank has is true; one without elements is nowhere."""
    whole = np.asarray(mask)
    return np.nonzero(whole if whole.shape == shape else np.zeros(shape, bool))


def _check_outside(item: Any, dim: int, shape: tuple[int, ...]) -> None:
    """Refuse on a rank outside the mesh what the ranks of the mesh refuse."""
    if not is_dist(item):
        taking.check_indices(np.asarray(item), shape[dim], dim)


def _is_number(item: Any) -> bool:
    return item is not None and item is not Ellipsis and item.__class__ is not slice


def _dims(items: tuple[Any, ...], ndim: int) -> list[int]:
    """Return which dimension of what they select each item of a basic index is about."""
    spare = ndim - len(items) + sum(item is Ellipsis for item in items)
    dims, dim = [], 0
    for item in items:
        dims.append(dim)
        dim += spare if item is Ellipsis else 1
    return dims


def _taken(x: DistArray, found: _Chosen) -> Any:
    """Return the elements at places along some dimensions."""
    dims, indices, home = found.dims, found.indices, found.home
    if len(dims) == 1:
        return taking.take(x, indices[0], axis=dims[0])
    shape = placing.shape_of(indices)
    places = [
        taking.valid(each, x.shape[dim], dim) for dim, each in zip(dims, indices, strict=True)
    ]
    x = moveaxis(x, dims, [*range(len(dims))])
    whole = all(each.layout.is_replicated for each in places)
    if whole and not cutting(x.layout, range(len(dims))):
        taken = _taken_here(x, [each.local for each in places], shape)
    else:
        flat: Any = 0
        for length, each in zip(x.shape, places, strict=False):
            flat = flat * length + each
        lines = reshape(x, (math.prod(x.shape[: len(dims)]), *x.shape[len(dims) :]))
        taken = taking.take(lines, flat, axis=0)
    return moveaxis(taken, [*range(len(shape))], [*range(home, home + len(shape))])


def _taken_here(x: DistArray, places: list[Any], shape: tuple[int, ...]) -> DistArray:
    """Return the elements at places along the first dimensions, which are not cut."""
    layout, depth, new = x.layout, len(places), len(shape)
    final = make_layout(
        layout.mesh,
        (*shape, *layout.shape[depth:]),
        (*((),) * new, *layout.axes[depth:]),
        (*(None,) * new, *layout.cuts[depth:]),
    )
    if layout.mesh.coordinate is None:
        return make(np.empty((0,) * len(final.shape), x.dtype), final)
    return make(np.asarray(x.local[tuple(places)]), final)


def _is_basic(item: Any) -> bool:
    try:
        _hashable(item)
    except TypeError:
        return False
    return True


def _is_field(x: DistArray, items: tuple[Any, ...]) -> bool:
    if x.dtype.names is None or len(items) != 1 or not isinstance(items[0], str):
        return False
    if items[0] in x.dtype.names and x.dtype[items[0]].shape:
        raise UsageError(f"the field {items[0]!r} has arrays; take it of each rank's own part")
    return True


def _is_mask(item: Any) -> bool:
    if isinstance(item, (bool, np.bool_)):
        return True
    return (is_dist(item) or isinstance(item, (np.ndarray, list))) and _kind(item) == "b"


def _kind(item: Any) -> str:
    try:
        return str(item.dtype.kind if hasattr(item, "dtype") else np.asarray(item).dtype.kind)
    except ValueError:  # nested lists of different lengths are no mask
        return ""


# ---- assignment


def _without_new(found: _Chosen, value: Any, ndim: int) -> tuple[_Chosen, Any]:
    """Return an index, and the value for it, without the new dimensions, which are of length 1."""
    ndim += found.rest.count(None)
    of_rest = _dims(found.rest, ndim)
    new = [dim for item, dim in zip(found.rest, of_rest, strict=True) if item is None]
    others = [dim for dim in range(ndim) if dim not in found.dims]
    depth = len(placing.shape_of(found.indices))
    ones = [place + depth * (place >= found.home) for place, dim in enumerate(others) if dim in new]
    spare = len(others) + depth - value.ndim  # leading dimensions that the value lacks
    value = np.squeeze(value, tuple([place - spare for place in ones if place >= spare]))

    def without(dim: int) -> int:
        return dim - sum(each < dim for each in new)

    rest = tuple([item for item in found.rest if item is not None])
    dims = [*map(without, found.dims)]
    return _Chosen(rest, dims, found.indices, without(found.home)), value


def setitem(x: DistArray, key: Any, value: Any) -> None:
    """Write ``x[key] = value``: each rank its own part."""
    if x.layout.is_partial:
        raise UsageError(
            f"there is no one place for a value in {x.layout!r}, which has contributions; combine "
            "them first, by dist.reshard(a, mesh, placements) without Partial"
        )
    check_writable(x)
    items = key if key.__class__ is tuple else (key,)
    if not all(map(_is_basic, items)):
        if _is_field(x, items):
            setitem(getitem(x, key), ..., value)
            return
        if len(items) == 1 and _is_mask(items[0]) and np.ndim(items[0]):
            masks.assign(x, items[0], value)
            return
        _assign_by_arrays(x, items, value)
        return
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
        value = placing.trimmed(settled(placing.converted(value, x.dtype)), len(shape))
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
    array = placing.trimmed(placing.converted(value, x.dtype), len(shape))
    array = np.broadcast_to(array, shape).reshape(wanted)
    part[...] = np.flip(array, selection.reversed)[own_slices(selection.layout)]


def _assign_by_arrays(x: DistArray, items: tuple[Any, ...], value: Any) -> None:
    if len(items) == 1 and _is_mask(items[0]):  # one without dimensions
        if bool(items[0]):
            setitem(x, (None, ...), value)
        return
    mesh = x.layout.mesh
    found, selection, places, value = failing_alike(
        lambda: _assignment(x, items, value),
        mesh,
        range(mesh.ndim),
        IndexError("another rank has a wrong index or value; give all ranks the same"),
    )
    if mesh.coordinate is None:
        return
    here = selection.here(own_box(x.layout))
    placing.place(
        x, here, selection.layout, found.dims, places, found.home, selection.reversed, value
    )


def _assignment(
    x: DistArray, items: tuple[Any, ...], value: Any
) -> tuple[_Chosen, Selection, list[DistArray], Any]:
    """Return what an index by arrays means, its places, and the value, if it fits."""
    found = _divided(items, x)
    value = placing.converted(value, x.dtype)
    if None in found.rest:
        found, value = _without_new(found, value, x.ndim)
    selection = selected(x.layout, found.rest)
    places = placing.places_of(found.indices, found.dims, x.shape)
    placing.check_value(x, selection.layout, found.dims, places, found.home, value)
    return found, selection, places, value
