"""Reductions: sums, extremes, means, and where the extremes are.

Each rank reduces its part; over the axes of the mesh that cut a reduced dimension the results are
combined at once, so that every rank there has them, with the same bits. Along the other dimensions
the result is cut as the array was. What an empty part contributes is neutral.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.policy import reproducible_sums
from hpcdist.mesh.rules.basis import (
    arranged,
    as_axis,
    combined,
    cutting,
    delivered,
    dimensions,
    integer,
    is_dist,
    make,
    own_box,
    result_array,
    settled,
)
from hpcdist.mesh.rules.overflow import may_leave, product
from hpcdist.mesh.rules.pointwise import aligned, pointwise
from hpcdist.mesh.rules.sliced import everywhere
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.sums import is_floating, reproducible_sum
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import ReduceOp

NOT_GIVEN: Any = getattr(np, "_NoValue", None)


def is_asked(flag: Any) -> bool:
    """Return whether a flag that can be left out is true."""
    return flag is not NOT_GIVEN and bool(flag)


class Plan(NamedTuple):
    """How an array of a layout is reduced."""

    layout: Layout
    """Of the result."""
    dims: tuple[int, ...]
    """What is reduced."""
    axes: tuple[int, ...]
    """The axes of the mesh over which the ranks' results are combined."""
    merged: int
    """How many elements become one."""


def plan_reduction(layout: Layout, axis: Any, keepdims: bool) -> Plan:
    """Return how to reduce an array of this layout along `axis`."""
    axis = axis if axis is None or axis.__class__ is int else as_axis(axis)
    key = "reduce", axis, keepdims
    found = layout.memo.get(key)
    if found is None:
        if not layout.shape and axis in (0, -1):  # as NumPy takes it
            axis = None
        dims = dimensions(axis, len(layout.shape))
        kept: list[int | None] = [
            None if dim in dims else dim
            for dim in range(len(layout.shape))
            if keepdims or dim not in dims
        ]
        count = math.prod(layout.shape[dim] for dim in dims)
        plan = Plan(arranged(layout, kept), dims, cutting(layout, dims), count)
        found = layout.remember(key, plan)
    return found


def reduced(
    x: DistArray,
    axis: Any,
    keepdims: Any,
    function: Callable[..., Any],
    op: ReduceOp,
    out: Any = None,
    where: Any = True,
    **options: Any,
) -> DistArray:
    """Return `function` of each rank's part along `axis`, combined by `op`."""
    x = settled(x)
    plan = plan_reduction(x.layout, axis, bool(keepdims))
    if where is not True and where is not NOT_GIVEN:
        options["where"] = _mask(x, where)
    dtype = options.get("dtype") or x.dtype
    if op is ReduceOp.SUM and reproducible_sums() and is_floating(dtype):
        part = _added(x.local, plan, bool(keepdims), dtype, options.get("where", True))
    else:
        part = result_array(function(x.local, plan.dims, keepdims=bool(keepdims), **options))
        part = combined(part, x.layout.mesh, plan.axes, op)
    result = make(part, plan.layout)
    return result if out is None else delivered(result, out, "unsafe")


def _added(part: Any, plan: Plan, keepdims: bool, dtype: Any, where: Any = True) -> Any:
    """Return the sum over dimensions and ranks that does not depend on how the array is cut."""
    if where is not True:
        part = np.where(where, part, part.dtype.type(0))
    ranks = everywhere(plan.layout.mesh, plan.axes)
    if not is_floating(part.dtype):
        part = part.astype(dtype)
    return result_array(
        reproducible_sum(part, plan.dims, ranks, keepdims=keepdims, dtype=np.dtype(dtype))
    )


def _mask(x: DistArray, where: Any) -> Any:
    """Return this rank's part of a mask, moved to where the array is."""
    return aligned((x, where if is_dist(where) else np.asarray(where)), x.layout)[1][1]


