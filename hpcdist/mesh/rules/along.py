"""Functions that need all elements along a dimension: sorting, quantiles; others use `along`.

[Note: pencils] Each rank computes what it has, if the dimension is not cut. If it is, what cuts it
cuts another dimension instead, the longest of those not cut, and stays there: each element travels
once at most, and no rank has more than its share. An array that has no other dimension, as one of
a single dimension, has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules.basis import (
    cutting,
    delivered,
    dimension,
    dimensions,
    make,
    resharded,
    result_array,
    settled,
)
from hpcdist.mesh.rules.shapes import flip, ravel
from hpcdist.mesh.rules.table import rule


def along(
    name: str,
    function: Callable[..., Any],
    x: DistArray,
    dims: Sequence[int],
    *,
    stacked: bool = False,
    hint: str = "Give the array another dimension to cut it along",
) -> Any:
    """Return `function` of an array that is not cut along `dims`, or of its parts.

    The result has the dimensions of the array, or lacks `dims`, and may have new ones before the
    others; or, if `stacked`, the others come first and then what the function makes of `dims`.
    """
    x = settled(x)
    layout = pencils(x.layout, tuple(dims))
    if layout is None:
        return without_rule(name, function, (x,), {}, hint)
    part = resharded(x, layout).local
    if layout.mesh.coordinate is None:  # nothing of what there is
        part = np.zeros([n if dim in dims else 0 for dim, n in enumerate(x.shape)], x.dtype)
    return _spread(function(part), layout, tuple(dims), stacked)


def pencils(layout: Layout, dims: tuple[int, ...]) -> Layout | None:
    """Return the layout with no cuts along `dims`, see [Note: pencils]; None if there is none."""
    axes = cutting(layout, dims)
    if not axes:
        return layout
    others = [dim for dim, length in enumerate(layout.shape) if dim not in dims and length != 1]
    if not others:
        return None
    home = max(others, key=lambda dim: (not layout.axes[dim], layout.shape[dim]))
    moved = [() if dim in dims else each for dim, each in enumerate(layout.axes)]
    cuts = [None if dim in (*dims, home) else each for dim, each in enumerate(layout.cuts)]
    moved[home] += axes
    return make_layout(layout.mesh, layout.shape, moved, cuts)


def _spread(part: Any, layout: Layout, dims: tuple[int, ...], stacked: bool) -> Any:
    """Return what was made of this rank's part as arrays."""
    if isinstance(part, tuple):
        parts = [_spread(each, layout, dims, stacked) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    part = result_array(part)
    kept: list[int | None] = [*range(len(layout.shape))]
    if stacked or part.ndim < len(kept):
        kept = [dim for dim in kept if dim not in dims]
    new: list[int | None] = [None] * (part.ndim - len(kept))
    places = [*kept, *new] if stacked else [*new, *kept]
    here = [dim if dim not in dims else None for dim in places]
    shape = [
        length if dim is None else layout.shape[dim]
        for dim, length in zip(here, part.shape, strict=True)
    ]
    axes = [() if dim is None else layout.axes[dim] for dim in here]
    cuts = [None if dim is None else layout.cuts[dim] for dim in here]
    return make(part, make_layout(layout.mesh, shape, axes, cuts))


# ---- sorting


@rule("sort")
def sort(
    x: Any,
    /,
    axis: int | None = -1,
    kind: Any = None,
    order: Any = None,
    *,
    descending: bool = False,
    stable: bool | None = None,
) -> Any:
    """Return the elements in order along a dimension."""
    x = ravel(x) if axis is None else x
    dim = dimension(-1 if axis is None else axis, x.ndim)
    kind = kind or ("stable" if stable else None)
    result = along("numpy.sort", lambda part: np.sort(part, dim, kind), x, (dim,))
    return flip(result, dim) if descending else result


@rule("argsort", method=True)
def argsort(
    x: Any,
    /,
    axis: int | None = -1,
    kind: Any = None,
    order: Any = None,
    *,
    descending: bool = False,
    stable: bool | None = None,
) -> Any:
    """Return the indices along a dimension of the elements in order."""
    x = ravel(x) if axis is None else x
    dim = dimension(-1 if axis is None else axis, x.ndim)
    kind = kind or ("stable" if stable or descending else None)

    def function(part: Any) -> Any:
        if not descending:
            return np.argsort(part, dim, kind)
        backwards = np.flip(np.argsort(np.flip(part, dim), dim, kind), dim)
        return part.shape[dim] - 1 - backwards

    return along("numpy.argsort", function, x, (dim,))


def _nothing(part: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    """Return the quantile of an array that has elements, but none of the results is here."""
    kind = np.float64 if part.dtype.kind in "bui" else part.dtype
    return np.empty(np.sum(part, dims, keepdims=keepdims).shape, kind)


def _quantiles(name: str) -> None:
    numpys = getattr(np, name)

    def found(
        a: Any,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        **options: Any,
    ) -> Any:
        dims = dimensions(axis, a.ndim)
        what = tuple(dims) if axis is not None else None

        def function(part: Any) -> Any:
            if part.size or not math.prod(a.shape):
                return numpys(part, q, axis=what, **options)
            nothing = _nothing(part, dims, bool(options.get("keepdims")))
            return np.empty((*np.shape(q), *nothing.shape), nothing.dtype)

        return delivered(along(f"numpy.{name}", function, a, dims), out)

    found.__name__, found.__doc__ = name, f"Return what `numpy.{name}` does along dimensions."
    rule(name)(found)


for _name in ("quantile", "percentile", "nanquantile", "nanpercentile"):
    _quantiles(_name)


@rule("median")
def median(
    a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: bool = False
) -> Any:
    """Return the median along dimensions."""
    dims = dimensions(axis, a.ndim)

    def function(part: Any) -> Any:
        if part.size or not math.prod(a.shape):
            return np.median(part, dims, keepdims=keepdims)
        return _nothing(part, dims, keepdims)

    return delivered(along("numpy.median", function, a, dims), out)
