"""Sums, extremes, means and running sums of the elements that are not NaN."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hpcdist.mesh.rules.basis import delivered
from hpcdist.mesh.rules.cumulative import cumprod, cumsum
from hpcdist.mesh.rules.masks import where as chosen
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.reductions import (
    NOT_GIVEN,
    argmax,
    argmin,
    is_asked,
    max as largest,
    mean,
    min as smallest,
    neutral,
    prod,
    sum as total,
    var,
)
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.call.reduction import ReduceOp


@rule("nansum")
def nansum(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the sum, NaN as 0."""
    numbers = a if a.dtype.kind not in "fc" else _instead(a, a.dtype.type(0))
    return total(numbers, axis, dtype, out, is_asked(keepdims), initial, where)


@rule("nanprod")
def nanprod(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the product, NaN as 1."""
    numbers = a if a.dtype.kind not in "fc" else _instead(a, a.dtype.type(1))
    return prod(numbers, axis, dtype, out, is_asked(keepdims), initial, where)


@rule("nanmax")
def nanmax(
    a: Any,
    axis: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the largest elements that are not NaN."""
    found = _nan_extreme(a, axis, keepdims, initial, where, largest, ReduceOp.MAX)
    return delivered(found, out)


@rule("nanmin")
def nanmin(
    a: Any,
    axis: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the smallest elements that are not NaN."""
    found = _nan_extreme(a, axis, keepdims, initial, where, smallest, ReduceOp.MIN)
    return delivered(found, out)


def _nan_extreme(
    a: Any, axis: Any, keepdims: Any, initial: Any, where: Any, function: Any, op: ReduceOp
) -> Any:
    found, missing = _extreme(a, axis, is_asked(keepdims), initial, where, function, op)
    if missing is not None and missing.local.any():
        warnings.warn("All-NaN slice encountered", RuntimeWarning, stacklevel=4)
    return found


def _extreme(
    a: Any, axis: Any, keepdims: Any, initial: Any, where: Any, function: Any, op: ReduceOp
) -> tuple[Any, Any]:
    """Return the extremes without NaN, and where there is nothing else, if that can be."""
    options = {"keepdims": keepdims, "where": where}
    if a.dtype.kind not in _WITH_TIMES:
        return function(a, axis, initial=initial, **options), None
    found = function(
        _instead(a, neutral(a.dtype, op), _WITH_TIMES), axis, initial=initial, **options
    )
    if initial is not NOT_GIVEN and initial is not None:
        return found, None
    nothing = np.array("NaT" if a.dtype.kind in "mM" else np.nan, a.dtype)
    missing = pointwise(np.equal, total(_there(a, kinds=_WITH_TIMES), axis, **options), 0)
    return chosen(missing, nothing, found), missing


def fmax_reduce(
    a: Any,
    axis: Any = 0,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the largest elements that are not NaN, without a warning where there are none."""
    found, _ = _extreme(a, axis, keepdims, initial, where, largest, ReduceOp.MAX)
    return delivered(found, out)


def fmin_reduce(
    a: Any,
    axis: Any = 0,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Return the smallest elements that are not NaN, without a warning where there are none."""
    found, _ = _extreme(a, axis, keepdims, initial, where, smallest, ReduceOp.MIN)
    return delivered(found, out)


@rule("nanargmax")
def nanargmax(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
    """Return the index of the largest element that is not NaN."""
    return argmax(_known(a, axis, -np.inf), axis, out, keepdims=keepdims is True)


@rule("nanargmin")
def nanargmin(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
    """Return the index of the smallest element that is not NaN."""
    return argmin(_known(a, axis, np.inf), axis, out, keepdims=keepdims is True)


def _known(a: Any, axis: Any, worst: float) -> Any:
    """Return the elements, NaN replaced; refuse, on all ranks, to find one where all are NaN.

    NaT is a value here, as to NumPy, and what is no floating-point number stays as it is.
    """
    if a.dtype.kind not in _NUMBERS:
        return a
    counts = total(_there(a), axis)
    fewest = smallest(counts).local if counts.size and a.size else 1
    if a.layout.mesh.coordinate is not None and fewest == 0:
        raise ValueError("All-NaN slice encountered")
    return _instead(a, worst)


@rule("nancumsum")
def nancumsum(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the sums of the elements up to each one, NaN as 0."""
    return cumsum(_instead(a, 0), axis, dtype, out)


@rule("nancumprod")
def nancumprod(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the products of the elements up to each one, NaN as 1."""
    return cumprod(_instead(a, 1), axis, dtype, out)


@rule("nanmean")
def nanmean(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    *,
    where: Any = True,
) -> Any:
    """Return the mean of the elements that are not NaN."""
    return mean(a, axis, dtype, out, is_asked(keepdims), where=_there(a, where))


@rule("nanvar")
def nanvar(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
) -> Any:
    """Return the variance of the elements that are not NaN."""
    return var(a, axis, dtype, out, ddof, is_asked(keepdims), where=_there(a, where))


@rule("nanstd")
def nanstd(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
) -> Any:
    """Return the standard deviation of the elements that are not NaN."""
    found = nanvar(a, axis, dtype, None, ddof, keepdims, where=where)
    return delivered(pointwise(np.sqrt, found), out)


_NUMBERS, _WITH_TIMES = "fc", "fcmM"
"""Kinds of dtypes whose NaN, or NaT, is left out: to NumPy NaT is mostly a value."""


def _there(a: Any, where: Any = True, kinds: str = _NUMBERS) -> Any:
    """Return which elements are not NaN, of those that are asked for."""
    if a.dtype.kind in kinds:
        numbers = pointwise(lambda part: part == part, a)
    else:
        numbers = pointwise(lambda part: np.ones(part.shape, bool), a)
    return numbers if where is True else pointwise(np.logical_and, numbers, where)


def _instead(a: Any, value: Any, kinds: str = _NUMBERS) -> Any:
    """Return the elements, NaN replaced."""
    return chosen(_there(a, kinds=kinds), a, value)
