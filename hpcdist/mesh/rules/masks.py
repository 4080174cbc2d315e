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
    check_writable,
    delivered,
    failing_alike,
    integer,
    is_dist,
    make,
    mesh_of,
    of_all_parts,
    own_box,
    resharded,
    settled,
    whole_on,
)
from hpcdist.mesh.rules.placing import converted, trimmed
from hpcdist.mesh.rules.pointwise import aligned, astype, part_of, pointwise
from hpcdist.mesh.rules.shapes import moveaxis, permute_dims, ravel, reshape, stack
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.taking import take


def chosen(x: DistArray, mask: Any) -> DistArray:
    """Return the elements of `x` where the mask is true."""
    x, mask = _together(x, mask)
    return make(x.local[mask.local], _selected(x, mask))


def _selected(x: DistArray, mask: DistArray) -> Layout:
    """Return the layout of the elements selected by a mask that is laid out as the array."""
    layout = x.layout
    if mask.ndim:
        return counted(layout, mask.ndim, int(np.count_nonzero(mask.local)))
    shape = (int(mask.local), *x.shape)
    return make_layout(layout.mesh, shape, ((), *layout.axes), (None, *layout.cuts))


def _fitting(x: DistArray, mask: Any) -> DistArray:
    """Return a mask over the first dimensions of an array."""
    return over(as_dist(mask, x.layout.mesh), x.shape)


def over(mask: DistArray, shape: tuple[int, ...]) -> DistArray:
    """Return a mask over the first dimensions of a shape; one without elements selects nothing."""
    wanted = shape[: mask.ndim]
    if mask.shape == wanted:
        return mask
    fits = [each in (0, length) for each, length in zip(mask.shape, wanted, strict=False)]
    if mask.ndim > len(shape) or not np.all(fits):
        raise IndexError(
            f"boolean index did not match indexed array: the mask has shape {mask.shape}, the "
            f"array {shape}"
        )
    return make(np.broadcast_to(np.False_, wanted), whole_on(mask.layout.mesh, wanted))


def _together(x: DistArray, mask: Any) -> tuple[DistArray, DistArray]:
    """Return an array and a mask, moved to where the order is NumPy's."""
    mask = _fitting(x, mask)
    depth = mask.ndim
    x = resharded(x, in_order(x.layout, depth))
    layout = x.layout
    own = make_layout(layout.mesh, mask.shape, layout.axes[:depth], layout.cuts[:depth])
    return x, resharded(mask, own)


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
            "this rank is not one of them"
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
    if not a.ndim:
        return argwhere(reshape(a, (1,)))[:, :0]
    return permute_dims(stack(nonzero(a)))


def assign(x: DistArray, mask: Any, value: Any) -> None:
    """Write a value, or one for each element chosen, where the mask is true."""
    mesh = x.layout.mesh
    mask, value = failing_alike(
        lambda: _assignment(x, mask, value),
        mesh,
        range(mesh.ndim),
        IndexError("another rank has a wrong mask or value; give all ranks the same"),
    )
    if mesh.coordinate is None:
        return
    if not is_dist(value):
        x.local[_mask_of(x, mask)] = value
        return
    if value.ndim == 0:
        x.local[_mask_of(x, mask)] = resharded(value, part_of(x.layout, ())).local
        return
    home = x.layout
    moved, mask = _together(x, mask)
    layout = _selected(moved, mask)
    if broadcast(value.shape, layout.shape) != layout.shape:
        raise ValueError(
            f"cannot assign {value.shape} values to the {layout.shape} where the mask is true"
        )
    moved.local[mask.local] = resharded(value, part_of(layout, value.shape)).local
    if moved is not x:
        x.local[...] = resharded(moved, home).local


def _assignment(x: DistArray, mask: Any, value: Any) -> tuple[DistArray, Any]:
    """Return a mask that fits an array, and the value: a number, or an array across ranks."""
    found = _fitting(x, mask)
    mesh_of(x, found)
    if not is_dist(value) and np.ndim(value) == 0:
        return found, value
    value = as_dist(converted(value, x.dtype), x.layout.mesh)
    mesh_of(x, value)
    return found, value


