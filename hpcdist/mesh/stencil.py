"""Stencils: functions of the neighbours of each element, for which only the seams travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np

from hpcdist.boxes import Box, lengths, within
from hpcdist.comm.lending import lent
from hpcdist.errors import UsageError
from hpcdist.mesh.agreement import key_of
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.process_mesh import Coordinate
from hpcdist.mesh.room import SHARED_FROM
from hpcdist.mesh.rules.basis import (
    along,
    as_dist,
    cutting,
    dimension,
    failing_alike,
    is_dist,
    line_of,
    make,
    mesh_of,
    part_number,
    resharded,
    settled,
    shapes_of,
)
from hpcdist.mesh.windows import Edge, Windows, read_windows
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an

EDGES = {
    "periodic": Edge.PERIODIC,
    "reflect": Edge.REFLECT,
    "symmetric": Edge.SYMMETRIC,
    "nearest": Edge.NEAREST,
}


@contextmanager
def halo(a: DistArray, depth: Any, boundary: Any = None) -> Iterator[Any]:
    """Give, for a block, this rank's part with a border of elements from other parts.

    Collective over the ranks of the mesh. It is a copy: only what is around the part is taken from
    other ranks, in one exchange; parts may be smaller than `depth`, or empty.

    Args:
        a: the array.
        depth: how many places before and behind the part: a number for all dimensions, or a dict
            from dimensions to a number or a pair of numbers.
        boundary: what is beyond the ends of the array: ``"periodic"``, ``"reflect"`` (mirrored at
            the last place), ``"symmetric"`` (mirrored behind it), ``"nearest"``, a number, or None
            for nothing: the part ends where the array does. A dict has it for each dimension.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def with_neighbours():
        ...     mesh = dist.ProcessMesh([0, 1, 2], dim_names=["x"])
        ...     a = dist.shard_tensor(np.arange(6), mesh, [dist.Shard(0)])
        ...     with a.halo(1) as wide:
        ...         return wide.tolist()
        >>> dist.simulate(3, with_neighbours)
        [[0, 1, 2], [1, 2, 3, 4], [3, 4, 5]]

    """
    yield extended(settled(a), _surroundings(depth, boundary, a.ndim))


@contextmanager
def neighbour(a: DistArray, axis: int = 0, offset: int = 1, boundary: Any = None) -> Iterator[Any]:
    """Give, for a block, the part that another rank has, `offset` parts further along a dimension.

    Collective over the ranks of the mesh, as is the end of the block. Inside a node a large part
    is read where it lies: nobody may write to the array in the block, and the part is gone after
    it. Between nodes, of less than 256 KiB, and on devices, it is a copy. It is read-only.

    Args:
        a: the array.
        axis: the dimension.
        offset: how many parts further; negative for parts before.
        boundary: ``"periodic"``: the first part follows the last one. None: beyond the ends there
            is an array without elements.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> def next_part():
        ...     mesh = dist.ProcessMesh([0, 1, 2], dim_names=["x"])
        ...     a = dist.shard_tensor(np.arange(6), mesh, [dist.Shard(0)])
        ...     with a.neighbour(offset=1) as part:
        ...         return part.tolist()
        >>> dist.simulate(3, next_part)
        [[2, 3], [4, 5], []]

    """
    a, dim, steps = settled(a), dimension(axis, a.ndim), int(offset)
    if boundary not in (None, "periodic"):
        raise UsageError(f'boundary must be "periodic" or None, got {boundary!r}')
    layout, mesh = a.layout, a.layout.mesh
    name = f"neighbour {steps} along {dim}, boundary={boundary}"

    def number_of(place: Coordinate) -> int | None:
        """Return which part along the dimension the neighbour of a rank has; None beyond."""
        parts = len(layout.cuts[dim]) - 1
        number = part_number(layout, dim, place) + steps
        return number % parts if boundary or 0 <= number < parts else None

    def window(layout: Layout, place: Coordinate) -> Box:
        box, cuts, number = [*layout.box(place)], layout.cuts[dim], number_of(place)
        box[dim] = (0, 0) if number is None else (cuts[number], cuts[number + 1])
        return tuple(box)

    here = mesh.coordinate
    large = layout.nbytes_local(a.itemsize) >= SHARED_FROM
    if here is not None and large and type(a.local) is np.ndarray and mesh.group.one_node:
        words = f"{name} of {layout!r}"
        key = key_of(f"lend {words} {layout.cuts}", mesh)
        with lent(a.local, shapes_of(layout), key=key, words=words, group=mesh.group) as parts:
            if parts is not None:
                number, shape = number_of(here), lengths(window(layout, here))
                found = np.empty(shape, a.dtype)
                found.flags.writeable = False
                yield found if number is None else parts[line_of(layout, dim)[number]]
                return
    edges = (Edge.NOTHING,) * a.ndim
    found = read_windows(a, Windows(name, window, edges, (dim,)))
    if type(found) is np.ndarray:
        found.flags.writeable = False
    yield found


def map_overlap(
    func: Callable[..., Any], *arrays: Any, depth: Any = 0, boundary: Any = None
) -> Any:
    """Apply a function of neighbouring elements, on each rank to its part and a border.

    Collective over the ranks of the mesh; only what is around the parts travels.

    Args:
        func: takes ordinary arrays, this rank's parts of `arrays` with what is around them, and
            returns an array, or a tuple of them: each has the shape of what it got, and then what
            is around the part is cut off, or the shape of the part. Parts may be empty.
        arrays: of one shape; the others are spread as the first one that is a `DistArray`.
        depth: how many places around the part: a number for all dimensions, or a dict from
            dimensions to a number or a pair of numbers, before and behind.
        boundary: what is beyond the ends of the array: ``"periodic"``, ``"reflect"`` (mirrored at
            the last place), ``"symmetric"`` (mirrored behind it), ``"nearest"``, a number, or None
            for nothing: the part ends where the array does. A dict has it for each dimension.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> a = dist.shard_tensor(np.arange(5.0), mesh, [dist.Shard(0)])
        >>> def smooth(part):
        ...     return (part[:-2] + part[1:-1] + part[2:]) / 3
        >>> dist.unshard_dtensor(dist.map_overlap(smooth, a, depth=1, boundary="nearest"))
        array([0.33333333, 1.        , 2.        , 3.        , 3.66666667])

    """
    mesh = mesh_of(*arrays)
    first = settled(next(each for each in arrays if is_dist(each)))
    given = [as_dist(each, mesh) for each in arrays]
    if any(each.shape != first.shape for each in given):
        raise UsageError(
            f"map_overlap takes arrays of one shape, got {[each.shape for each in given]}; "
            "np.broadcast_to makes them so"
        )
    around = _surroundings(depth, boundary, first.ndim)
    layout = first.layout
    parts = [extended(resharded(each, layout), around) for each in given]
    here = mesh.coordinate

    def own(part: Any) -> DistArray:
        if here is None:
            return make(part, layout)
        return make(_trimmed(part, around.window(layout, here), layout.box(here)), layout)

    def computed() -> Any:
        result = func(*parts)
        return tuple([own(each) for each in result]) if isinstance(result, tuple) else own(result)

    failed = UsageError("the function of map_overlap failed on another rank, see its error there")
    return failing_alike(computed, mesh, cutting(layout, range(first.ndim)), failed)


def _trimmed(part: Any, window: Box, own: Box) -> Any:
    """Return what a function has made of a window without what is around this rank's part."""
    shape = getattr(part, "shape", None)
    if shape == lengths(window):
        place: tuple[Any, ...] = (*within(own, window), ...)
        return part[place]  # of no dimensions: an array, too
    if shape == lengths(own):
        return part
    got = f"an array of shape {shape}" if shape is not None else an(type(part).__name__)
    raise UsageError(
        f"the function returned {got}; it must be one of the shape that it was given, "
        f"{lengths(window)}, or of that without what is around the part, {lengths(own)}"
    )


