"""Functions of one element each: all ufuncs, `where`, `clip`, `astype` and the like.

[Note: pointwise] The largest argument stays where it is; of equally large ones the first that is
cut. The others are moved to its layout, where they are not there already: along a dimension in
which an argument has length 1 it is not cut. A dimension that the largest one lacks is cut as in
the next largest. Ordinary arrays are taken to be the same on every rank, which takes its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules.basis import (
    arranged,
    as_dist,
    broadcast,
    check_writable,
    cutting,
    delivered,
    failing_alike,
    is_dist,
    make,
    mesh_of,
    own_box,
    own_slices,
    resharded,
    result_array,
    settled,
    uncut,
    view_of,
)
from hpcdist.mesh.rules.table import rule

Whereabouts = Layout | tuple[int, ...] | None
"""Of an argument: its layout; of an ordinary array its shape; None for a number."""


def pointwise(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return `function` of arrays, at least one of them a DistArray, element by element."""
    layout, parts = aligned(inputs)
    return _wrapped(_computed(function, layout, parts, options), layout)


def _wrapped(result: Any, layout: Layout) -> Any:
    if isinstance(result, tuple):
        return tuple([make(result_array(each), layout) for each in result])
    return make(result_array(result), layout)


def _computed(
    function: Callable[..., Any], layout: Layout, parts: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Return a function of this rank's parts; what only some of them refuse is an error on all."""
    if not isinstance(function, np.ufunc) and any(lo == hi for lo, hi in own_box(layout)):
        _try(function, layout, parts, options)
    if function is np.power and _may_be_negative(*parts[:2]):
        error: Exception = ValueError("Integers to negative integer powers are not allowed.")
    elif any(map(_is_of_objects, parts)) or function in _REFUSE_WORDS:
        name = getattr(function, "__name__", "the function")
        kind = ValueError if function in _REFUSE_WORDS else TypeError
        error = kind(f"{name} failed on another rank, of the elements that it has")
    else:
        return function(*parts, **options)
    axes = cutting(layout, range(len(layout.shape)))
    return failing_alike(lambda: function(*parts, **options), layout.mesh, axes, error)


_UMATH: Any = getattr(getattr(np, "_core", None), "umath", None)
_REFUSE_WORDS = frozenset({getattr(_UMATH, name, None) for name in ("index", "rindex")} - {None})
"""Ufuncs that raise if a word lacks what is looked for."""
_PLAIN = (bool, int, float, complex, str, bytes)


def _is_of_objects(part: Any) -> bool:
    """Return whether elements are objects of Python, which decide themselves what they refuse."""
    if isinstance(part, _PLAIN):
        return False
    dtype = part.dtype if hasattr(part, "dtype") else np.asarray(part).dtype
    return getattr(dtype, "kind", "") == "O"


def _try(
    function: Callable[..., Any], layout: Layout, parts: Sequence[Any], options: dict[str, Any]
) -> None:
    """Raise what a function refuses where there are elements; ufuncs refuse it without any."""
    if "out" in options or not math.prod(layout.shape):
        return
    ones = [np.zeros((1,) * each.ndim, each.dtype) if _is_numpys(each) else each for each in parts]
    with np.errstate(all="ignore"):
        function(*ones, **options)


def _is_numpys(part: Any) -> bool:
    return part.__class__ is np.ndarray


def _may_be_negative(base: Any, exponent: Any) -> bool:
    """Return whether integers have exponents that may be negative, which NumPy refuses."""
    if np.result_type(base, exponent).kind not in "iu":
        return False
    if np.ndim(exponent) == 0:
        return bool(exponent < 0)
    return bool(exponent.dtype.kind == "i")


def aligned(inputs: tuple[Any, ...], target: Layout | None = None) -> tuple[Layout, list[Any]]:
    """Return the layout of a result (`target`, if given), and this rank's parts of the inputs."""
    inputs = tuple([settled(each) if is_dist(each) else each for each in inputs])
    found = [_whereabouts(each) for each in inputs]
    layouts = [each for each in found if each.__class__ is Layout]
    home = layouts[0] if target is None else target
    key = "pointwise", target, *found
    plan = home.memo.get(key)
    if plan is None:
        mesh_of(*inputs, home)
        plan = home.remember(key, _plan(found, target))
    layout, wanted = plan
    return layout, [_part(each, want) for each, want in zip(inputs, wanted, strict=True)]


def _whereabouts(value: Any) -> Whereabouts:
    if value.__class__ is DistArray:
        return value.layout
    shape = getattr(value, "shape", None)
    if shape is None:  # of a range, an array.array, whatever has __array__, too
        shape = () if isinstance(value, (int, float, complex)) else np.shape(value)
    return shape or None


def _part(value: Any, want: Layout | None) -> Any:
    if want is None:
        return value
    if value.__class__ is DistArray:
        return value.local if value.layout is want else resharded(value, want).local
    return np.asarray(value)[own_slices(want)]


def _plan(found: list[Whereabouts], target: Layout | None) -> tuple[Layout, list[Layout | None]]:
    """Return the layout of the result, and in which layout each input is wanted."""
    shapes = [each.shape if isinstance(each, Layout) else each or () for each in found]
    shape = broadcast(*shapes)
    if target is None:
        target = _result(shape, [each for each in found if isinstance(each, Layout)])
    elif broadcast(shape, target.shape) != target.shape:
        raise ValueError(
            f"non-broadcastable output operand with shape {target.shape} doesn't match the "
            f"broadcast shape {shape}"
        )
    return target, [
        None if each is None else part_of(target, own)
        for each, own in zip(found, shapes, strict=True)
    ]


def _result(shape: tuple[int, ...], layouts: list[Layout]) -> Layout:
    """Return the layout of a result, see [Note: pointwise]."""
    size = {layout: math.prod(layout.shape) for layout in layouts}
    ordered = sorted(layouts, key=lambda each: (-size[each], each.is_replicated))
    if ordered[0].shape == shape:
        return ordered[0]
    axes: dict[int, tuple[int, ...]] = {}
    cuts: dict[int, tuple[int, ...]] = {}
    used: set[int] = set()
    for layout in ordered:
        first = len(shape) - len(layout.shape)
        for dim, length in enumerate(layout.shape, first):
            if dim in axes or length != shape[dim]:
                continue
            own = layout.axes[dim - first]
            axes[dim] = () if used.intersection(own) else own
            used.update(axes[dim])
            if axes[dim]:
                cuts[dim] = layout.cuts[dim - first]
    dims = range(len(shape))
    return make_layout(
        ordered[0].mesh, shape, [axes.get(dim, ()) for dim in dims], [cuts.get(dim) for dim in dims]
    )


def part_of(target: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout of an array of `shape` whose parts broadcast to those of `target`."""
    if shape == target.shape:
        return uncut(target, ()) if target.is_partial else target
    first = len(target.shape) - len(shape)
    dims = [dim if length == target.shape[dim] else None for dim, length in enumerate(shape, first)]
    return arranged(target, dims)


def into(function: Callable[..., Any], inputs: tuple[Any, ...], out: Any, options: Any) -> Any:
    """Write `function` of the inputs into DistArrays, element by element, where they lie."""
    outs = out if isinstance(out, tuple) else (out,)
    if not all(is_dist(each) for each in outs):
        if any(each is not None for each in outs if not is_dist(each)):
            raise UsageError(
                "out must be a DistArray, as an argument is one: dist.array.empty makes it; got "
                f"{[type(each).__name__ for each in outs]}"
            )
        result = pointwise(function, *inputs, **options)
        return tuple(
            [
                one if to is None else delivered(one, to)
                for one, to in zip(result, outs, strict=True)
            ]
        )
    target = outs[0].layout
    if any(each.layout is not target for each in outs) or target.is_partial:
        raise UsageError(f"all out must have one layout without Partial, got {outs}")
    for each in outs:
        check_writable(each)
    where = options.pop("where", True)
    _, (*parts, mask) = aligned((*inputs, where), target)
    options |= {"where": mask, "out": tuple(each.local for each in outs)}
    _computed(function, target, parts, options)
    return outs if len(outs) > 1 else outs[0]


def apply(function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what a ufunc gives for these arguments, which may name `out` and `where`."""
    out = options.pop("out", None)
    if out is not None:
        return into(function, inputs, out, options)
    if not options:
        return pointwise(function, *inputs)
    where = options.pop("where", True)
    if where is True:
        return pointwise(function, *inputs, **options)
    layout, (*parts, mask) = aligned((*inputs, where))
    return _wrapped(_computed(function, layout, parts, {**options, "where": mask}), layout)


# ---- the table: these are no ufuncs, but of one element each all the same


@rule("clip", method=True)
def clip(x: Any, /, min: Any = None, max: Any = None, out: Any = None, **options: Any) -> Any:
    """Return the elements, limited to a range.

    Args:
        x: the array.
        min: a number or an array that is broadcast; None for no lower limit.
        max: as `min`, from above.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        options: those of `numpy.clip`; ``a_min`` and ``a_max`` are taken for `min` and `max`.

    """
    min, max = options.pop("a_min", min), options.pop("a_max", max)
    if min is None and max is None:
        return delivered(pointwise(np.positive, x), out)
    limits = [each for each in (min, max) if each is not None]

    def function(part: Any, *given: Any) -> Any:
        lower = given[0] if min is not None else None
        upper = given[-1] if max is not None else None
        return np.clip(part, lower, upper, **options)

    return delivered(pointwise(function, x, *limits), out)


@rule("round", "around", method=True)
def around(x: Any, /, decimals: int = 0, out: Any = None) -> Any:
    """Return the elements rounded to a number of decimals.

    Args:
        x: the array.
        decimals: digits after the point; negative ones before it.
        out: a `DistArray` of the result's shape, which takes it and is returned.

    """
    return delivered(pointwise(lambda part: np.round(part, decimals), x), out)


@rule("astype", method=True)
def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None, **options: Any) -> Any:
    """Return the elements in another dtype.

    Args:
        x: the array.
        dtype: the new one.
        copy: False: return the array itself if it has this dtype.
        device: accepted.
        options: those of `numpy.ndarray.astype`, ``casting`` for example.

    """
    if x.dtype == np.dtype(dtype) and not copy:
        return x
    if x.dtype.kind not in "SU" and options.get("casting") != "same_value":
        return pointwise(lambda part: part.astype(dtype, **options), x)
    x = settled(x)
    return make(
        failing_alike(
            lambda: x.local.astype(dtype, **options),
            x.layout.mesh,
            cutting(x.layout, range(x.ndim)),
            ValueError(f"elements of another rank cannot be converted to {np.dtype(dtype)}"),
        ),
        x.layout,
    )


@rule("copy", method=True)
def copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    """Return a copy.

    Args:
        a: the array.
        order: accepted; a part is kept in C order.
        subok: accepted.

    """
    return make(a.local.copy(), a.layout)


@rule("real")
def real(x: Any, /) -> Any:
    """Return the real parts: of real numbers the array itself."""
    return _part_of_numbers(np.real, x)


@rule("imag")
def imag(x: Any, /) -> Any:
    """Return the imaginary parts."""
    return _part_of_numbers(np.imag, x)


def _part_of_numbers(function: Callable[..., Any], x: Any) -> Any:
    """Return a view of the real or the imaginary parts."""
    x = settled(x)
    return view_of(x, result_array(function(x.local)), x.layout)


@rule("isclose")
def isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """Return where two arrays are equal within a tolerance."""

    def function(x: Any, y: Any, relative: Any, absolute: Any) -> Any:
        return np.isclose(x, y, rtol=relative, atol=absolute, equal_nan=equal_nan)

    return pointwise(function, a, b, rtol, atol)


@rule("polyval")
def polyval(p: Any, x: Any) -> Any:
    """Return the values of a polynomial, whose coefficients begin with that of the highest power.

    Every rank needs all coefficients; arrays of them, the rows of `p`, are broadcast.
    """
    mesh = mesh_of(p, x)
    numbers, places = as_dist(p, mesh), as_dist(x, mesh)
    whole = resharded(numbers, uncut(numbers.layout))
    if whole.ndim > 1:
        return pointwise(lambda part, *rows: np.polyval(rows, part), places, *whole)
    return pointwise(lambda part: np.polyval(whole.local, part), places)


def _row(name: str) -> None:
    numpys = getattr(np, name)

    def computed(x: Any, /, *args: Any, **options: Any) -> Any:
        return pointwise(lambda part: numpys(part, *args, **options), x)

    computed.__name__, computed.__doc__ = name, numpys.__doc__
    rule(name)(computed)


for _name in ("nan_to_num", "angle", "sinc", "iscomplex", "isreal"):
    _row(_name)


def _row_with_out(name: str) -> None:
    numpys = getattr(np, name)

    def computed(x: Any, /, out: Any = None) -> Any:
        return delivered(pointwise(numpys, x), out)

    computed.__name__, computed.__doc__ = name, numpys.__doc__
    rule(name)(computed)


for _name in ("fix", "isneginf", "isposinf"):
    _row_with_out(_name)
