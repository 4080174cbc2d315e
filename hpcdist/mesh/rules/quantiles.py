"""Order statistics: medians and quantiles.

Where [Note: pencils] applies each rank computes of whole lines. Otherwise the elements are put in
order, and every rank gets those few that a result is made of.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules.along import along
from hpcdist.mesh.rules.basis import (
    delivered,
    dimensions,
    make,
    whole_on,
)
from hpcdist.mesh.rules.reductions import is_asked
from hpcdist.mesh.rules.shapes import ravel
from hpcdist.mesh.rules.sorting import in_order
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.taking import take
from hpcdist.mesh.rules.without_nan import nanmean
from hpcdist.named_tuple import NamedTuple

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

    return delivered(_statistic("numpy.median", a, axis, keepdims, 0, of_lines, _middle), out)


def _middle(x: DistArray) -> Any:
    """Return the median of elements in order."""
    half, is_odd = divmod(x.size, 2)
    middle = [half] if is_odd else [half - 1, half]
    # The last one is NaN if any is.
    found = _picked(x, np.array([*middle, x.size - 1])) if x.size else x.local
    return np.median(found[-1:] if x.size and _is_nan(found[-1]) else found[: len(middle)])


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
        return without_rule("numpy.quantile with weights", np.quantile, (a, q), options)
    parts = _parts(a, q)
    if not np.all((np.asarray(parts) >= 0) & (np.asarray(parts) <= 1)):
        raise ValueError("Quantiles must be in the range [0, 1]")
    return delivered(_quantile(a, parts, axis, method, keepdims), out)


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
        return without_rule("numpy.percentile with weights", np.percentile, (a, q), options)
    parts = _parts(a, q, 100)
    if not np.all((np.asarray(parts) >= 0) & (np.asarray(parts) <= 1)):
        raise ValueError("Percentiles must be in the range [0, 100]")
    return delivered(_quantile(a, parts, axis, method, keepdims), out)


def _parts(a: Any, q: Any, of: int = 1) -> Any:
    """Return which parts of all are asked for, in the precision that this NumPy gives them."""
    if _numbers_are_weak():
        if type(q) in (int, float):
            return q if of == 1 else q / of
        return np.asarray(q) if of == 1 else np.asarray(np.true_divide(q, of))
    is_real = a.dtype.kind == "f"
    if of == 1:
        return np.asarray(q, a.dtype if is_real and isinstance(q, (int, float)) else None)
    return np.asarray(np.true_divide(q, a.dtype.type(of) if is_real else of))


@functools.cache
def _numbers_are_weak() -> bool:
    """Return whether a number of Python's leaves the result its dtype, and NumPy's does not."""
    return bool(np.quantile(np.zeros(1, np.float32), np.float64(0)).dtype == np.float64)


def _quantile(a: Any, q: Any, axis: Any, method: str, keepdims: bool) -> Any:
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    if a.dtype.kind == "c":
        raise TypeError("a must be an array of real numbers")

    def of_lines(part: Any, dims: tuple[int, ...]) -> Any:
        return np.quantile(part, q, axis=dims, method=method, keepdims=keepdims)  # type: ignore[call-overload]

    def of_all(x: DistArray) -> Any:
        return _interpolated(x, q, _METHODS[method])

    return _statistic("numpy.quantile", a, axis, keepdims, np.ndim(q), of_lines, of_all)


def _statistic(
    name: str,
    a: Any,
    axis: Any,
    keepdims: bool,
    new: int,
    of_lines: Callable[[Any, tuple[int, ...]], Any],
    line: Callable[[DistArray], Any] | None = None,
) -> Any:
    """Return a statistic along `axis`, which has `new` dimensions before the others."""
    dims = dimensions(axis, a.ndim)

    def function(part: Any) -> Any:
        if part.size or not math.prod(a.shape):
            return of_lines(part, dims)
        # There are elements, but none of the results is here.
        filled = np.zeros([n if dim in dims else 1 for dim, n in enumerate(a.shape)], part.dtype)
        shape = [
            1 if dim in dims else n
            for dim, n in enumerate(part.shape)
            if keepdims or dim not in dims
        ]
        found = of_lines(filled, dims)
        more = found.shape[: found.ndim - len(shape)] if shape else found.shape
        return np.empty((*more, *shape), found.dtype)

    def of_all(x: DistArray) -> Any:
        assert line is not None
        found = np.asarray(line(in_order(ravel(x))))
        kept = [1 for dim in range(x.ndim) if keepdims or dim not in dims]
        found = found.reshape((*found.shape, *kept))
        return make(found, whole_on(x.layout.mesh, found.shape))

    return along(name, function, a, dims, new=new, line=of_all if line else None)


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
        raise IndexError("quantiles need at least one element")
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


# ---- without NaN


def _numbers(x: DistArray) -> DistArray:
    """Return elements in order without the NaN at their end; the first one if there is no other."""
    count = int(np.count_nonzero(x == x))
    if x.size and not count:
        warnings.warn("All-NaN slice encountered", RuntimeWarning, stacklevel=2)
    return x[: max(count, 1)]


@rule("nanmedian")
def nanmedian(
    a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False
) -> Any:
    """Return the middle of the elements that are not NaN."""
    keepdims = is_asked(keepdims)

    def of_lines(part: Any, dims: tuple[int, ...]) -> Any:
        return np.nanmedian(part, dims, keepdims=keepdims)

    def of_all(x: DistArray) -> Any:
        return _middle(_numbers(x))

    return delivered(_statistic("numpy.nanmedian", a, axis, keepdims, 0, of_lines, of_all), out)


def _without_nan(name: str, whole: int) -> None:
    numpys = getattr(np, name)

    def found(
        a: Any,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: str = "linear",
        keepdims: bool = False,
    ) -> Any:
        kept, new = keepdims is True, np.ndim(q)
        if a.dtype.kind == "c":
            raise TypeError("a must be an array of real numbers")
        if not a.size:  # NumPy does not look at q
            return nanmean(a, axis, out=out, keepdims=kept)

        def of_lines(part: Any, dims: tuple[int, ...]) -> Any:
            # NumPy mixes several dimensions of q among the others.
            shares = np.reshape(q, -1) if new > 1 else q
            found = numpys(part, shares, axis=dims, method=method, keepdims=kept)
            return found.reshape(*np.shape(q), *found.shape[1:]) if new > 1 else found

        def of_all(x: DistArray) -> Any:
            if method not in _METHODS:
                numpys(np.zeros(1), q, method=method)  # raises NumPy's error
            share = _parts(a, q, whole)
            if not np.all((np.asarray(share) >= 0) & (np.asarray(share) <= 1)):
                raise ValueError(f"{name} takes shares from 0 to {whole}, got {q}")
            return _interpolated(_numbers(x), share, _METHODS[method])

        found = _statistic(f"numpy.{name}", a, axis, kept, new, of_lines, of_all)
        return delivered(found, out)

    found.__name__, found.__doc__ = name, f"Return what `numpy.{name}` does along dimensions."
    rule(name)(found)


for _name, _all in (("nanquantile", 1), ("nanpercentile", 100)):
    _without_nan(_name, _all)
