"""Functions that need all elements along a dimension: FFT, linear algebra, and sorting elsewhere.

[Note: pencils] Each rank computes what it has, if the dimension is not cut. If it is, what cuts it
cuts another dimension instead, the longest of those not cut, and stays there: each element travels
once at most, and no rank has more than its share. An array that has no other dimension, as one of
a single dimension, has no rule.
"""

from __future__ import annotations

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
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.reductions import max as largest, min as smallest, sum as total
from hpcdist.mesh.rules.seams import roll
from hpcdist.mesh.rules.table import rule


def along(
    name: str,
    function: Callable[..., Any],
    x: DistArray,
    dims: Sequence[int],
    *,
    stacked: bool = False,
    new: int = 0,
    line: Callable[[DistArray], Any] | None = None,
) -> Any:
    """Return `function` of an array that is not cut along `dims`, or of its parts.

    The result has the dimensions of the array, or lacks `dims`, and has `new` ones before the
    others; or, if `stacked`, the others come first and then what the function makes of `dims`.
    Where there is no other dimension to cut, `line` computes it, if there is such a way.
    """
    x = settled(x)
    layout = pencils(x.layout, tuple(dims))
    if layout is None and line is not None:
        return line(x)
    if layout is None:
        return without_rule(name, function, (x,), {}, _HINT)
    part = resharded(x, layout).local
    if layout.mesh.coordinate is None:  # nothing of what there is
        part = np.zeros([n if dim in dims else 0 for dim, n in enumerate(x.shape)], x.dtype)
    return _spread(function(part), layout, tuple(dims), stacked, new)


_HINT = "Give the array another dimension to cut it along"


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


def _spread(part: Any, layout: Layout, dims: tuple[int, ...], stacked: bool, more: int) -> Any:
    """Return what was made of this rank's part as arrays."""
    if isinstance(part, tuple):
        parts = [_spread(each, layout, dims, stacked, more) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    part = result_array(part)
    kept: list[int | None] = [*range(len(layout.shape))]
    if stacked or part.ndim - more < len(kept):
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


# ---- Fourier transforms


def _transform(name: str) -> Callable[..., Any]:
    numpys = getattr(np.fft, name)

    def transformed(
        x: Any, /, n: int | None = None, axis: int = -1, norm: Any = None, out: Any = None
    ) -> Any:
        dim = dimension(axis, x.ndim)
        function = lambda part: numpys(part, n, dim, norm)  # noqa: E731
        return delivered(along(f"numpy.fft.{name}", function, x, (dim,)), out)

    transformed.__name__, transformed.__doc__ = name, f"Return what `numpy.fft.{name}` does."
    return rule(f"fft.{name}")(transformed)


fft, ifft, rfft, irfft = map(_transform, ("fft", "ifft", "rfft", "irfft"))
hfft, ihfft = map(_transform, ("hfft", "ihfft"))


def _transforms(name: str, each: Any, last: Any, *, first: bool, two: bool) -> None:
    """Enter a transform along several dimensions: `last` along the last one, else `each`."""

    def transformed(
        x: Any,
        /,
        s: Any = None,
        axes: Any = (-2, -1) if two else None,
        norm: Any = None,
        out: Any = None,
    ) -> Any:
        count = x.ndim if s is None else len(s)
        dims = [dimension(axis, x.ndim) for axis in (range(-count, 0) if axes is None else axes)]
        lengths = [None] * len(dims) if s is None else [*s]
        steps = [*zip(dims, lengths, strict=True)]
        ordered = [(last, *steps[-1])] if first else []
        ordered += [(each, *step) for step in reversed(steps[:-1])]
        ordered += [] if first else [(last, *steps[-1])]
        for function, dim, length in ordered:
            x = function(x, length, dim, norm)
        return delivered(x, out)

    transformed.__name__, transformed.__doc__ = name, f"Return what `numpy.fft.{name}` does."
    rule(f"fft.{name}")(transformed)


for _suffix, _two in (("n", False), ("2", True)):
    _transforms(f"fft{_suffix}", fft, fft, first=True, two=_two)
    _transforms(f"ifft{_suffix}", ifft, ifft, first=True, two=_two)
    _transforms(f"rfft{_suffix}", fft, rfft, first=True, two=_two)
    _transforms(f"irfft{_suffix}", ifft, irfft, first=False, two=_two)


@rule("fft.fftshift")
def fftshift(x: Any, /, axes: Any = None) -> Any:
    """Return the array with frequency 0 in the middle."""
    dims = dimensions(axes, x.ndim)
    return roll(x, [x.shape[dim] // 2 for dim in dims], [*dims])


@rule("fft.ifftshift")
def ifftshift(x: Any, /, axes: Any = None) -> Any:
    """Return the array with frequency 0 at the beginning."""
    dims = dimensions(axes, x.ndim)
    return roll(x, [-(x.shape[dim] // 2) for dim in dims], [*dims])


# ---- linear algebra: of stacks of matrices


def _of_matrices(name: str) -> None:
    numpys = getattr(np.linalg, name, None)
    if numpys is None:
        return

    def computed(x: Any, /, *args: Any, **options: Any) -> Any:
        dims = (x.ndim - 2, x.ndim - 1)
        if x.ndim < 2:
            raise np.linalg.LinAlgError(
                f"{name} is of matrices, but the array has {x.ndim} dimensions"
            )
        return along(
            f"numpy.linalg.{name}",
            lambda part: numpys(part, *args, **options),
            x,
            dims,
            stacked=True,
        )

    computed.__name__, computed.__doc__ = name, f"Return what `numpy.linalg.{name}` does."
    rule(f"linalg.{name}")(computed)


_OF_MATRICES = """
inv det slogdet cholesky eigh eigvalsh eig eigvals svd svdvals qr pinv matrix_rank matrix_power
"""
for _name in _OF_MATRICES.split():
    _of_matrices(_name)


@rule("linalg.norm")
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the norm of vectors, or of matrices."""
    dims = dimensions(axis, x.ndim)
    vectors = ord is None or (len(dims) == 1 and not isinstance(ord, str))
    if vectors or (len(dims) == 2 and ord == "fro"):
        return _vector_norm(x, 2 if ord in (None, "fro") else ord, dims, keepdims)
    what = None if axis is None else tuple(axis)
    return along(
        "numpy.linalg.norm", lambda part: np.linalg.norm(part, ord, what, keepdims), x, dims
    )


@rule("linalg.vector_norm")
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """Return the norm of the elements along dimensions."""
    return _vector_norm(x, ord, dimensions(axis, x.ndim), keepdims)


@rule("linalg.matrix_norm")
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Return the norm of matrices."""
    return norm(x, ord, (x.ndim - 2, x.ndim - 1), keepdims)


def _vector_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    sizes = pointwise(np.abs, x)
    if sizes.dtype.kind not in "fc":
        sizes = sizes.astype(float)
    if ord in (np.inf, -np.inf):
        return (largest if ord > 0 else smallest)(sizes, dims, keepdims=keepdims)
    if ord == 0:
        return total(
            pointwise(lambda part: (part != 0).astype(part.dtype), sizes), dims, keepdims=keepdims
        )
    powers = pointwise(lambda part: part if ord == 1 else part**ord, sizes)
    added = total(powers, dims, keepdims=keepdims)
    if ord == 1:
        return added
    root = np.sqrt if ord == 2 else lambda part: part ** (1 / ord)
    return pointwise(root, added)
