"""Running sums and products, and differences.

Each rank runs over its part; along a cut dimension it starts from what the parts before it come
to, which the ranks tell each other: one slice each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.rules.basis import (
    along,
    delivered,
    dimension,
    make,
    of_all_parts,
    part_number,
    settled,
)
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.shapes import broadcast_to, concat, ravel
from hpcdist.mesh.rules.table import rule


def running(x: Any, axis: int | None, ufunc: Any, dtype: Any, out: Any = None) -> Any:
    """Return `ufunc` run along a dimension, or over the flat array."""
    x = settled(ravel(x) if axis is None else x)
    dim = dimension(axis or 0, x.ndim)
    part = np.asarray(ufunc.accumulate(x.local, axis=dim, dtype=dtype))
    if x.layout.axes[dim]:
        total = ufunc.reduce(
            part[along(dim, slice(-1, None) if part.shape[dim] else slice(None))],
            axis=dim,
            keepdims=True,
            dtype=part.dtype,
        )
        totals = of_all_parts(total, x.layout, dim)
        before = ufunc.reduce(totals[: part_number(x.layout, dim)], axis=0, dtype=part.dtype)
        ufunc(before, part, out=part)
    return delivered(make(part, x.layout), out)


def _dtype(x: Any, dtype: Any) -> Any:
    """Return the dtype of a running sum: small integers widen, as in NumPy."""
    if dtype is not None or x.dtype.kind not in "bui" or x.dtype.itemsize >= np.dtype(int).itemsize:
        return dtype
    return np.dtype(np.uint if x.dtype.kind == "u" else np.int_)


@rule("cumsum", method=True)
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the sums of the elements up to each one."""
    return running(a, axis, np.add, _dtype(a, dtype), out)


@rule("cumprod", method=True)
def cumprod(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the products of the elements up to each one."""
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
    if axis is None and x.ndim != 1:
        raise ValueError(f"axis must be given for an array of {x.ndim} dimensions")
    dim = dimension(axis or 0, x.ndim)
    result = running(x, dim, ufunc, dtype)
    if include_initial:
        shape = [1 if each == dim else length for each, length in enumerate(x.shape)]
        result = concat([np.full(shape, ufunc.identity, result.dtype), result], dim)
    return delivered(result, out)


@rule("diff")
def diff(a: Any, /, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the differences of neighbours along a dimension; only the seams travel."""
    dim = dimension(axis, a.ndim)
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
