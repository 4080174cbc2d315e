"""Order statistics and counts: medians, quantiles, histograms.

Where an array of more dimensions has another one to be cut along, each rank computes of whole
lines. Otherwise the elements are put in order, and every rank gets those few that a result is made
of. Counts of the ranks are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules import reductions
from hpcdist.mesh.rules.basis import (
    as_dist,
    combined,
    cutting,
    delivered,
    dimensions,
    is_dist,
    make,
    resharded,
    result_array,
    settled,
    whole_on,
)
from hpcdist.mesh.rules.pointwise import astype
from hpcdist.mesh.rules.shapes import ravel
from hpcdist.mesh.rules.sorting import in_order, turn
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.taking import take
from hpcdist.transport.reduction import ReduceOp

# ---- of elements in order


@rule("median")
def median(
    a: Any,
    axis: Any = None,
    out: Any = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Any:
    """Return the middle of the elements, or the mean of the two in the middle."""

    def of_lines(part: Any, dims: tuple[int, ...]) -> Any:
        return np.median(part, dims, keepdims=keepdims)

    def of_all(x: DistArray) -> Any:
        half, is_odd = divmod(x.size, 2)
        middle = [half] if is_odd else [half - 1, half]
        # The last one is NaN if any is.
        found = _picked(x, np.array([*middle, x.size - 1])) if x.size else x.local
        return np.median(found[-1:] if x.size and _is_nan(found[-1]) else found[: len(middle)])

    return delivered(_statistic(a, axis, keepdims, (), of_lines, of_all), out)


@rule("quantile")
def quantile(
    a: Any,
    q: Any,
    axis: Any = None,
    out: Any = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: Any = None,
) -> Any:
    """Return the elements below which are the parts `q`, from 0 to 1, of all."""
    if weights is not None:
        options = {"axis": axis, "method": method, "keepdims": keepdims, "weights": weights}
        return without_rule("quantile with weights", np.quantile, (a, q), options)
    parts = np.asarray(q)
    if not np.all((parts >= 0) & (parts <= 1)):
        raise ValueError("Quantiles must be in the range [0, 1]")
    result = _quantile(a, q if type(q) in (int, float) else parts, axis, method, keepdims)
    return delivered(result, out)


@rule("percentile")
def percentile(
    a: Any,
    q: Any,
    axis: Any = None,
    out: Any = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: Any = None,
) -> Any:
    """Return the elements below which are `q` per cent of all."""
    if weights is not None:
        options = {"axis": axis, "method": method, "keepdims": keepdims, "weights": weights}
        return without_rule("percentile with weights", np.percentile, (a, q), options)
    parts = np.asarray(np.true_divide(q, 100))
    if not np.all((parts >= 0) & (parts <= 1)):
        raise ValueError("Percentiles must be in the range [0, 100]")
    given = float(parts) if type(q) in (int, float) else parts
    return delivered(_quantile(a, given, axis, method, keepdims), out)


def _quantile(a: Any, q: Any, axis: Any, method: str, keepdims: bool) -> DistArray:
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    if a.dtype.kind == "c":
        raise TypeError("a must be an array of real numbers")

    def of_lines(part: Any, dims: tuple[int, ...]) -> Any:
        return np.quantile(part, q, axis=dims, method=method, keepdims=keepdims)  # type: ignore[call-overload]

    def of_all(x: DistArray) -> Any:
        return _interpolated(x, q, _METHODS[method])

    return _statistic(a, axis, keepdims, np.shape(q), of_lines, of_all)


def _statistic(
    a: Any,
    axis: Any,
    keepdims: bool,
    more: tuple[int, ...],
    of_lines: Callable[[Any, tuple[int, ...]], Any],
    of_all: Callable[[DistArray], Any],
) -> DistArray:
    """Return a statistic along `axis`, which has `more` dimensions before the others."""
    x = settled(a)
    dims = dimensions(axis, x.ndim)
    turned = turn(x.layout, dims)
    if turned is None:
        part = np.asarray(of_all(in_order(ravel(x))))
        kept = [1 for dim in range(x.ndim) if keepdims or dim not in dims]
        part = part.reshape((*more, *kept))
        return make(part, whole_on(x.layout.mesh, part.shape))
    part = result_array(of_lines(resharded(x, turned).local, dims))
    along = [dim for dim in range(x.ndim) if keepdims or dim not in dims]
    layout = make_layout(
        turned.mesh,
        [*more, *(1 if dim in dims else turned.shape[dim] for dim in along)],
        [*[()] * len(more), *(() if dim in dims else turned.axes[dim] for dim in along)],
        [*[None] * len(more), *(None if dim in dims else turned.cuts[dim] for dim in along)],
    )
    return make(part, layout)


def _picked(x: DistArray, places: Any) -> Any:
    """Return elements of an array of one dimension, on every rank."""
    return np.asarray(take(x, places).local)


def _is_nan(value: Any) -> bool:
    return bool(value != value)


class Method(NamedTuple):
    """Where a quantile is in `n` elements in order, as a number; and how far to the next one."""

    place: Callable[[int, Any], Any]
    share: Callable[[Any, Any], Any] | None = None
    """Of the share and the place; None where places are those of elements."""


def _as_it_is(share: Any, place: Any) -> Any:
    return share


def _between(alpha: float, beta: float) -> Method:
    return Method(lambda n, q: n * q + (alpha + q * (1 - alpha - beta)) - 1, _as_it_is)


def _stepped(place: Any, stays: Callable[[Any, Any], Any]) -> Any:
    """Return the element at or after each place: at it where it `stays`."""
    before = np.floor(place)
    found = np.where(stays(place - before, before), before, before + 1)
    return np.maximum(found.astype(np.intp), 0)


_METHODS = {
    "linear": Method(lambda n, q: (n - 1) * q, _as_it_is),
    "lower": Method(lambda n, q: np.floor((n - 1) * q).astype(np.intp)),
    "higher": Method(lambda n, q: np.ceil((n - 1) * q).astype(np.intp)),
    "nearest": Method(lambda n, q: np.around((n - 1) * q).astype(np.intp)),
    "midpoint": Method(
        lambda n, q: 0.5 * (np.floor((n - 1) * q) + np.ceil((n - 1) * q)),
        lambda share, place: np.where(place % 1 == 0, 0.0, 0.5),
    ),
    "inverted_cdf": Method(lambda n, q: _stepped(n * q - 1, lambda share, at: share == 0)),
    "averaged_inverted_cdf": Method(
        lambda n, q: n * q - 1, lambda share, place: np.where(share == 0, 0.5, 1.0)
    ),
    "closest_observation": Method(
        lambda n, q: _stepped(n * q - 1 - 0.5, lambda share, at: (share == 0) & (at % 2 == 1))
    ),
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "median_unbiased": _between(1 / 3.0, 1 / 3.0),
    "normal_unbiased": _between(3 / 8.0, 3 / 8.0),
}
"""NumPy's, with its arithmetic, so that the bits are the same."""


