"""NumPy's protocols: what ``np.exp(a)``, ``np.sum(a)`` and the like do with a DistArray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules import (
    along,
    comparing,
    creation,
    cumulative,
    dtypes,
    elimination,
    fourier,
    linear,
    masks,
    norms,
    pieces,
    pointwise,
    products,
    quantiles,
    reductions,
    seams,
    searching,
    sets,
    shapes,
    sorting,
    statistics,
    systems,
    taking,
    tall,
    without_nan,
    words,
)
from hpcdist.mesh.rules.basis import arrays_in, as_dist, delivered, integer, is_dist, mesh_of
from hpcdist.mesh.rules.floating import checked, raises_errors
from hpcdist.mesh.rules.table import FUNCTIONS, UFUNCS
from hpcdist.transport.call.reduction import ReduceOp

FAMILIES = (
    pointwise,
    reductions,
    shapes,
    masks,
    taking,
    products,
    cumulative,
    seams,
    creation,
    along,
    fourier,
    linear,
    tall,
    elimination,
    systems,
    norms,
    statistics,
    without_nan,
    comparing,
    dtypes,
    sorting,
    quantiles,
    sets,
    searching,
    pieces,
    words,
)
"""The modules that enter rules into the table."""

_ndarray = np.ndarray
_new = object.__new__


def array_ufunc(self: DistArray, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
    """Compute a ufunc of NumPy's, or one of its methods."""
    if raises_errors():
        compute = checked(_ufunc, ufunc.__name__)
        return compute(self, ufunc, method, *inputs, **options)
    return _ufunc(self, ufunc, method, *inputs, **options)


def _ufunc(self: DistArray, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
    if method == "__call__":
        if not options and len(inputs) == 1 and ufunc.signature is None:
            layout = self.layout
            if not layout.is_partial:
                part = ufunc(self.local)
                if part.__class__ is _ndarray:
                    made = _new(DistArray)
                    made.local, made.layout = part, layout
                    return made
                return pointwise.pointwise(ufunc, self)
        if ufunc.signature is None:
            return pointwise.apply(ufunc, inputs, options)
        if ufunc in UFUNCS:
            return UFUNCS[ufunc](*inputs, **options)
        return without_rule(ufunc.__name__, ufunc, inputs, options)
    if method in _METHODS:
        found = _METHODS[method](ufunc)
        if found is not None:
            return found(*inputs, **options)
    if method == "at" and not (is_dist(inputs[0]) and inputs[0].layout.is_replicated):
        raise UsageError(
            f"{ufunc.__name__}.at has no rule: what it wrote to a gathered copy would be lost; "
            "assign to slices, or where a mask is true"
        )
    return without_rule(f"{ufunc.__name__}.{method}", getattr(ufunc, method), inputs, options)


def _beginning(function: Callable[..., Any], ufunc: Any) -> Callable[..., Any]:
    """Return a reduction to a truth value, which may begin with one, too."""

    def begun(x: Any, *args: Any, initial: Any = reductions.NOT_GIVEN, **options: Any) -> Any:
        return reductions.started(function(x, *args, **options), initial, ufunc)

    return begun


def _of_bits(ufunc: Any, op: ReduceOp) -> Callable[..., Any]:
    """Return a reduction of the bits, or the truth values, of the elements."""

    def combine(x: Any, axis: Any = 0, keepdims: Any = False, where: Any = True) -> Any:
        return reductions.reduced(x, axis, keepdims, ufunc.reduce, op, None, where)

    return _beginning(combine, ufunc)


_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    np.add: reductions.sum,
    np.multiply: reductions.prod,
    np.maximum: reductions.max,
    np.minimum: reductions.min,
    np.logical_or: _beginning(reductions.any, np.logical_or),
    np.logical_and: _beginning(reductions.all, np.logical_and),
    np.logical_xor: _of_bits(np.logical_xor, ReduceOp.LXOR),
    np.bitwise_or: _of_bits(np.bitwise_or, ReduceOp.BOR),
    np.bitwise_and: _of_bits(np.bitwise_and, ReduceOp.BAND),
    np.bitwise_xor: _of_bits(np.bitwise_xor, ReduceOp.BXOR),
    np.fmax: without_nan.fmax_reduce,
    np.fmin: without_nan.fmin_reduce,
}


def _reduce(ufunc: Any) -> Callable[..., Any] | None:
    function = _REDUCTIONS.get(ufunc)
    if function is None:
        return None

    def reduce(x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        if dtype is not None and ufunc in (np.add, np.multiply):
            options["dtype"] = dtype
        elif dtype is not None:
            x = pointwise.astype(x, dtype, copy=False)
        return delivered(function(x, axis=axis, **options), out, "unsafe")

    return reduce


def _accumulate(ufunc: Any) -> Callable[..., Any] | None:
    function = {np.add: cumulative.cumsum, np.multiply: cumulative.cumprod}.get(ufunc)
    if function is None and ufunc not in _ASSOCIATIVE:
        return None

    def accumulate(x: Any, axis: int | None = 0, dtype: Any = None, out: Any = None) -> Any:
        if not x.ndim:
            raise TypeError("cannot accumulate on an array without dimensions")
        if axis is None and x.ndim > 1:
            raise ValueError("accumulate does not allow multiple axes")
        axis = 0 if axis is None else axis
        if function is not None:
            return delivered(function(x, axis, dtype), out, "unsafe")
        return cumulative.running(x, integer(axis), ufunc, dtype, out)

    return accumulate


_ASSOCIATIVE = frozenset(
    [
        *(np.maximum, np.minimum, np.fmax, np.fmin),
        *(np.logical_or, np.logical_and, np.logical_xor),
        *(np.bitwise_or, np.bitwise_and, np.bitwise_xor),
        *(np.gcd, np.lcm),
    ]
)
"""Of which a rank may run over its part alone, and then start from what the others come to."""


def _outer(ufunc: Any) -> Callable[..., Any]:
    def outer(a: Any, b: Any, /, **options: Any) -> Any:
        mesh = mesh_of(a, b)
        x, y = as_dist(a, mesh), as_dist(b, mesh)
        x = shapes.expand_dims(x, [*range(x.ndim, x.ndim + y.ndim)]) if y.ndim else x
        return pointwise.apply(ufunc, (x, y), options)

    return outer


_METHODS: dict[str, Callable[[Any], Callable[..., Any] | None]] = {
    "reduce": _reduce,
    "accumulate": _accumulate,
    "outer": _outer,
}


def array_function(self: DistArray, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Compute a function of NumPy's by its rule."""
    found = FUNCTIONS.get(function)
    if found is not None:
        out = kwargs.get("out")
        if is_dist(out) and args and not any(True for _ in arrays_in(args)):
            args = (as_dist(args[0], out.layout.mesh), *args[1:])  # the same on every rank
        return found(*args, **kwargs)
    if not all(issubclass(each, (DistArray, np.ndarray, np.generic)) for each in types):
        return NotImplemented
    name = f"{function.__module__}.{function.__name__}"
    return without_rule(name, function, args, kwargs)