def started(result: DistArray, initial: Any, ufunc: Any) -> DistArray:
    """Return the result with an `initial` value taken in, once."""
    if initial is NOT_GIVEN or initial is None:
        return result
    part = ufunc(result.local, np.asarray(initial).astype(result.dtype))
    return make(result_array(part), result.layout)


@rule("sum", method=True)
def sum(
    x: Any,
    /,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the sum.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        initial: what is added to the sum, once.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    result = reduced(
        x, axis, keepdims, np.add.reduce, ReduceOp.SUM, None, where, dtype=_wide(x, dtype)
    )
    return delivered(started(result, initial, np.add), out, "unsafe")


@rule("prod", method=True)
def prod(
    x: Any,
    /,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the product.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        initial: what the product is multiplied by, once.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    dtype = _wide(x, dtype)
    if may_leave(x, dtype):
        result = _product(x, axis, bool(keepdims), where, dtype)
    else:
        result = reduced(
            x, axis, keepdims, np.multiply.reduce, ReduceOp.PROD, None, where, dtype=dtype
        )
    return delivered(started(result, initial, np.multiply), out, "unsafe")


def _product(x: DistArray, axis: Any, keepdims: bool, where: Any, dtype: Any) -> DistArray:
    """Return the product of floating-point numbers, which may leave their range on the way."""
    x = settled(x)
    plan = plan_reduction(x.layout, axis, keepdims)
    part = x.local
    if where is not True and where is not NOT_GIVEN:
        part = np.where(_mask(x, where), part, part.dtype.type(1))
    if not plan.axes:
        found: Any = np.multiply.reduce(part, plan.dims, keepdims=keepdims, dtype=dtype)  # type: ignore[call-overload]
        return make(result_array(found), plan.layout)
    mesh = x.layout.mesh
    return make(product(part, plan.dims, keepdims, dtype, mesh, plan.axes), plan.layout)


def _wide(x: Any, dtype: Any) -> Any:
    """Return the dtype of a sum: as NumPy's, except that booleans and small integers widen."""
    if dtype is not None or x.dtype.kind not in "bui" or x.dtype.itemsize >= np.dtype(int).itemsize:
        return dtype
    return np.dtype(np.uint if x.dtype.kind == "u" else np.int_)


@rule("any", method=True)
def any(
    x: Any, /, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """Return whether any element is true.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    return reduced(x, axis, keepdims, np.logical_or.reduce, ReduceOp.MAX, out, where)


@rule("all", method=True)
def all(
    x: Any, /, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """Return whether all elements are true.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    return reduced(x, axis, keepdims, np.logical_and.reduce, ReduceOp.MIN, out, where)


@rule("count_nonzero")
def count_nonzero(x: Any, /, axis: Any = None, *, keepdims: Any = False) -> Any:
    """Return how many elements are other than 0."""
    return sum(pointwise(_truth, x), axis, np.int_, keepdims=keepdims)


def _truth(part: Any) -> Any:
    """Return which elements count: NaT and 1970-01-01 have their truth from NumPy, too."""
    return part != part.dtype.type() if part.dtype.kind in "SU" else part.astype(bool)


@rule("max", "amax", method=True)
def max(
    x: Any,
    /,
    axis: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the largest elements; NaN if there is one.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        initial: the least that the result can be; needed with `where`, or without elements.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    return _extreme(x, axis, out, keepdims, initial, where, np.maximum, ReduceOp.MAX)


@rule("min", "amin", method=True)
def min(
    x: Any,
    /,
    axis: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the smallest elements; NaN if there is one.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        initial: the most that the result can be; needed with `where`, or without elements.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    return _extreme(x, axis, out, keepdims, initial, where, np.minimum, ReduceOp.MIN)


def _extreme(
    x: DistArray,
    axis: Any,
    out: Any,
    keepdims: Any,
    initial: Any,
    where: Any,
    ufunc: Any,
    op: ReduceOp,
) -> Any:
    x = settled(x)
    _check_sent(x)
    given = initial is not NOT_GIVEN and initial is not None
    if not given and where is not True and where is not NOT_GIVEN:
        ufunc.reduce(np.ones(1), where=np.ones(1, bool))  # raises NumPy's error, on every rank
    plan = plan_reduction(x.layout, axis, bool(keepdims))
    if plan.merged == 0 and not given and x.size == 0:
        ufunc.reduce(np.empty(x.shape, x.dtype), plan.dims)  # raises NumPy's error, if it is one
    if given:
        options = {"initial": initial}
    else:
        empty = 0 in [x.local.shape[dim] for dim in plan.dims]
        options = {"initial": neutral(x.dtype, op)} if empty else {}
    return reduced(x, axis, keepdims, ufunc.reduce, op, out, where, **options)


def _check_sent(x: DistArray) -> None:
    """Refuse Python objects on all ranks: those without elements would not see what they are."""
    if getattr(x.dtype, "hasobject", False) and builtins.any(x.layout.axes):
        dtype_row(x.dtype)  # raises what the transports would


def neutral(dtype: Any, op: ReduceOp) -> Any:
    """Return what every other number is larger than (MAX), or smaller than (MIN)."""
    smallest = op == ReduceOp.MAX
    if dtype.kind == "b":
        return not smallest
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if smallest else limits.max
    if dtype.kind in "mM":  # the smallest is NaT, which would win
        limits = np.iinfo(np.int64)
        return np.array(limits.min + 1 if smallest else limits.max).view(dtype)[()]
    if dtype.kind in "SU":
        last = b"\xff" if dtype.kind == "S" else chr(sys.maxunicode)
        return dtype.type() if smallest else last * _length(dtype)
    infinity = -np.inf if smallest else np.inf
    return dtype.type(complex(infinity, infinity) if dtype.kind == "c" else infinity)


def _length(dtype: Any) -> int:
    """Return how many characters a word of this dtype can have."""
    return int(dtype.itemsize // np.dtype(f"{dtype.kind}1").itemsize)


@rule("ptp")
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """Return the distance of the smallest and the largest elements."""
    return delivered(max(a, axis, keepdims=keepdims) - min(a, axis, keepdims=keepdims), out)


# ---- means


@rule("mean", method=True)
def mean(
    x: Any,
    /,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    *,
    where: Any = True,
) -> Any:
    """Return the mean.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.

    """
    x = settled(x)
    plan = plan_reduction(x.layout, axis, bool(keepdims))
    as_numpy = x.dtype.kind == "m" or not reproducible_sums()
    if not plan.axes and where is True and as_numpy:
        part = np.mean(x.local, plan.dims, dtype=dtype, keepdims=bool(keepdims))
        return delivered(make(result_array(part), plan.layout), out, "unsafe")
    wide, narrow = _mean_dtypes(x.dtype, dtype)
    total = reduced(x, axis, keepdims, np.add.reduce, ReduceOp.SUM, None, where, dtype=wide)
    count = plan.merged if where is True else _counted(x, axis, keepdims, where).local
    part = np.true_divide(total.local, count).astype(narrow, copy=False)
    return delivered(make(result_array(part), plan.layout), out, "unsafe")


def _mean_dtypes(given: Any, dtype: Any) -> tuple[Any, Any]:
    """Return in which dtype a mean is summed, and in which it is told."""
    if dtype is not None:
        return dtype, dtype
    if given.kind in "bui":
        return np.float64, np.float64
    if given.kind == "m":  # NumPy takes no dtype with a unit
        return None, given
    return (np.float32 if given == np.float16 else given), given


def _counted(x: DistArray, axis: Any, keepdims: Any, where: Any) -> DistArray:
    ones = make(np.broadcast_to(np.array(1.0), x.local.shape), x.layout)
    return reduced(ones, axis, keepdims, np.add.reduce, ReduceOp.SUM, None, where)


@rule("var", method=True)
def var(
    x: Any,
    /,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
    mean: Any = NOT_GIVEN,
    correction: Any = NOT_GIVEN,
) -> Any:
    """Return the variance: the mean of the squared distances from the mean.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        ddof: subtracted from the number of elements that is divided by.
        keepdims: keep reduced dimensions, of length 1.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.
        mean: the mean, if it is known, computed with ``keepdims=True``.
        correction: another name of `ddof`.

    """
    x = settled(x)
    ddof = ddof if correction is NOT_GIVEN else correction
    plan = plan_reduction(x.layout, axis, bool(keepdims))
    wide, narrow = _mean_dtypes(x.dtype, dtype)
    middle = _mean(x, axis, wide, where).local if mean is NOT_GIVEN else _mask(x, mean)
    mask = True if where is True else _mask(x, where)
    if dtype is None and x.dtype.kind == "c":  # distances are real
        wide = narrow = np.empty(0, narrow).real.dtype
    if reproducible_sums() and is_floating(wide or x.dtype):
        squares = _squared(np.subtract(x.local, middle))
        total = _added(squares, plan, bool(keepdims), wide or squares.dtype, mask)
    else:
        squares = _squares(x.local, middle, plan.dims, bool(keepdims), wide, mask)
        total = combined(squares, x.layout.mesh, plan.axes, ReduceOp.SUM)
    count: Any = plan.merged if where is True else _counted(x, axis, keepdims, where).local
    part = np.true_divide(total, np.maximum(count - ddof, 0)).astype(narrow, copy=False)
    return delivered(make(result_array(part), plan.layout), out, "unsafe")


def _mean(x: DistArray, axis: Any, dtype: Any, where: Any) -> DistArray:
    return mean(x, axis, dtype, keepdims=True, where=where)  # type: ignore[no-any-return]


def _squares(part: Any, mean: Any, dims: Any, keepdims: bool, dtype: Any, where: Any) -> Any:
    """Return the sum of the squared distances of a part from the mean, along `dims`."""
    if where is True and dims and _fits_blocks(part, mean, dtype):
        shape = [1 if dim in dims else n for dim, n in enumerate(part.shape)]
        if not keepdims:
            shape = [n for dim, n in enumerate(part.shape) if dim not in dims]
        return _squares_by_blocks(part, mean, dims).reshape(shape)
    squares = _squared(result_array(np.subtract(part, mean)))
    return result_array(np.sum(squares, dims, keepdims=keepdims, where=where, dtype=dtype))


def _squared(apart: Any) -> Any:
    """Return the squares of distances, which may be in their place."""
    if apart.dtype.kind == "c":
        return (apart * apart.conj()).real
    return np.multiply(apart, apart, out=apart)


_BLOCK = 1 << 15
"""Elements whose distances stay in the cache while they are squared and added."""


def _fits_blocks(part: Any, mean: Any, dtype: Any) -> bool:
    return (
        part.__class__ is np.ndarray
        and part.size > _BLOCK
        and part.flags.c_contiguous
        and np.dtype(dtype) == part.dtype == mean.dtype
        and part.dtype.char in "fd"
        and mean.ndim == part.ndim
    )


def _squares_by_blocks(part: Any, mean: Any, dims: tuple[int, ...]) -> Any:
    """Return what `_squares` does, without an array of all distances."""
    if mean.size == 1:  # as rows of one length
        part = part.reshape(-1)
        mean = mean.reshape(1)
    over = (0,) if part.ndim == 1 else dims
    total = np.zeros([1 if dim in over else n for dim, n in enumerate(part.shape)], part.dtype)
    rows = builtins.max(1, _BLOCK // (part.size // part.shape[0]))
    room = np.empty((rows, *part.shape[1:]), part.dtype)
    for lo in range(0, part.shape[0], rows):
        here = slice(None) if mean.shape[0] == 1 else slice(lo, lo + rows)
        block = part[lo : lo + rows]
        apart = np.subtract(block, mean[here], out=room[: len(block)])
        if part.ndim == 1:
            total += np.dot(apart, apart)
            continue
        np.multiply(apart, apart, out=apart)
        total[here] += np.add.reduce(apart, over, keepdims=True)
    return total


@rule("std", method=True)
def std(
    x: Any,
    /,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
    mean: Any = NOT_GIVEN,
    correction: Any = NOT_GIVEN,
) -> Any:
    """Return the standard deviation: the root of the variance.

    Args:
        x: the array.
        axis: the dimension, or several in a tuple; None for all.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        ddof: subtracted from the number of elements that is divided by.
        keepdims: keep reduced dimensions, of length 1.
        where: a mask, broadcast to the array's shape; what it leaves out does not count.
        mean: the mean, if it is known, computed with ``keepdims=True``.
        correction: another name of `ddof`.

    """
    result = var(
        x, axis, dtype, None, ddof, keepdims, where=where, mean=mean, correction=correction
    )
    part = result_array(np.sqrt(result.local)).astype(result.dtype, copy=False)
    return delivered(make(part, result.layout), out)


# ---- where the extremes are


@rule("argmax", method=True)
def argmax(x: Any, /, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
    """Return the index of the largest element, of equal ones the first; of a NaN, if any.

    Args:
        x: the array.
        axis: the dimension; None for the flat array.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.

    """
    return _told(_located(x, axis, keepdims, np.argmax, ReduceOp.MAX), out)


@rule("argmin", method=True)
def argmin(x: Any, /, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
    """Return the index of the smallest element, of equal ones the first; of a NaN, if any.

    Args:
        x: the array.
        axis: the dimension; None for the flat array.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        keepdims: keep reduced dimensions, of length 1.

    """
    return _told(_located(x, axis, keepdims, np.argmin, ReduceOp.MIN), out)


def _told(index: DistArray, out: Any) -> Any:
    """Return an index, or `out` with it, whose dtype must be one of indices."""
    if is_dist(out) and not np.can_cast(out.dtype, np.intp):
        raise TypeError(f"an index cannot be written to an out of {out.dtype}")
    return delivered(index, out, "unsafe")


def _located(
    x: DistArray, axis: Any, keepdims: Any, function: Callable[..., Any], op: ReduceOp
) -> DistArray:
    x = settled(x)
    _check_sent(x)
    axis = None if axis is None else integer(axis)
    axis = None if not x.ndim and axis in (0, -1) else axis
    plan = plan_reduction(x.layout, axis, True)
    if plan.merged == 0:
        function(np.empty(x.shape, x.dtype), axis)  # raises NumPy's error, if it is one
    local = x.local
    if x.layout.mesh.coordinate is None or 0 in [local.shape[dim] for dim in plan.dims]:
        told = [1 if dim in plan.dims else length for dim, length in enumerate(local.shape)]
        value = np.full(told, neutral(x.dtype, op), x.dtype)
        index = np.full(told, _NOWHERE)
    else:
        found = result_array(function(local, axis, keepdims=True))
        index = _global_index(found, x, plan, axis)
        value = (
            local[np.unravel_index(found, local.shape)]
            if axis is None
            else np.take_along_axis(local, found, plan.dims[0])
        )
    if plan.axes:
        best = combined(value.copy(), x.layout.mesh, plan.axes, op)
        same = value == best
        if value.dtype.kind in "fcmM":
            same |= (value != value) & (best != best)
        index = np.where(same, index, _NOWHERE)
        index = combined(index, x.layout.mesh, plan.axes, ReduceOp.MIN)
    final = plan_reduction(x.layout, axis, bool(keepdims)).layout
    return make(
        index
        if keepdims
        else index.reshape([n for d, n in enumerate(index.shape) if d not in plan.dims]),
        final,
    )


_NOWHERE = np.iinfo(np.int64).max


def _global_index(found: Any, x: DistArray, plan: Plan, axis: Any) -> Any:
    """Convert indices into this rank's part to indices into the whole array."""
    box = own_box(x.layout)
    if axis is not None:
        return found + box[plan.dims[0]][0]
    places = np.unravel_index(found, x.local.shape)
    if not places:
        return found
    moved = tuple([place + lo for place, (lo, _) in zip(places, box, strict=True)])
    return np.ravel_multi_index(moved, x.shape)
