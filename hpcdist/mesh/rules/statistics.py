"""Counting and searching: histograms, places in a table, sums without NaN, weighted means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules.basis import (
    as_dist,
    combined,
    cutting,
    delivered,
    dimension,
    is_dist,
    make,
    resharded,
    settled,
    whole_on,
)
from hpcdist.mesh.rules.masks import where as chosen
from hpcdist.mesh.rules.pointwise import astype, pointwise
from hpcdist.mesh.rules.reductions import (
    NOT_GIVEN,
    max as largest,
    mean,
    min as smallest,
    sum as total,
    var,
)
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.reduction import ReduceOp

# ---- how many


@rule("histogram")
def histogram(
    a: Any,
    bins: Any = 10,
    range: Any = None,
    density: Any = None,
    weights: Any = None,
) -> Any:
    """Return how many elements are in each bin, and the edges of the bins; on every rank."""
    if isinstance(bins, str):
        options = {"range": range, "density": density, "weights": weights}
        hint = "Give the number of bins, or their edges"
        return without_rule(
            "numpy.histogram of bins that NumPy chooses", np.histogram, (a, bins), options, hint
        )
    x = settled(a)
    if x.dtype.kind == "b":
        x = astype(x, np.uint8)
    weights = _beside(x, weights)
    if is_dist(bins):
        bins = np.asarray(bins)
    if np.ndim(bins) == 0 and range is None and x.size:
        range = tuple(each(x).local[()] for each in (smallest, largest))
    edges = np.histogram_bin_edges(np.empty(0, x.dtype), bins, range)
    counts, _ = np.histogram(x.local, bins, range, weights=weights)
    mesh = x.layout.mesh
    combined(counts, mesh, _cutting(x), ReduceOp.SUM)
    if density:
        counts = counts / np.array(np.diff(edges), float) / counts.sum()
    return tuple(make(each, whole_on(mesh, each.shape)) for each in (counts, edges))


@rule("bincount")
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Any:
    """Return how often each of the numbers 0, 1, 2 ... is there; on every rank."""
    if x.ndim != 1:
        raise ValueError(f"bincount is of arrays of one dimension, got {x.ndim}")
    x = settled(x)
    weights = _beside(x, weights)
    if x.size:
        if smallest(x).item() < 0:
            raise ValueError("bincount is of numbers from 0 on, but some are negative")
        minlength = max(minlength, int(largest(x).item()) + 1)
    counts: Any = np.bincount(x.local, weights, minlength)
    if weights is not None:
        counts = counts.astype(float, copy=False)  # NumPy's are integers where there is nothing
    mesh = x.layout.mesh
    combined(counts, mesh, _cutting(x), ReduceOp.SUM)
    return make(counts, whole_on(mesh, counts.shape))


def _beside(x: DistArray, weights: Any) -> Any:
    """Return this rank's part of weights, one for each element."""
    if weights is None:
        return None
    weights = as_dist(weights, x.layout.mesh)
    if weights.shape != x.shape:
        raise UsageError(
            f"there must be one weight for each element of {x.shape}, got {weights.shape}"
        )
    return resharded(weights, x.layout).local


def _cutting(x: Any) -> tuple[int, ...]:
    return cutting(x.layout, [*np.arange(x.ndim)])


# ---- where in a table that every rank has


def _looked_up(name: str, x: Any, tables: tuple[Any, ...], function: Callable[..., Any]) -> Any:
    """Return `function` of the elements and of tables, of which every rank needs all."""
    if not is_dist(x):
        x = as_dist(x, next(each for each in tables if is_dist(each)).layout.mesh)
    if any(is_dist(each) and not each.layout.is_replicated for each in tables):
        return without_rule(
            name, function, (x, *tables), {}, "Let every rank have all of the table"
        )
    whole = [each.local if is_dist(each) else each for each in tables]
    return pointwise(lambda part: function(part, *whole), x)


@rule("digitize")
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """Return the numbers of the bins that elements are in."""
    return _looked_up(
        "numpy.digitize", x, (bins,), lambda part, edges: np.digitize(part, edges, right)
    )


@rule("interp")
def interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    """Return the values between those of a table."""
    numpys: Any = np.interp

    def function(part: Any, *table: Any) -> Any:
        return numpys(part, *table, left, right, period)

    return _looked_up("numpy.interp", x, (xp, fp), function)


# ---- means


@rule("average")
def average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False
) -> Any:
    """Return the mean of elements with weights, and if so asked the sum of the weights."""
    keepdims = False if keepdims is NOT_GIVEN else keepdims
    if weights is None:
        found = mean(a, axis, keepdims=keepdims)
        weight: Any = np.full(found.shape, a.size / max(found.size, 1))
    else:
        weights = weights if is_dist(weights) else np.asarray(weights)
        if weights.shape != a.shape:
            dim = dimension(axis, a.ndim)
            weights = weights.reshape([-1 if each == dim else 1 for each in np.arange(a.ndim)])
        every = pointwise(lambda x, w: np.broadcast_to(w, x.shape) * 1.0, a, weights)
        weight = total(every, axis, keepdims=keepdims)
        found = total(pointwise(np.multiply, a, every), axis, keepdims=keepdims) / weight
    if not returned:
        return found
    return found, weight if is_dist(weight) else as_dist(weight, a.layout.mesh)


# ---- without NaN


@rule("nansum")
def nansum(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
) -> Any:
    """Return the sum, NaN as 0."""
    return total(_instead(a, 0), axis, dtype, out, keepdims is True)


@rule("nanmax")
def nanmax(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """Return the largest elements that are not NaN."""
    return _nan_extreme(a, axis, out, keepdims, largest, -np.inf)


@rule("nanmin")
def nanmin(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """Return the smallest elements that are not NaN."""
    return _nan_extreme(a, axis, out, keepdims, smallest, np.inf)


def _nan_extreme(a: Any, axis: Any, out: Any, keepdims: Any, function: Any, worst: float) -> Any:
    if a.dtype.kind != "f":
        return function(a, axis, out, keepdims is True)
    found = function(_instead(a, worst), axis, None, keepdims is True)
    count = total(_there(a), axis, keepdims=keepdims is True)
    return delivered(chosen(count == 0, np.array(np.nan, a.dtype), found), out)


@rule("nanmean")
def nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
) -> Any:
    """Return the mean of the elements that are not NaN."""
    return mean(a, axis, dtype, out, keepdims is True, where=_there(a))


@rule("nanvar")
def nanvar(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = False,
) -> Any:
    """Return the variance of the elements that are not NaN."""
    return var(a, axis, dtype, out, ddof, keepdims is True, where=_there(a))


@rule("nanstd")
def nanstd(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = False,
) -> Any:
    """Return the standard deviation of the elements that are not NaN."""
    return delivered(pointwise(np.sqrt, nanvar(a, axis, dtype, None, ddof, keepdims)), out)


def _there(a: Any) -> Any:
    return pointwise(lambda part: part == part, a)


def _instead(a: Any, value: float) -> Any:
    """Return the elements, NaN replaced."""
    return a if a.dtype.kind not in "fc" else chosen(_there(a), a, a.dtype.type(value))