# ---- what is around a part


class Surroundings(NamedTuple):
    """How far around the parts, and what is beyond the ends of the array."""

    depth: tuple[tuple[int, int], ...]
    """For each dimension before and behind."""
    edges: tuple[Edge, ...]
    values: tuple[Any, ...]
    """For each dimension what is beyond its ends; None where that are elements, or nothing."""

    def window(self, layout: Layout, place: Coordinate) -> Box:
        """Return the part of the rank at a coordinate, and the border around it."""
        window = []
        for dim, ((lo, hi), (before, behind)) in enumerate(
            zip(layout.box(place), self.depth, strict=True)
        ):
            lo, hi = lo - before, hi + behind
            if self.edges[dim] is Edge.NOTHING and self.values[dim] is None:
                lo, hi = max(lo, 0), min(hi, layout.shape[dim])
            window.append((lo, hi))
        return tuple(window)


def extended(a: DistArray, around: Surroundings) -> Any:
    """Return this rank's part with what is around it."""
    layout = a.layout
    found = read_windows(a, _windows(layout, around))
    here = layout.mesh.coordinate
    if here is not None and any(value is not None for value in around.values):
        values = [(value, value) for value in around.values]
        fill_beyond(found, around.window(layout, here), layout.shape, values)
    return found


def _windows(layout: Layout, around: Surroundings) -> Windows:
    bounded = tuple([value is not None for value in around.values])
    key = "halo", around.depth, around.edges, bounded
    found: Windows | None = layout.memo.get(key)
    if found is None:
        beyond = [
            "a value" if has_value else edge.name.lower()
            for edge, has_value in zip(around.edges, bounded, strict=True)
        ]
        name = f"halo of depth {around.depth}, {' and '.join(beyond)} beyond the ends,"
        moves = tuple(dim for dim, each in enumerate(around.depth) if any(each))
        found = layout.remember(key, Windows(name, around.window, around.edges, moves))
    return found


