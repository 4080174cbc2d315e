"""`Layout`: which box of an array each rank of a mesh holds. Pure.

A layout exists once: equal ones are the same object, so that ``a.layout is b.layout`` is all that
an operation on two arrays has to ask. What follows from a layout is remembered by it.

[Note: cuts] Along each dimension a layout has the axes of the mesh that cut it, the major one
first, and the boundaries of the parts: part ``i`` is from ``cuts[i]`` to before ``cuts[i + 1]``,
where ``i`` is the number whose digits are the coordinates along these axes. An axis of the mesh
cuts one dimension at most, or it is partial, or the ranks along it hold the same.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar, final
from weakref import WeakValueDictionary

from hpcdist.boxes import Box, lengths
from hpcdist.errors import UsageError
from hpcdist.mesh.placements import Partial, Placement, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import Coordinate, ProcessMesh, shortened

T = TypeVar("T")
Axes = tuple[tuple[int, ...], ...]
Cuts = tuple[tuple[int, ...], ...]
Partials = tuple[ReduceType | None, ...]


@final
class Layout:
    """Which box of an array each rank of a mesh holds; made by `layout_of` and `make_layout`.

    Attributes:
        mesh: the ranks.
        shape: of the whole array.
        axes: for each dimension the axes of the mesh that cut it, see [Note: cuts].
        cuts: for each dimension the boundaries of the parts.
        partial: for each axis of the mesh how its contributions are reduced, or None.
        is_partial: whether any axis is partial.
        is_replicated: whether all ranks hold the whole array.
        memo: what follows from the layout; `remember` adds to it.

    """

    __slots__ = (
        "__weakref__",
        "_boxes",
        "_placements",
        "axes",
        "cuts",
        "is_partial",
        "is_replicated",
        "memo",
        "mesh",
        "partial",
        "shape",
    )

    mesh: ProcessMesh
    shape: tuple[int, ...]
    axes: Axes
    cuts: Cuts
    partial: Partials
    is_partial: bool
    is_replicated: bool
    memo: dict[Hashable, Any]
    _boxes: dict[Coordinate, Box]
    _placements: tuple[Placement, ...] | None

    def box(self, coordinate: Coordinate) -> Box:
        """Return what the rank at a coordinate holds: a pair ``(lo, hi)`` for each dimension."""
        found = self._boxes.get(coordinate)
        if found is None:
            found = self._boxes[coordinate] = self._box(coordinate)
        return found

    def _box(self, coordinate: Coordinate) -> Box:
        sizes, box = self.mesh.sizes, []
        for axes, cuts in zip(self.axes, self.cuts, strict=True):
            part = 0
            for axis in axes:
                part = part * sizes[axis] + coordinate[axis]
            box.append((cuts[part], cuts[part + 1]))
        return tuple(box)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Return the shape of the part of the rank at a coordinate."""
        return lengths(self.box(coordinate))

    def nbytes_local(self, itemsize: int) -> int:
        """Return how many bytes the largest part has."""
        for cuts in self.cuts:
            itemsize *= longest(cuts)
        return itemsize

    @property
    def is_even(self) -> bool:
        """Whether the parts are those of `default_cuts`."""
        return self.cuts == _even_cuts(self.mesh, self.shape, self.axes)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each axis of the mesh does; cuts that are not even are not told by it."""
        if self._placements is None:
            told: list[Placement] = [
                Replicate() if kind is None else Partial(kind) for kind in self.partial
            ]
            for dim, axes in enumerate(self.axes):
                in_order = axes == tuple(sorted(axes))
                for order, axis in enumerate(axes):
                    told[axis] = Shard(dim) if in_order else Shard(dim, co_shard_order=order)
            self._placements = tuple(told)
        return self._placements

    def remember(self, key: Hashable, value: T) -> T:
        """Keep `value` in `memo`, as long as there is room, and return it."""
        self.memo[key] = value
        _remembered.add()
        return value

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        cuts = None if self.is_even else self.cuts
        return make_layout, (self.mesh, self.shape, self.axes, cuts, self.partial)

    def __repr__(self) -> str:
        uneven = "" if self.is_even else f", cut at {_told_cuts(self.cuts, self.axes)}"
        return f"Layout({self.shape}, {[*self.placements]}{uneven} on {self.mesh!r})"


def layout_of(
    mesh: ProcessMesh, shape: Sequence[int], placements: Sequence[Placement] | None
) -> Layout:
    """Return the layout of an array: one placement per axis of the mesh, `Replicate` for others.

    Raises:
        UsageError: the placements do not fit the mesh or the shape.

    """
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"the mesh must be a ProcessMesh, got {mesh!r}")
    shape, given = tuple(map(operator.index, shape)), as_placements(placements)
    axes, partial = _axes_of(mesh.sizes, len(shape), given)
    return make_layout(mesh, shape, axes, None, partial)


def make_layout(
    mesh: ProcessMesh,
    shape: Sequence[int],
    axes: Sequence[Sequence[int]],
    cuts: Sequence[Sequence[int] | None] | None = None,
    partial: Sequence[ReduceType | None] | None = None,
) -> Layout:
    """Return the layout with these attributes; cuts that are None are even.

    The arguments are taken as they are: what users give goes through `layout_of`.
    """
    key = (
        mesh,
        tuple(shape),
        tuple(map(tuple, axes)),
        None if cuts is None else tuple([each if each is None else tuple(each) for each in cuts]),
        (None,) * mesh.ndim if partial is None else tuple(partial),
    )
    return _layouts.get(key) or _intern(key)


# ---- each layout once


Key = tuple[
    ProcessMesh, tuple[int, ...], Axes, "tuple[tuple[int, ...] | None, ...] | None", Partials
]

_layouts: WeakValueDictionary[Key, Layout] = WeakValueDictionary()
"""The layouts there are: by None for even cuts, and as they were asked for."""
_making = threading.Lock()


def _intern(key: Key) -> Layout:
    mesh, shape, axes, given, partial = key
    shape = tuple(map(int, shape))
    cuts = even = _even_cuts(mesh, shape, axes)
    if given is not None:
        cuts = tuple(
            [
                each if own is None else tuple(map(int, own))
                for own, each in zip(given, even, strict=True)
            ]
        )
    canonical: Key = (mesh, shape, axes, None if cuts == even else cuts, partial)
    with _making:
        found = _layouts.get(canonical)
        if found is None:
            found = _layouts[canonical] = _new(mesh, shape, axes, cuts, partial)
        _layouts[key] = found
    return found


def _new(
    mesh: ProcessMesh, shape: tuple[int, ...], axes: Axes, cuts: Cuts, partial: Partials
) -> Layout:
    layout = Layout()
    layout.mesh, layout.shape, layout.axes, layout.cuts = mesh, shape, axes, cuts
    layout.partial, layout.memo = partial, {}
    layout.is_partial = any(kind is not None for kind in partial)
    layout.is_replicated = not layout.is_partial and not any(axes)
    layout._boxes, layout._placements = {}, None
    return layout


@final
class _Remembered:
    """How much all layouts together remember: at most `LIMIT` values, then they start anew.

    One limit for all, since what a layout remembers holds other layouts, which remember others.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1
        if self.count > self.LIMIT:
            self.count = 0
            for found in _layouts.valuerefs():  # listed at once: other threads make layouts
                if (layout := found()) is not None:
                    layout.memo.clear()
                    layout._boxes.clear()


