"""Counting and searching: histograms, places in a table, weighted means, covariances."""

from __future__ import annotations

import warnings
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
    dimension,
    failing_alike,
    is_dist,
    make,
    mesh_of,
    resharded,
    settled,
    whole_on,
)
from hpcdist.mesh.rules.norms import diagonal
from hpcdist.mesh.rules.pointwise import astype, pointwise, real
from hpcdist.mesh.rules.products import matmul
from hpcdist.mesh.rules.reductions import (
    any as exists,
    is_asked,
    max as largest,
    mean,
    min as smallest,
    sum as total,
)
from hpcdist.mesh.rules.shapes import (
    atleast_2d,
    broadcast_to,
    concat,
    expand_dims,
    matrix_transpose,
    squeeze,
)
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.call.reduction import ReduceOp

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
    one = None if weights is None else np.zeros(1, weights.dtype)
    np.histogram(np.zeros(1, x.dtype), edges, weights=one)  # raises what no elements would not
    mesh, axes = x.layout.mesh, _cutting(x)
    refused = ValueError("elements of another rank were refused, see the error there")
    counts, _ = failing_alike(
        lambda: np.histogram(x.local, bins, range, weights=weights),
        mesh,
        axes if x.dtype.kind in "cO" else (),  # no others are refused for what they are
        refused,
    )
    combined(counts, mesh, axes, ReduceOp.SUM)
    if density:
        counts = counts / np.array(np.diff(edges), float) / counts.sum()
    return tuple(make(each, whole_on(mesh, each.shape)) for each in (counts, edges))


@rule("bincount")
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Any:
    """Return how often each of the numbers 0, 1, 2 ... is there; on every rank."""
    if x.ndim != 1:
        raise ValueError(f"bincount takes arrays of one dimension, got {x.ndim}")
    x = settled(x)
    weights = _beside(x, weights)
    if x.size:
        if smallest(x).item() < 0:
            raise ValueError("bincount takes integers of at least 0, but some are negative")
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
    mesh, keepdims = mesh_of(a, weights), is_asked(keepdims)
    x = as_dist(a, mesh)
    if axis is not None:
        given = axis if isinstance(axis, (tuple, list)) else (axis,)
        axis = tuple(dimension(each, x.ndim) for each in given)
    if weights is None:
        found = mean(x, axis, keepdims=keepdims)
        weight: Any = np.full(found.shape, x.size / max(found.size, 1), found.dtype)
    else:
        weights = _along(x, axis, weights if is_dist(weights) else np.asarray(weights))
        dtype = np.result_type(x.dtype, weights.dtype, *["f8"] * (x.dtype.kind in "bui"))
        options = {"axis": axis, "dtype": dtype, "keepdims": keepdims}
        weight = total(weights, **options) if is_dist(weights) else weights.sum(**options)
        if _is_zero(weight):
            raise ZeroDivisionError("Weights sum to zero, can't be normalized")
        weighed = pointwise(lambda part, each: np.multiply(part, each, dtype=dtype), x, weights)
        found = total(weighed, axis, keepdims=keepdims) / weight
    if not returned:
        return found
    weight = as_dist(weight, mesh)
    return found, weight if weight.shape == found.shape else broadcast_to(weight, found.shape)


# ---- how much together


@rule("cov")
def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Any:
    """Return the covariance of variables, by default one in each row."""
    if ddof is not None and ddof != int(ddof):
        raise ValueError("ddof must be integer")
    given = [each for each in (m, y) if each is not None]
    mesh = mesh_of(*given, fweights, aweights)
    dtype = dtype or np.result_type(*given, np.float64)
    x = concat([_variables(as_dist(each, mesh), rowvar, first=each is m) for each in given])
    x = astype(x, dtype, copy=False)
    if not x.shape[0]:
        return make(np.empty((0, 0)), whole_on(mesh, (0, 0)))
    weights = _weights(x, mesh, fweights, aweights)
    free = (0 if bias else 1) if ddof is None else ddof
    count: Any = x.shape[1] if weights is None else total(weights).item()
    if weights is None or aweights is None or not free:
        fact = count - free
    else:
        fact = count - free * total(weights * as_dist(aweights, mesh)).item() / count
    if fact <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=3)
        fact = 0.0
    apart = x - expand_dims(average(x, 1, weights), 1)
    other = apart if weights is None else apart * weights
    products = matmul(apart, np.conj(matrix_transpose(other)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return squeeze(products * float(np.true_divide(1, fact)))


def _variables(x: DistArray, rowvar: bool, *, first: bool) -> DistArray:
    """Return variables as rows."""
    if x.ndim > 2:
        raise ValueError(
            "m has more than 2 dimensions" if first else "y has more than 2 dimensions"
        )
    turned = not rowvar and (x.ndim != 1 if first else x.ndim == 2 and x.shape[0] != 1)
    rows = atleast_2d(x)
    return matrix_transpose(rows) if turned else rows  # type: ignore[no-any-return]


def _weights(x: DistArray, mesh: Any, fweights: Any, aweights: Any) -> Any:
    """Return how much each observation counts; None for all alike."""
    found: Any = None
    for name, each in (("fweights", fweights), ("aweights", aweights)):
        if each is None:
            continue
        own = as_dist(each, mesh)
        if own.ndim > 1:
            raise RuntimeError(f"cannot handle multidimensional {name}")
        if own.shape[0] != x.shape[1]:
            raise RuntimeError(f"incompatible numbers of samples and {name}")
        if name == "fweights" and own.dtype.kind not in "biu" and exists(own != np.around(own)):
            raise TypeError("fweights must be integer")
        if exists(own < 0):
            raise ValueError(f"{name} cannot be negative")
        own = astype(own, float)
        found = own if found is None else found * own
    return found


@rule("corrcoef")
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """Return the correlation of variables, by default one in each row."""
    found = cov(x, y, rowvar, dtype=dtype)
    if not found.ndim:
        return found / found
    deviations = pointwise(np.sqrt, real(diagonal(found)))
    found = found / expand_dims(deviations, 1) / deviations

    def within(part: Any) -> Any:
        if part.dtype.kind != "c":
            return np.clip(part, -1, 1)
        return np.clip(part.real, -1, 1) + 1j * np.clip(part.imag, -1, 1)

    return pointwise(within, found)


def _along(x: DistArray, axis: Any, weights: Any) -> Any:
    """Return weights that broadcast to an array: one for each element, or for places of axes."""
    if weights.shape == x.shape:
        return weights
    if axis is None:
        raise TypeError("Axis must be specified when shapes of a and weights differ.")
    if weights.shape != tuple(x.shape[dim] for dim in axis):
        raise ValueError(
            "Shape of weights must be consistent with shape of a along specified axis."
        )
    ordered = np.transpose(weights, np.argsort(axis).tolist())
    return ordered.reshape([n if dim in axis else 1 for dim, n in enumerate(x.shape)])


def _is_zero(weight: Any) -> bool:
    """Return whether any sum of weights is 0; the same on all ranks."""
    return bool(np.any(exists(weight == 0).local if is_dist(weight) else weight == 0))
