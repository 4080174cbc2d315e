"""Functions that move elements to other places without looking at them.

A dimension that stays what it is keeps its cuts, and nothing is moved; where the elements of a cut
dimension come to lie elsewhere, each rank takes those that it then holds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.basis import (
    along,
    arranged,
    as_axis,
    as_dist,
    broadcast,
    cutting,
    delivered,
    dimension,
    dimensions,
    failing_alike,
    integer,
    is_dist,
    make,
    mesh_of,
    of_all_parts,
    replaced,
    resharded,
    settled,
    uncut,
    view_of,
)
from hpcdist.mesh.rules.table import rule

# ---- the order of the dimensions


@rule("permute_dims", "transpose")
def permute_dims(x: Any, /, axes: Any = None) -> Any:
    """Return the array with its dimensions in another order."""
    ndim = x.ndim
    order = [*range(ndim)][::-1] if axes is None else [dimension(each, ndim) for each in axes]
    if sorted(order) != [*range(ndim)]:
        raise ValueError(f"axes don't match array: {axes} for {ndim} dimensions")
    x = settled(x)
    return view_of(x, x.local.transpose(order), arranged(x.layout, order)) if order else x


@rule("matrix_transpose", "linalg.matrix_transpose")
def matrix_transpose(x: Any, /) -> Any:
    """Return the array with its last two dimensions exchanged."""
    if x.ndim < 2:
        raise ValueError(f"a matrix has two dimensions, but this array has {x.ndim}")
    return swapaxes(x, -1, -2)


@rule("swapaxes", method=True)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Return the array with two dimensions exchanged.

    Args:
        a: the array.
        axis1: a dimension.
        axis2: the other one.

    """
    order = [*range(a.ndim)]
    first, second = dimension(axis1, a.ndim), dimension(axis2, a.ndim)
    order[first], order[second] = second, first
    return permute_dims(a, order)


@rule("moveaxis")
def moveaxis(a: Any, source: Any, destination: Any, /) -> Any:
    """Return the array with dimensions moved to other positions."""
    sources, targets = _each(source, a.ndim), _each(destination, a.ndim)
    if len(sources) != len(targets):
        raise ValueError(
            "`source` and `destination` arguments must have the same number of elements"
        )
    order = [dim for dim in range(a.ndim) if dim not in sources]
    for target, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(target, dim)
    return permute_dims(a, order)


@rule("rollaxis")
def rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    """Return the array with a dimension moved before another one."""
    dim, to = dimension(axis, a.ndim), start + a.ndim if start < 0 else start
    return moveaxis(a, dim, to - 1 if dim < to else to)


def _each(axis: Any, ndim: int) -> list[int]:
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    found = [dimension(each, ndim) for each in given]
    if len({*found}) < len(found):
        raise ValueError("repeated axis")
    return found


# ---- dimensions of length 1


@rule("expand_dims")
def expand_dims(x: Any, /, axis: Any = 0) -> Any:
    """Return the array with new dimensions of length 1."""
    x = settled(x)
    new = _each(axis, x.ndim + (len(axis) if isinstance(axis, (tuple, list)) else 1))
    rest = iter(range(x.ndim))
    dims = [None if dim in new else next(rest) for dim in range(x.ndim + len(new))]
    return view_of(x, np.expand_dims(x.local, tuple(new)), arranged(x.layout, dims))


