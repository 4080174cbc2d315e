"""What a boolean array selects.

Each rank takes from its part; how many elements that are is told to the others, for the result has
as many on each rank as were found there. That is in the order of NumPy if the masked dimensions
are cut along the first one only, so an array that is cut otherwise is moved first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules.basis import (
    as_dist,
    broadcast,
    delivered,
    is_dist,
    make,
    of_all_parts,
    own_box,
    resharded,
    settled,
)
from hpcdist.mesh.rules.pointwise import part_of, pointwise
from hpcdist.mesh.rules.shapes import moveaxis, permute_dims, ravel, stack
from hpcdist.mesh.rules.table import rule


def chosen(x: DistArray, mask: Any) -> DistArray:
    """Return the elements of `x` where the mask is true."""
    x, mask, depth = _together(x, mask)
    if depth == 0:
        part = x.local[np.asarray(mask.local)]
        layout = make_layout(
            x.layout.mesh, (int(mask.local), *x.shape), ((), *x.layout.axes), (None, *x.layout.cuts)
        )
        return make(part, layout)
    part = x.local[mask.local]
    return make(part, counted(x.layout, depth, part.shape[0]))


def _fitting(x: DistArray, mask: Any) -> DistArray:
    """Return a mask over the first dimensions of an array."""
    fitting: DistArray = as_dist(mask, x.layout.mesh)
    if fitting.shape != x.shape[: fitting.ndim]:
        raise IndexError(
            f"boolean index did not match indexed array: the mask has shape {fitting.shape}, the "
            f"array {x.shape}"
        )
    return fitting


def _together(x: DistArray, mask: Any) -> tuple[DistArray, DistArray, int]:
    """Return an array and a mask, moved to where the order is NumPy's; and how deep the mask is."""
    mask = _fitting(x, mask)
    depth = mask.ndim
    x = resharded(x, in_order(x.layout, depth))
    layout = x.layout
    own = make_layout(layout.mesh, mask.shape, layout.axes[:depth], layout.cuts[:depth])
    return x, resharded(mask, own), depth


def in_order(layout: Layout, depth: int) -> Layout:
    """Return the layout with no cuts in the first `depth` dimensions but along the first."""
    axes = sorted(axis for dim in range(depth) for axis in layout.axes[dim])
    if not layout.is_partial and not any(layout.axes[1:depth]):
        return layout
    return make_layout(
        layout.mesh,
        layout.shape,
        [axes if dim == 0 else () if dim < depth else own for dim, own in enumerate(layout.axes)],
        [None if dim < depth else cut for dim, cut in enumerate(layout.cuts)],
    )


def counted(layout: Layout, depth: int, count: int) -> Layout:
    """Return the layout of what was chosen; ranks that share a dimension tell their counts."""
    if layout.mesh.coordinate is None:
        raise UsageError(
            f"how many elements a mask selects is known to the ranks of {layout.mesh!r} only, and "
            "this rank is none of them"
        )
    cuts = np.cumsum([0, *_counts(layout, count)]).tolist()
    return make_layout(
        layout.mesh,
        (cuts[-1], *layout.shape[depth:]),
        (layout.axes[0], *layout.axes[depth:]),
        (cuts, *layout.cuts[depth:]),
    )


def _counts(layout: Layout, count: int) -> list[int]:
    counts: list[int] = of_all_parts(np.array(count), layout, 0).tolist()
    return counts


@rule("nonzero", method=True)
def nonzero(x: Any, /) -> Any:
    """Return the indices of the elements other than 0, an array for each dimension."""
    x = settled(x)
    if not x.ndim:
        raise ValueError("nonzero is not allowed on arrays without dimensions")
    x = resharded(x, in_order(x.layout, x.ndim))
    found = np.nonzero(x.local)
    layout = counted(x.layout, x.ndim, len(found[0]))
    starts = [lo for lo, _ in own_box(x.layout)]
    return tuple(make(index + lo, layout) for index, lo in zip(found, starts, strict=True))


@rule("where")
def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Return elements of `x` where the condition holds, else of `y`."""
    if x is None and y is None:
        return nonzero(condition)
    if x is None or y is None:
        raise ValueError("either both or neither of x and y should be given")
    return pointwise(np.where, condition, x, y)


@rule("flatnonzero")
def flatnonzero(a: Any) -> Any:
    """Return the indices into the flat array of the elements other than 0."""
    return nonzero(ravel(a))[0]


@rule("argwhere")
def argwhere(a: Any) -> Any:
    """Return the indices of the elements other than 0, a row for each element."""
    return permute_dims(stack(nonzero(a)))


def assign(x: DistArray, mask: Any, value: Any) -> None:
    """Write a value, or one for each element chosen, where the mask is true."""
    if not is_dist(value) and np.ndim(value) == 0:
        x.local[_mask_of(x, mask)] = value
        return
    value = as_dist(value, x.layout.mesh)
    if value.ndim == 0:
        x.local[_mask_of(x, mask)] = resharded(value, part_of(x.layout, ())).local
        return
    home = x.layout
    moved, mask, depth = _together(x, mask)
    if depth == 0:
        raise UsageError("an array is assigned where a mask with dimensions is true, got a number")
    layout = counted(moved.layout, depth, int(np.count_nonzero(mask.local)))
    if broadcast(value.shape, layout.shape) != layout.shape:
        raise ValueError(
            f"cannot assign {value.shape} values to the {layout.shape} where the mask is true"
        )
    moved.local[mask.local] = resharded(value, part_of(layout, value.shape)).local
    if moved is not x:
        x.local[...] = resharded(moved, home).local


def _mask_of(x: DistArray, mask: Any) -> Any:
    """Return this rank's part of a mask over the first dimensions of an array."""
    mask = _fitting(x, mask)
    depth = mask.ndim
    layout = make_layout(x.layout.mesh, mask.shape, x.layout.axes[:depth], x.layout.cuts[:depth])
    return resharded(mask, layout).local


@rule("compress")
def compress(condition: Any, a: Any, axis: int | None = None, out: Any = None) -> Any:
    """Return the places along a dimension where a condition holds."""
    if np.ndim(condition) != 1:
        raise ValueError("condition must be a 1-d array")
    condition = condition != 0 if is_dist(condition) else np.asarray(condition, bool)
    first = ravel(a) if axis is None else moveaxis(a, axis, 0)
    first = settled(first)[: np.shape(condition)[0]]
    found = chosen(first, condition)
    return delivered(moveaxis(found, 0, axis or 0), out)
