"""Running sums, products and extremes, and differences.

Each rank runs over its part; along a cut dimension it starts from what the parts before it come
to, which the ranks tell each other: one slice each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.rules.basis import (
    along,
    combined,
    delivered,
    dimension,
    integer,
    make,
    of_all_parts,
    part_number,
    settled,
)
from hpcdist.mesh.rules.overflow import in_turn, may_leave, watched
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.shapes import broadcast_to, concat, expand_dims, ravel
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.call.reduction import ReduceOp


def running(x: Any, axis: int | None, ufunc: Any, dtype: Any, out: Any = None) -> Any:
    """Return `ufunc` run along a dimension, or over the flat array."""
    x = settled(ravel(x) if axis is None or not x.ndim else x)
    dim = dimension(0 if axis is None else integer(axis), x.ndim)
    if not x.layout.axes[dim]:
        part = np.asarray(ufunc.accumulate(x.local, axis=dim, dtype=dtype))
    elif ufunc is np.multiply and may_leave(x, dtype):
        part = _product_of_parts(x, dim, dtype)
    else:
        part = _from_part_to_part(x, dim, ufunc, dtype)
    return delivered(make(part, x.layout), out, "unsafe")


def _from_part_to_part(x: DistArray, dim: int, ufunc: Any, dtype: Any) -> Any:
    """Run over this rank's part, and start from what the parts before come to."""
    part = ufunc.accumulate(x.local, axis=dim, dtype=dtype)
    dtype = None if part.dtype.kind in "mM" else part.dtype  # which NumPy does not take
    shape = [1 if each == dim else length for each, length in enumerate(part.shape)]
    total = part[along(dim, slice(-1, None))] if part.shape[dim] else np.zeros(shape, part.dtype)
    totals = of_all_parts(total, x.layout, dim)
    lengths = np.diff(x.layout.cuts[dim])[: part_number(x.layout, dim)]
    if not lengths.any():
        return part
    # An accumulation begins with the first total, not with a 0 that would turn -0.0 into 0.0.
    before = ufunc.accumulate(totals[: lengths.size][lengths > 0], axis=0, dtype=dtype)[-1]
    return ufunc(before, part, out=part)


def _product_of_parts(x: DistArray, dim: int, dtype: Any) -> Any:
    """Run over this rank's part; if numbers leave their range, part after part."""
    mesh, axes = x.layout.mesh, x.layout.axes[dim]
    part, left = watched(lambda: _from_part_to_part(x, dim, np.multiply, dtype))
    if not combined(np.array([left], np.uint8), mesh, axes, ReduceOp.MAX)[0]:
        return part

    own = part

    def after(before: Any) -> Any:
        nonlocal own
        numbers = np.concatenate([before, x.local.astype(part.dtype)], dim)
        products = np.multiply.accumulate(numbers, axis=dim)
        own = products[along(dim, slice(1, None))]
        return products[along(dim, slice(-1, None))]

    start = np.ones([1 if each == dim else n for each, n in enumerate(part.shape)], part.dtype)
    in_turn(start, after, mesh, axes)
    return own


def _dtype(x: Any, dtype: Any) -> Any:
    """Return the dtype of a running sum: small integers widen, as in NumPy."""
    if dtype is not None or x.dtype.kind not in "bui" or x.dtype.itemsize >= np.dtype(int).itemsize:
        return dtype
    return np.dtype(np.uint if x.dtype.kind == "u" else np.int_)


@rule("cumsum", method=True)
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the sums of the elements up to each one.

    Args:
        a: the array.
        axis: the dimension; None for the flat array.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.

    """
    return running(a, axis, np.add, _dtype(a, dtype), out)


@rule("cumprod", method=True)
def cumprod(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the products of the elements up to each one.

    Args:
        a: the array.
        axis: the dimension; None for the flat array.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.

    """
    return running(a, axis, np.multiply, _dtype(a, dtype), out)


@rule("cumulative_sum")
def cumulative_sum(
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    out: Any = None,
    include_initial: bool = False,
) -> Any:
    """Return the sums of the elements up to each one, if so asked after a first 0."""
    return _cumulative(x, axis, np.add, _dtype(x, dtype), out, include_initial)


@rule("cumulative_prod")
def cumulative_prod(
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    out: Any = None,
    include_initial: bool = False,
) -> Any:
    """Return the products of the elements up to each one, if so asked after a first 1."""
    return _cumulative(x, axis, np.multiply, _dtype(x, dtype), out, include_initial)


def _cumulative(
    x: Any, axis: int | None, ufunc: Any, dtype: Any, out: Any, include_initial: bool
) -> Any:
    x = x if x.ndim else expand_dims(x, 0)
    if axis is None and x.ndim != 1:
        raise ValueError(f"axis must be given for an array of {x.ndim} dimensions")
    dim = dimension(0 if axis is None else integer(axis), x.ndim)
    result = running(x, dim, ufunc, dtype)
    if include_initial:
        shape = [1 if each == dim else length for each, length in enumerate(x.shape)]
        result = concat([np.full(shape, ufunc.identity, result.dtype), result], dim)
    return delivered(result, out, "unsafe")


@rule("diff")
def diff(a: Any, /, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the differences of neighbours along a dimension; only the seams travel."""
    a, dim = settled(a), dimension(axis, a.ndim)
    if n < 0:
        raise ValueError(f"order must be non-negative but got {n}")
    if n == 0:
        return a
    edges = [_edge(a, each, dim) for each in (prepend, append)]
    if any(each is not None for each in edges):
        a = concat([each for each in (edges[0], a, edges[1]) if each is not None], dim)
    function: Callable[..., Any] = np.not_equal if a.dtype.kind == "b" else np.subtract
    for _ in range(n):
        later, sooner = a[along(dim, slice(1, None))], a[along(dim, slice(-1))]
        a = pointwise(function, later, sooner)
    return a


def _edge(a: Any, value: Any, dim: int) -> Any:
    if value is None or value is getattr(np, "_NoValue", None):
        return None
    if np.ndim(value) == 0:
        shape = tuple(1 if each == dim else length for each, length in enumerate(a.shape))
        return np.full(shape, value) if not hasattr(value, "layout") else broadcast_to(value, shape)
    return value