_remembered = _Remembered()


# ---- cuts


@lru_cache(maxsize=512)
def default_cuts(length: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the boundaries of parts of equal length, cut by axes of these sizes, major first.

    The last parts are shorter or empty: 5 elements over 4 are 2, 2, 1 and 0.
    """
    bounds: tuple[int, ...] = (0, length)
    for size in sizes:
        bounds = subdivided(bounds, size)
    return bounds


def subdivided(bounds: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the boundaries of parts that are each cut evenly into `size` parts."""
    inner = [
        min(hi, lo + part * -((lo - hi) // size))
        for lo, hi in pairwise(bounds)
        for part in range(size)
    ]
    return (*inner, bounds[-1])


def _even_cuts(mesh: ProcessMesh, shape: tuple[int, ...], axes: Axes) -> Cuts:
    sizes = mesh.sizes
    return tuple(
        [
            default_cuts(length, tuple([sizes[axis] for axis in cutting]))
            for length, cutting in zip(shape, axes, strict=True)
        ]
    )


@lru_cache(maxsize=512)
def longest(cuts: tuple[int, ...]) -> int:
    """Return the length of the longest part."""
    return max([hi - lo for lo, hi in pairwise(cuts)])


def _told_cuts(cuts: Cuts, axes: Axes) -> str:
    told = [f"{shortened(each[1:-1])} along {dim}" for dim, each in enumerate(cuts) if axes[dim]]
    return " and ".join(told)


# ---- placements


def as_placements(placements: Any) -> tuple[Placement, ...]:
    """Return what a user gives as placements; raise `UsageError` for anything else."""
    if placements is None:
        return ()
    given = (placements,) if isinstance(placements, Placement) else placements
    if not isinstance(given, Sequence) or not all(isinstance(each, Placement) for each in given):
        raise UsageError(
            "placements must be a list of Shard(dim), Replicate() and Partial(), one for each axis "
            f"of the mesh, got {placements!r}"
        )
    return tuple(given)


@lru_cache(maxsize=1024)
def _axes_of(
    sizes: tuple[int, ...], ndim: int, placements: tuple[Placement, ...]
) -> tuple[Axes, Partials]:
    """Return which axes cut each dimension, and how each axis is partial."""
    if len(placements) > len(sizes):
        raise UsageError(
            f"{[*placements]} are {len(placements)} placements for a mesh of {len(sizes)} axes; "
            "there is one for each axis, and those left out are Replicate()"
        )
    cutting: list[list[int]] = [[] for _ in range(ndim)]
    partial: list[ReduceType | None] = [None] * len(sizes)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            cutting[_dimension(placement, ndim)].append(axis)
        elif isinstance(placement, Partial):
            partial[axis] = placement.reduce_type
    if len({*partial} - {None}) > 1:
        raise UsageError(
            f"{[*placements]} reduce in different ways, and the value would depend on which comes "
            "first; give all Partial of an array the same ReduceType"
        )
    return tuple(_major_first(sizes, axes, placements) for axes in cutting), tuple(partial)


def _dimension(placement: Shard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        there = f"its dimensions are 0 to {ndim - 1}" if ndim else "it has no dimensions"
        raise UsageError(f"{placement} cuts a dimension that the array does not have: {there}")
    return placement.dim % ndim


def _major_first(
    sizes: tuple[int, ...], axes: list[int], placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Return the axes that cut a dimension, in the order in which they cut."""
    shards = {axis: each for axis in axes if isinstance(each := placements[axis], Shard)}
    order: list[int] = []
    for axis in reversed(axes):
        order.insert(_behind(shards[axis], [sizes[each] for each in order]), axis)
    return tuple(sorted(order, key=lambda axis: shards[axis].get_co_shard_order()))


def _behind(placement: Shard, sizes: list[int]) -> int:
    """Return how many of the later axes, of these sizes, cut before an axis."""
    parts, factor = 1, placement.get_split_factor()
    for count, size in enumerate([*sizes, 0]):
        if parts == factor:
            return count
        parts *= size
    raise UsageError(
        f"{placement} says that later axes of the mesh have cut dimension {placement.dim} into "
        f"{factor} parts before, but those that cut it are of sizes {sizes}, in this order"
    )