def _mask_of(x: DistArray, mask: DistArray) -> Any:
    """Return this rank's part of a mask over the first dimensions of an array."""
    depth = mask.ndim
    layout = make_layout(x.layout.mesh, mask.shape, x.layout.axes[:depth], x.layout.cuts[:depth])
    return resharded(mask, layout).local


@rule("extract")
def extract(condition: Any, arr: Any) -> Any:
    """Return the elements where a condition holds."""
    return compress(np.ravel(condition), arr)


@rule("select")
def select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    """Return elements of the first choice whose condition holds."""
    count = len(condlist)
    if len(choicelist) != count:
        raise ValueError("list of cases must be same length as list of conditions")

    def function(*parts: Any) -> Any:
        return np.select(parts[:count], parts[count:-1], parts[-1])

    return pointwise(function, *condlist, *choicelist, default)


# ---- written where a mask is true


@rule("copyto")
def copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    """Write elements of an array that is broadcast where a mask is true."""
    if not is_dist(dst):
        np.copyto(dst, np.asarray(src), casting, where=np.asarray(where))
        return
    check_writable(dst)
    _check_cast(dst.dtype, src, casting)
    src = trimmed(converted(src, dst.dtype), dst.ndim) if np.ndim(src) else src
    _, (part, mask) = aligned((src, where), dst.layout)
    np.copyto(dst.local, part, casting, where=mask)


def _check_cast(dtype: Any, src: Any, casting: Any) -> None:
    """Refuse, on ranks without elements too, what NumPy does not cast."""
    one = np.zeros(1, src.dtype) if is_dist(src) else src
    np.copyto(np.zeros(np.shape(one), dtype), one, casting)


@rule("putmask")
def putmask(a: Any, mask: Any, values: Any) -> None:
    """Write values, one for each element and then again from the first on, where a mask is true."""
    mesh = mesh_of(a, mask, values)
    a, chosen = as_dist(a, mesh), as_dist(mask, mesh) != 0
    if chosen.size != a.size:
        raise ValueError("putmask: mask and data must be the same size")
    values = astype(ravel(as_dist(values, mesh)), a.dtype)
    if values.size and a.size:
        copyto(a, _again(values, a), where=reshape(chosen, a.shape))


@rule("place")
def place(arr: Any, mask: Any, vals: Any) -> None:
    """Write values, one after the other and then again from the first on, where a mask is true."""
    mesh = mesh_of(arr, mask, vals)
    chosen, values = as_dist(mask, mesh) != 0, ravel(as_dist(vals, mesh))
    if chosen.size != arr.size:
        raise ValueError("place: mask and data must be the same size")
    chosen = reshape(chosen, arr.shape)
    count = int(np.count_nonzero(chosen))
    if count and not values.size:
        raise ValueError("Cannot insert from an empty array!")
    if count:
        arr[chosen] = take(values, np.arange(count) % values.size)


def _again(values: DistArray, a: DistArray) -> DistArray:
    """Return values, from the first on again where they end, in the shape of an array."""
    if not a.ndim:
        return values[0]
    here = np.ix_(*[np.arange(lo, hi) for lo, hi in own_box(a.layout)])
    flat = np.asarray(np.ravel_multi_index(here, a.shape))
    return take(values, make(flat % values.size, a.layout))  # type: ignore[no-any-return]


@rule("compress")
def compress(condition: Any, a: Any, axis: int | None = None, out: Any = None) -> Any:
    """Return the places along a dimension where a condition holds."""
    if np.ndim(condition) != 1:
        raise ValueError("condition must be a 1-d array")
    x = as_dist(a, mesh_of(condition, a))
    condition = condition != 0 if is_dist(condition) else np.asarray(condition, bool)
    first = ravel(x) if axis is None or not x.ndim else moveaxis(x, integer(axis), 0)
    first = first[: np.shape(condition)[0]]
    found = chosen(first, condition)
    return delivered(moveaxis(found, 0, 0 if axis is None else axis), out, "unsafe")