def fill_beyond(
    part: Any, window: Box, shape: tuple[int, ...], values: list[tuple[Any, Any]]
) -> None:
    """Write what is beyond the ends of an array into a window; None leaves it as it is.

    What is no value of this dtype is refused by ranks that have no end of the array, too.
    """
    for value in (each for pair in values for each in pair if each is not None):
        np.empty(1, part.dtype)[:] = value
    for dim, ((lo, hi), (before, behind)) in enumerate(zip(window, values, strict=True)):
        if before is not None and lo < 0:
            part[along(dim, slice(0, min(hi, 0) - lo))] = before
        if behind is not None and hi > shape[dim]:
            part[along(dim, slice(max(shape[dim] - lo, 0), None))] = behind


def _surroundings(depth: Any, boundary: Any, ndim: int) -> Surroundings:
    depths = _of_dimensions(depth, ndim, (0, 0), "depth")
    bounds = _of_dimensions(boundary, ndim, None, "boundary")
    edges, values = zip(*map(_edge, bounds), strict=True) if ndim else ((), ())
    return Surroundings(tuple(map(_pair, depths)), edges, values)


def _of_dimensions(given: Any, ndim: int, otherwise: Any, what: str) -> list[Any]:
    if not isinstance(given, Mapping):
        return [given] * ndim
    found = [otherwise] * ndim
    for axis, value in given.items():
        if not hasattr(axis, "__index__"):
            raise UsageError(f"{what} is a dict from dimensions, got the key {axis!r}")
        found[dimension(axis, ndim)] = value
    return found


def _pair(depth: Any) -> tuple[int, int]:
    pair = (depth, depth) if hasattr(depth, "__index__") else depth
    try:
        before, behind = (each.__index__() for each in pair)
    except (TypeError, ValueError, AttributeError):
        before = behind = -1
    if before < 0 or behind < 0:
        raise UsageError(
            "depth must be a number of places >= 0, a pair of them, or a dict from dimensions to "
            f"these, got {depth!r}"
        )
    return before, behind


def _edge(boundary: Any) -> tuple[Edge, Any]:
    if isinstance(boundary, str) and boundary in EDGES:
        return EDGES[boundary], None
    if boundary is None or isinstance(boundary, (Number, np.generic)):
        return Edge.NOTHING, boundary
    raise UsageError(
        f"boundary must be one of {', '.join(EDGES)}, a number or None, got {boundary!r}"
    )