def _of_length_1(x: Any, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(dim for dim, length in enumerate(x.shape) if length == 1)
    return dimensions(as_axis(axis), x.ndim)


def _is_cut_along(x: Any, axis: Any = None) -> bool:
    """Return whether what an array has along some dimensions lies on several ranks."""
    return bool(x.size and cutting(x.layout, dimensions(axis, x.ndim)))


@rule("squeeze", method=True, moved=lambda x, axis=None: _is_cut_along(x, _of_length_1(x, axis)))
def squeeze(x: Any, /, axis: Any = None) -> Any:
    """Return the array without dimensions of length 1.

    Args:
        x: the array.
        axis: a dimension of length 1, or several in a tuple; None for all of these.

    """
    x = settled(x)
    gone = _of_length_1(x, axis)
    if any(x.shape[dim] != 1 for dim in gone):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    x = without_cuts(x, gone)
    kept = [dim for dim in range(x.ndim) if dim not in gone]
    inside = x.layout.mesh.coordinate is not None
    part = x.local.squeeze(gone) if inside else np.empty((0,) * len(kept), x.dtype)
    return view_of(x, part, arranged(x.layout, kept))


def without_cuts(x: DistArray, dims: Sequence[int]) -> DistArray:
    """Return the array, whole along `dims` on every rank."""
    return resharded(x, uncut(x.layout, dims)) if cutting(x.layout, dims) else x


@rule("atleast_1d")
def atleast_1d(*arrays: Any) -> Any:
    """Return arrays with at least one dimension."""
    return at_least(arrays, lambda x: expand_dims(x, 0) if x.ndim == 0 else x)


@rule("atleast_2d")
def atleast_2d(*arrays: Any) -> Any:
    """Return arrays with at least two dimensions."""
    return at_least(arrays, lambda x: expand_dims(x, [*range(2 - x.ndim)]) if x.ndim < 2 else x)


def at_least(arrays: tuple[Any, ...], change: Any) -> Any:
    """Return arrays, each changed to have as many dimensions as are wanted."""
    mesh = mesh_of(*arrays)
    changed = tuple(change(as_dist(each, mesh)) for each in arrays)
    return changed[0] if len(changed) == 1 else changed


# ---- the order of the elements


@rule("flip", moved=_is_cut_along)
def flip(m: Any, /, axis: Any = None) -> Any:
    """Return the array with the elements along dimensions in reverse order."""
    x = settled(m)
    dims = dimensions(axis, x.ndim)
    axes, part = cutting(x.layout, dims), np.flip(x.local, dims) if dims else x.local
    if not axes:
        return view_of(x, part, x.layout)
    # The reversed parts lie in order on the mesh with these axes reversed.
    layout = x.layout
    mesh = ProcessMesh(np.flip(layout.mesh.mesh, axes), layout.mesh.names)
    cuts = [
        tuple([layout.shape[dim] - cut for cut in reversed(each)]) if dim in dims else each
        for dim, each in enumerate(layout.cuts)
    ]
    there = make(part, make_layout(mesh, layout.shape, layout.axes, cuts))
    return resharded(there, make_layout(layout.mesh, layout.shape, layout.axes, cuts))


@rule("fliplr", moved=lambda m: _is_cut_along(m, 1))
def fliplr(m: Any) -> Any:
    """Return the array with its second dimension in reverse order."""
    return flip(m, axis=1)


@rule("flipud", moved=lambda m: _is_cut_along(m, 0))
def flipud(m: Any) -> Any:
    """Return the array with its first dimension in reverse order."""
    return flip(m, axis=0)


# ---- other shapes


def _reshape_moves(
    x: Any, /, shape: Any = None, order: Any = "C", *, newshape: Any = None, copy: Any = None
) -> bool:
    if copy is not None or not x.size:
        return False
    before, flat, *_ = _reshaped(uncut(x.layout, ()), newshape if shape is None else shape, x.size)
    return flat is not None or before is not uncut(x.layout, ())


@rule("reshape", moved=_reshape_moves)
def reshape(
    x: Any,
    /,
    shape: Any = None,
    order: Any = "C",
    *,
    newshape: Any = None,
    copy: bool | None = None,
) -> Any:
    """Return the elements, in C order, in another shape.

    The cuts of a dimension that stays, or becomes the first of those that it is split into, stay
    too, if the boundaries do; else the array is cut along its first dimension, before and after.
    """
    if order not in ("C", None):
        raise UsageError(f"reshape keeps the elements in C order, got order={order!r}")
    x = settled(x)
    plan = _reshaped(x.layout, newshape if shape is None else shape, x.size)
    before, flat, flat_after, after = plan
    if copy is False:
        return _shown(x, before, flat, after)
    x = resharded(x, before)
    if flat is not None and flat_after is not None:
        x = resharded(make(np.ascontiguousarray(x.local).reshape(-1), flat), flat_after)
    here = x.layout.mesh.coordinate
    if here is None:
        return make(np.empty((0,) * len(after.shape), x.dtype), after)
    part = x.local.reshape(after.local_shape(here))
    if copy:
        return make(part.copy() if part.base is not None else part, after)
    return view_of(x, part, after)


def _reshaped(layout: Layout, shape: Any, size: int) -> Reshaping:
    """Return how to give an array another shape."""
    wanted = _shape(shape, size)
    key = "reshape", wanted
    plan: Reshaping | None = layout.memo.get(key)
    return layout.remember(key, _plan_reshape(layout, wanted)) if plan is None else plan


def _shown(x: DistArray, before: Layout, flat: Layout | None, after: Layout) -> DistArray:
    """Return the array in another shape, in the memory that it has; fail on all ranks alike."""
    refused = ValueError("Unable to avoid creating a copy while reshaping.")
    mesh = x.layout.mesh
    if before is not x.layout or flat is not None:
        raise refused

    def view() -> Any:
        here = mesh.coordinate
        part = x.local.reshape((0,) * len(after.shape) if here is None else after.local_shape(here))
        if part.size and not np.may_share_memory(part, x.local):
            raise refused
        return part

    return make(failing_alike(view, mesh, range(mesh.ndim), refused), after)


def _shape(shape: Any, size: int) -> tuple[int, ...]:
    given = [*map(operator.index, shape if isinstance(shape, (tuple, list)) else (shape,))]
    if given.count(-1) > 1:
        raise ValueError("can only specify one unknown dimension")
    if -1 in given:
        known = math.prod(length for length in given if length != -1)
        if not known:
            raise ValueError(f"cannot reshape array of size {size} into shape {tuple(given)}")
        given[given.index(-1)] = size // known
    if math.prod(given) != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {tuple(given)}")
    return tuple(given)


Reshaping = tuple[Layout, Layout | None, Layout | None, Layout]


def _plan_reshape(layout: Layout, shape: tuple[int, ...]) -> Reshaping:
    """Return the layouts before and after, and those of the flat elements in between, if needed."""
    kept = _kept_cuts(layout, shape)
    if kept is not None:
        return layout, None, None, kept
    axes = tuple(sorted(cutting(layout, range(len(layout.shape)))))
    first = next((dim for dim, length in enumerate(layout.shape) if length != 1), 0)
    to = next((dim for dim, length in enumerate(shape) if length != 1), 0)
    if not math.prod(shape) or not shape or not layout.shape:
        whole = uncut(layout)
        return whole, None, None, make_layout(layout.mesh, shape, ((),) * len(shape))
    before = _cut_along(layout, layout.shape, first, axes)
    after = _cut_along(layout, shape, to, axes)
    return before, _flattened(before, first), _flattened(after, to), after


def _cut_along(layout: Layout, shape: tuple[int, ...], dim: int, axes: tuple[int, ...]) -> Layout:
    if shape == layout.shape and layout.axes[dim] and {*layout.axes[dim]} == {*axes}:
        return layout
    return make_layout(
        layout.mesh, shape, [axes if each == dim else () for each in range(len(shape))]
    )


def _flattened(layout: Layout, dim: int) -> Layout:
    """Return the layout of the elements one after the other, of what is cut along `dim` only."""
    size = math.prod(layout.shape)
    inner = size // layout.shape[dim]
    cuts = tuple([cut * inner for cut in layout.cuts[dim]])
    return make_layout(layout.mesh, (size,), (layout.axes[dim],), (cuts,))


def _kept_cuts(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """Return the layout after reshaping each rank's part alone, if that can be."""
    if not math.prod(shape):
        return None
    axes: list[tuple[int, ...]] = [()] * len(shape)
    cuts: list[tuple[int, ...] | None] = [None] * len(shape)
    for olds, news in _groups(layout.shape, shape):
        cut = [dim for dim in olds if layout.axes[dim]]
        if not cut:
            continue
        leading = [dim for dim in olds if layout.shape[dim] != 1][:1]
        first = [dim for dim in news if shape[dim] != 1][:1]
        if cut != leading or not first:
            return None
        inner_old = math.prod(layout.shape[dim] for dim in olds) // layout.shape[cut[0]]
        inner_new = math.prod(shape[dim] for dim in news) // shape[first[0]]
        bounds = [boundary * inner_old for boundary in layout.cuts[cut[0]]]
        if any(boundary % inner_new for boundary in bounds):
            return None
        axes[first[0]] = layout.axes[cut[0]]
        cuts[first[0]] = tuple([boundary // inner_new for boundary in bounds])
    return make_layout(layout.mesh, shape, axes, cuts)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return which dimensions together become which, in groups as small as can be."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [*range(i, min(i + 1, len(old)))], [*range(j, min(j + 1, len(new)))]
        a, b = math.prod(old[d] for d in olds), math.prod(new[d] for d in news)
        i, j = i + len(olds), j + len(news)
        while a != b:
            if (a < b and i < len(old)) or j == len(new):
                olds.append(i)
                a *= old[i]
                i += 1
            else:
                news.append(j)
                b *= new[j]
                j += 1
        groups.append((olds, news))
    return groups


@rule("ravel", moved=lambda a, order="C": _reshape_moves(a, -1))
def ravel(a: Any, order: str = "C") -> Any:
    """Return the elements one after the other: a copy if they do not lie so."""
    x = settled(a)
    return reshape(x, (-1,), order=order, copy=None if _lies_in_order(x) else True)


def _lies_in_order(x: DistArray) -> bool:
    """Return whether elements lie one after the other; of parts that are not moved, on all ranks.

    By the steps from one to the next, as NumPy's flag is set for a part of one element, too.
    """
    step = x.dtype.itemsize
    for length, here, stride in zip(
        x.shape[::-1], x.local.shape[::-1], x.local.strides[::-1], strict=False
    ):
        if length != 1 and stride != step:
            return not x.local.size
        step *= here
    return True


@rule("broadcast_to")
def broadcast_to(x: Any, /, shape: Any, subok: bool = False) -> Any:
    """Return the array as if repeated to a larger shape; new dimensions are not cut."""
    x = settled(x)
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if max(shape, default=0) > np.iinfo(np.intp).max:
        raise ValueError("Maximum allowed dimension exceeded")
    if broadcast(x.shape, shape) != shape:
        raise ValueError(f"cannot broadcast an array of shape {x.shape} to {shape}")
    first = len(shape) - x.ndim
    stay = [length == shape[dim] for dim, length in enumerate(x.shape, first)]
    x = without_cuts(x, [dim for dim, same in enumerate(stay) if not same])
    layout = make_layout(
        x.layout.mesh,
        shape,
        [()] * first + [*x.layout.axes],
        [None] * first
        + [cut if same else None for cut, same in zip(x.layout.cuts, stay, strict=True)],
    )
    here = layout.mesh.coordinate
    return make(
        x.local if here is None else np.broadcast_to(x.local, layout.local_shape(here)), layout
    )


@rule("broadcast_arrays")
def broadcast_arrays(*arrays: Any, subok: bool = False) -> Any:
    """Return arrays, each as if repeated to their common shape."""
    mesh = mesh_of(*arrays)
    given = [as_dist(each, mesh) for each in arrays]
    shape = broadcast(*[each.shape for each in given])
    return tuple([broadcast_to(each, shape) for each in given])


# ---- several arrays


@rule("concat", "concatenate")
def concat(
    arrays: Any,
    /,
    axis: int | None = 0,
    out: Any = None,
    *,
    dtype: Any = None,
    casting: str = "same_kind",
) -> Any:
    """Return arrays joined along a dimension.

    The others are cut as in the largest of them; this one, if it is cut in that, evenly.
    """
    mesh = mesh_of(*arrays)
    given = [as_dist(each, mesh) for each in arrays]
    if axis is None:
        given, axis = [ravel(each) for each in given], 0
    dim = _check_joined(given, integer(axis))
    lengths = [each.shape[dim] for each in given]
    starts = [0, *np.cumsum(lengths).tolist()]
    largest = max(given, key=lambda each: (each.size, not each.layout.is_replicated)).layout
    cuts = [None if each == dim else cut for each, cut in enumerate(largest.cuts)]
    shape = [*largest.shape]
    shape[dim] = starts[-1]
    layout = make_layout(mesh, shape, largest.axes, cuts)
    parts = [
        resharded(each, replaced(layout, dim, _clipped(layout.cuts[dim], start, length))).local
        for each, start, length in zip(given, starts, lengths, strict=False)
    ]
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype, "casting": casting}
    return delivered(make(np.concatenate(parts, dim, **options), layout), out)


def _clipped(cuts: tuple[int, ...], start: int, length: int) -> list[int]:
    """Return the boundaries within ``length`` elements from `start` on."""
    return [min(max(cut - start, 0), length) for cut in cuts]


def _check_joined(given: list[DistArray], axis: int) -> int:
    shapes = [each.shape for each in given]
    if any(len(shape) != len(shapes[0]) for shape in shapes) or not shapes[0]:
        raise ValueError(
            f"arrays to join must have the same number (>0) of dimensions, got {shapes}"
        )
    dim = dimension(axis, len(shapes[0]))
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1:
        raise ValueError(f"arrays to join along {dim} differ along another dimension: {shapes}")
    return dim


@rule("stack")
def stack(arrays: Any, /, axis: int = 0, out: Any = None, **options: Any) -> Any:
    """Return arrays joined along a new dimension, which is not cut."""
    mesh = mesh_of(*arrays)
    given = [as_dist(each, mesh) for each in arrays]
    if len({each.shape for each in given}) > 1:
        raise ValueError("all input arrays must have the same shape")
    dim = dimension(axis, given[0].ndim + 1)
    return concat([expand_dims(each, dim) for each in given], dim, out, **options)


@rule("vstack")
def vstack(tup: Any, **options: Any) -> Any:
    """Return arrays joined along the first dimension."""
    mesh = mesh_of(*tup)
    return concat([atleast_2d(as_dist(each, mesh)) for each in tup], 0, **options)


@rule("hstack")
def hstack(tup: Any, **options: Any) -> Any:
    """Return arrays joined along the second dimension, or the only one."""
    mesh = mesh_of(*tup)
    given = [atleast_1d(as_dist(each, mesh)) for each in tup]
    return concat(given, 0 if given[0].ndim == 1 else 1, **options)


@rule("unstack", moved=lambda x, /, *, axis=0: _is_cut_along(x, axis))
def unstack(x: Any, /, *, axis: int = 0) -> Any:
    """Return the arrays that are joined along a dimension."""
    first = moveaxis(x, axis, 0)
    return tuple([first[index] for index in range(first.shape[0])])


@rule("array_split")
def array_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """Return parts of the array along a dimension; nothing is moved."""
    ary, dim = settled(ary), dimension(axis, ary.ndim)
    length = ary.shape[dim]
    if hasattr(indices_or_sections, "__len__"):
        bounds = [0, *indices_or_sections, length]
    else:
        each, more = divmod(length, operator.index(indices_or_sections))
        bounds = np.cumsum([0, *[each + 1] * more, *[each] * (indices_or_sections - more)]).tolist()
    return [ary[along(dim, slice(lo, hi))] for lo, hi in pairwise(bounds)]


@rule("split")
def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """Return equal parts of the array along a dimension; nothing is moved."""
    length = ary.shape[dimension(axis, ary.ndim)]
    if not hasattr(indices_or_sections, "__len__") and length % indices_or_sections:
        raise ValueError("array split does not result in an equal division")
    return array_split(ary, indices_or_sections, axis)


@rule("repeat", method=True)
def repeat(x: Any, repeats: Any, /, axis: int | None = None) -> Any:
    """Return the array with each element along a dimension repeated; nothing is moved.

    Args:
        x: the array.
        repeats: how often: a number, or one for each element along the dimension.
        axis: the dimension; None for the flat array.

    """
    x = settled(ravel(x) if axis is None or not x.ndim else x)
    dim = dimension(0 if axis is None else integer(axis), x.ndim)
    if is_dist(repeats) or np.ndim(repeats):
        return _repeated(x, as_dist(repeats, x.layout.mesh), dim)
    times = operator.index(repeats)
    if times < 0:
        raise ValueError("repeats may not contain negative values.")
    cuts = [cut * times for cut in x.layout.cuts[dim]]
    return make(np.repeat(x.local, times, dim), replaced(x.layout, dim, cuts))


def _repeated(x: DistArray, times: DistArray, dim: int) -> DistArray:
    """Return the array with each element along a dimension repeated as often as it says."""
    times = broadcast_to(times, (x.shape[dim],))
    line = make_layout(times.layout.mesh, times.shape, (x.layout.axes[dim],), (x.layout.cuts[dim],))
    times = resharded(times, line)
    own = [times.local.sum(), (times.local < 0).any()]
    counts, negative = of_all_parts(np.array(own, np.int64), line, 0).T
    if negative.any():
        raise ValueError("repeats may not contain negative values.")
    cuts = np.cumsum([0, *counts.tolist()]).tolist()
    if x.layout.mesh.coordinate is None:
        return make(x.local, replaced(x.layout, dim, cuts))
    return make(np.repeat(x.local, times.local, dim), replaced(x.layout, dim, cuts))


@rule("tile")
def tile(x: Any, repetitions: Any, /) -> Any:
    """Return the array repeated along its dimensions."""
    given = repetitions if np.ndim(repetitions) else (repetitions,)
    times = tuple(map(operator.index, given))
    if min(times, default=0) < 0:
        raise ValueError("negative dimensions are not allowed")
    x = expand_dims(x, [*range(len(times) - x.ndim)]) if len(times) > x.ndim else settled(x)
    for dim, count in enumerate((1,) * (x.ndim - len(times)) + times):
        if count == 0:
            x = x[along(dim, slice(0, 0))]
        elif count > 1:
            x = concat([x] * count, dim)
    return x if max(times, default=1) > 1 else make(x.local.copy(), x.layout)