def _interpolated(x: DistArray, q: Any, method: Method) -> Any:
    """Return quantiles of elements in order; `q` is an array, or a number of Python's."""
    if not x.size:
        raise IndexError("the quantiles of no elements are asked for")
    place = np.asarray(method.place(x.size, np.asarray(q)))
    before = np.clip(np.floor(place), 0, x.size - 1).astype(np.intp)
    after = np.clip(np.floor(place) + 1, 0, x.size - 1).astype(np.intp)
    after = np.where(place < 0, 0, after)
    places = np.concatenate([before.reshape(-1), after.reshape(-1), [x.size - 1]])
    found = _picked(x, places)
    if _is_nan(found[-1]):
        return np.full(place.shape, found[-1])
    one, two = (each.reshape(place.shape)[()] for each in np.split(found[:-1], 2))
    is_integer = place.dtype.kind in "iu" and method is _METHODS["linear"]
    if method.share is None or is_integer:
        return one
    # NumPy counts the last element as number -1.
    start = np.where(place >= x.size - 1, -1, np.where(place < 0, 0, np.floor(place)))
    share = np.asarray(method.share(place - start, place), place.dtype)
    return _lerp(one, two, float(share) if type(q) in (int, float) else share[()])


def _lerp(one: Any, two: Any, share: Any) -> Any:
    gap = two - one
    return np.where(np.asarray(share) >= 0.5, two - gap * (1 - share), one + gap * share)


# ---- counts


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
            "histogram of bins that NumPy estimates", np.histogram, (a, bins), options, hint
        )
    x = settled(a)
    if x.dtype.kind == "b":
        x = astype(x, np.uint8)
    weights = _beside(x, weights)
    if is_dist(bins):
        bins = np.asarray(bins)
    if np.ndim(bins) == 0 and range is None and x.size:
        range = tuple(each(x).local[()] for each in (reductions.min, reductions.max))
    edges = np.histogram_bin_edges(np.empty(0, x.dtype), bins, range)
    counts, _ = np.histogram(x.local, bins, range, weights=weights)
    mesh = x.layout.mesh
    combined(counts, mesh, cutting(x.layout, np.arange(x.ndim).tolist()), ReduceOp.SUM)
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
        if reductions.min(x).item() < 0:
            raise ValueError("bincount is of numbers from 0 on, but some are negative")
        minlength = max(minlength, int(reductions.max(x).item()) + 1)
    counts = np.bincount(x.local, weights, minlength)
    mesh = x.layout.mesh
    combined(counts, mesh, x.layout.axes[0], ReduceOp.SUM)
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
