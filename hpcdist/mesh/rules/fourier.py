"""Fourier transforms: `numpy.fft`.

[Note: transforms] A transform along several dimensions is one along each of them. Those that are
not cut come first, where they may; then what cuts a dimension is moved to another one, if possible
one that is done, and stays there. So each element travels once for each dimension that is cut.

[Note: four steps] Where no other dimension is long enough, as in an array of one dimension, its
n = n1 n2 elements are taken as n1 rows of n2: transform the columns, turn the elements, transform
the rows, and read the columns of the result. What cuts the rows cuts the columns meanwhile. If n
has no divisor that gives every rank a row, the transform is written as a convolution with a chirp
(Bluestein's), whose length may be any power of 2 that is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.room import room_for
from hpcdist.mesh.rules.basis import (
    along,
    delivered,
    dimension,
    make,
    own_box,
    resharded,
    settled,
)
from hpcdist.mesh.rules.pointwise import part_of, pointwise
from hpcdist.mesh.rules.seams import roll
from hpcdist.mesh.rules.shapes import concat, flip, moveaxis, permute_dims, reshape
from hpcdist.mesh.rules.table import rule
from hpcdist.named_tuple import NamedTuple

_TAKES_OUT = int(np.__version__.partition(".")[0]) >= 2
_SWAPPED = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


class Step(NamedTuple):
    """A transform along one dimension."""

    kind: str
    """``fft``, ``ifft``, ``rfft`` or ``irfft``."""
    dim: int
    points: int

    @property
    def length(self) -> int:
        """Of the result."""
        return self.points // 2 + 1 if self.kind == "rfft" else self.points


def transformed(x: DistArray, steps: Sequence[Step], norm: Any) -> DistArray:
    """Return an array transformed along some dimensions, see [Note: transforms]."""
    if norm not in _SWAPPED:
        raise ValueError(f'norm must be None, "backward", "ortho" or "forward", got {norm!r}')
    for step in steps:
        if step.points < 1:
            raise ValueError(f"Invalid number of FFT data points ({step.points}) specified.")
    x, waiting = settled(x), [*steps]
    while waiting:
        step = _next(waiting, x.layout)
        waiting.remove(step)
        x = _along_one(x, step, norm, {each.dim for each in waiting})
    return x


def _next(waiting: list[Step], layout: Layout) -> Step:
    """Return the first step, or one along a dimension that is not cut, if it may come first."""
    for step in waiting:
        if step.kind in ("rfft", "irfft"):
            break
        if not _is_cut(layout, step.dim):
            return step
    return waiting[0]


def _is_cut(layout: Layout, dim: int) -> bool:
    return bool(layout.axes[dim])


def _along_one(x: DistArray, step: Step, norm: Any, later: set[int]) -> DistArray:
    if not _is_cut(x.layout, step.dim):
        return _here(x, step, norm)
    home = _home(x.layout, step.dim, later)
    if home is None and len(x.layout.cuts[step.dim]) == 2:  # cut for one rank
        return _here(x, step, norm)
    if home is None:
        return _in_four_steps(x, step, norm)  # type: ignore[no-any-return]
    return _here_again(x, _moved(x.layout, step.dim, home), step, norm)


def _home(layout: Layout, dim: int, later: set[int]) -> int | None:
    """Return the dimension to which the cuts of another are moved best; None if all are short."""
    parts = [len(cuts) - 1 for cuts in layout.cuts]
    room = {
        other: length // parts[other]
        for other, length in enumerate(layout.shape)
        if other != dim and length >= parts[other] * parts[dim]
    }
    return max(room, key=lambda other: (other not in later, room[other])) if room else None


def _moved(layout: Layout, dim: int, home: int) -> Layout:
    """Return the layout in which the axes that cut `dim` cut `home` instead."""
    key = "moved", dim, home
    found: Layout | None = layout.memo.get(key)
    if found is None:
        axes = [*layout.axes]
        axes[home], axes[dim] = axes[home] + axes[dim], ()
        even = [None if each in (dim, home) else cut for each, cut in enumerate(layout.cuts)]
        found = layout.remember(key, make_layout(layout.mesh, layout.shape, axes, even))
    return found


def _here(x: DistArray, step: Step, norm: Any, *, is_ours: bool = False) -> DistArray:
    """Transform this rank's part, along a dimension that is not cut; where it is, if `is_ours`."""
    layout, part = x.layout, x.local
    if layout.shape[step.dim] != step.length:
        layout = _lengthened(layout, step.dim, step.length)
    dtype = _dtype(step.kind, x.dtype)
    if not part.size:
        here = layout.mesh.coordinate
        shape = (0,) * part.ndim if here is None else layout.local_shape(here)
        return make(np.zeros(shape, dtype), layout)
    function = getattr(np.fft, step.kind)
    if not _TAKES_OUT or type(part) is not np.ndarray:
        return make(function(part, step.points, step.dim, norm), layout)
    is_like = is_ours and layout is x.layout and dtype == part.dtype
    room = part if is_like else room_for(layout, part, dtype)
    function(part, step.points, step.dim, norm, out=room)
    return make(room, layout)


def _here_again(x: DistArray, layout: Layout, step: Step, norm: Any) -> DistArray:
    """Transform an array in another layout, where it is not cut along the dimension."""
    return _here(resharded(x, layout), step, norm, is_ours=layout is not x.layout)


def _lengthened(layout: Layout, dim: int, length: int) -> Layout:
    """Return the layout of an array that is longer or shorter along a dimension."""
    shape = [length if each == dim else n for each, n in enumerate(layout.shape)]
    cuts = [None if each == dim else cut for each, cut in enumerate(layout.cuts)]
    return make_layout(layout.mesh, shape, layout.axes, cuts)


@lru_cache(maxsize=256)
def _dtype(kind: str, dtype: Any) -> Any:
    return getattr(np.fft, kind)(np.zeros(2, dtype)).dtype


# ---- along a dimension that stays cut


def _in_four_steps(x: Any, step: Step, norm: Any) -> Any:
    """Transform along a dimension whose cuts have nowhere to go, see [Note: four steps]."""
    dtype, dim, points = _dtype(step.kind, x.dtype), step.dim, step.points
    final = _lengthened(x.layout, dim, step.length)
    x = pointwise(lambda part: part.astype(np.result_type(dtype, np.complex64)), x)
    if step.kind == "irfft":
        half = _of_length(x, dim, points // 2 + 1)
        mirrored = flip(half[along(dim, slice(1, (points + 1) // 2))], dim)
        whole = concat([half, np.conj(mirrored)], axis=dim)
        result = pointwise(
            lambda part: part.real.astype(dtype), _line(whole, dim, norm, inverse=True)
        )
    else:
        whole = _of_length(x, dim, points)
        result = _line(whole, dim, norm, inverse=step.kind == "ifft")
    return resharded(result[along(dim, slice(step.length))], final)


def _of_length(x: Any, dim: int, length: int) -> Any:
    """Return the array without its last elements along a dimension, or with zeros after them."""
    more = length - x.shape[dim]
    if more <= 0:
        return x[along(dim, slice(length))]
    layout = _lengthened(x.layout, dim, more)
    shape = [hi - lo for lo, hi in own_box(layout)]
    return concat([x, make(np.zeros(shape, x.dtype), layout)], axis=dim)


def _line(x: DistArray, dim: int, norm: Any, *, inverse: bool) -> Any:
    points, parts = x.shape[dim], len(x.layout.cuts[dim]) - 1
    rows = _divisor(points)
    x = moveaxis(x, dim, 0)
    if rows >= parts:
        return moveaxis(_four_steps(x, rows, norm, inverse=inverse), 0, dim)
    return moveaxis(_chirped(x, parts, norm, inverse=inverse), 0, dim)


def _divisor(number: int) -> int:
    """Return the largest divisor that is not larger than the root."""
    return next(each for each in range(math.isqrt(number), 0, -1) if number % each == 0)


def _four_steps(x: DistArray, rows: int, norm: Any, *, inverse: bool) -> Any:
    """Return the transform along the first dimension, whose length `rows` divides."""
    points, kind = x.shape[0], "ifft" if inverse else "fft"
    columns = points // rows
    grid = reshape(x, (rows, columns, *x.shape[1:]))
    grid = _forced(grid, Step(kind, 0, rows), norm, home=1)
    (low, high), (left, right) = own_box(grid.layout)[:2]
    turns = np.outer(np.arange(low, high), np.arange(left, right)) % points
    turned = _circle(turns, points, inverse).reshape(*turns.shape, *[1] * (x.ndim - 1))
    grid = pointwise(lambda part: part * turned.astype(part.dtype), grid)
    grid = _forced(grid, Step(kind, 1, columns), norm, home=0)
    order = [1, 0, *range(2, grid.ndim)]
    return reshape(permute_dims(grid, order), x.shape)


def _forced(x: DistArray, step: Step, norm: Any, *, home: int) -> DistArray:
    layout = _moved(x.layout, step.dim, home) if _is_cut(x.layout, step.dim) else x.layout
    return _here_again(x, layout, step, norm)


def _circle(turns: Any, period: int, inverse: bool) -> Any:
    """Return the points of the unit circle after whole numbers of steps, `period` in all."""
    return np.exp((2j if inverse else -2j) * np.pi / period * turns)


def _chirped(x: DistArray, parts: int, norm: Any, *, inverse: bool) -> Any:
    """Return the transform along the first dimension, of any length, as a convolution."""
    points, dtype = x.shape[0], x.dtype
    length = 1 << max((2 * points - 2).bit_length(), 2 * (parts - 1).bit_length())
    rows = _divisor(length)

    def chirp(places: Any) -> Any:
        return _circle(places * places % (2 * points), 2 * points, inverse)

    def turned(array: Any) -> Any:
        """Return the elements times the chirp."""
        places = np.arange(*own_box(array.layout)[0]).reshape(-1, *[1] * (x.ndim - 1))
        return pointwise(lambda part: part * chirp(places), array)

    longer = _of_length(turned(x), 0, length)
    layout = part_of(longer.layout, (length, *[1] * (x.ndim - 1)))
    places = np.arange(*own_box(layout)[0])
    places = np.minimum(places, length - places)
    kernel = np.where(places < points, chirp(places).conj(), 0).reshape(-1, *[1] * (x.ndim - 1))
    both = [_four_steps(each, rows, None, inverse=False) for each in (longer, make(kernel, layout))]
    found = turned(_four_steps(both[0] * both[1], rows, None, inverse=True)[:points])
    divided = _SWAPPED[norm] if inverse else norm
    scale = {"forward": 1 / points, "ortho": 1 / math.sqrt(points)}.get(divided or "backward", 1)
    return pointwise(lambda part: (part * scale).astype(dtype), found)


# ---- the table


def _points(kind: str, n: int | None, length: int) -> int:
    if n is None or n == -1:
        return 2 * (length - 1) if kind == "irfft" else length
    return int(n)


def _one(name: str) -> None:
    kind = {"hfft": "irfft", "ihfft": "rfft"}.get(name, name)

    def computed(
        x: Any, /, n: int | None = None, axis: int = -1, norm: Any = None, out: Any = None
    ) -> Any:
        dim = dimension(axis, x.ndim)
        steps = [Step(kind, dim, _points(kind, n, x.shape[dim]))]
        if name == kind:
            return delivered(transformed(x, steps, norm), out)
        swapped = _SWAPPED.get(norm, norm)
        if name == "hfft":
            return delivered(transformed(np.conj(x), steps, swapped), out)
        return delivered(np.conj(transformed(x, steps, swapped)), out)  # type: ignore[arg-type]

    _enter(name, computed)


def _several(name: str, kind: str, two: bool) -> None:
    def computed(
        x: Any,
        /,
        s: Any = None,
        axes: Any = (-2, -1) if two else None,
        norm: Any = None,
        out: Any = None,
    ) -> Any:
        count = x.ndim if s is None else len(s)
        dims = [dimension(axis, x.ndim) for axis in (range(-count, 0) if axes is None else axes)]
        if s is not None and len(s) != len(dims):
            raise ValueError("Shape and axes have different lengths.")
        steps = _steps(kind, dims, [None] * len(dims) if s is None else [*s], x.shape)
        return delivered(transformed(x, steps, norm), out)

    _enter(name, computed)


def _steps(kind: str, dims: list[int], lengths: list[Any], shape: tuple[int, ...]) -> list[Step]:
    """Return the transforms in NumPy's order: real numbers first, or last, along the last one."""
    kinds = [kind.replace("r", "") if dim < len(dims) - 1 else kind for dim in range(len(dims))]
    steps = [
        Step(each, dim, _points(each, n, shape[dim]))
        for each, dim, n in zip(kinds, dims, lengths, strict=True)
    ]
    return steps if kind == "irfft" else steps[-1:] + steps[:-1][::-1]


def _enter(name: str, function: Callable[..., Any]) -> None:
    function.__name__, function.__doc__ = name, f"Return what `numpy.fft.{name}` does."
    rule(f"fft.{name}")(function)


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _one(_name)
for _name in ("fft", "ifft", "rfft", "irfft"):
    _several(f"{_name}n", _name, two=False)
    _several(f"{_name}2", _name, two=True)


def _shift(x: Any, /, axes: Any = None, *, sign: int) -> Any:
    given = range(x.ndim) if axes is None else axes if hasattr(axes, "__len__") else [axes]
    dims = [dimension(each, x.ndim) for each in given]  # repeated ones add up
    return roll(x, [sign * (x.shape[dim] // 2) for dim in dims], dims)


_enter("fftshift", partial(_shift, sign=1))
_enter("ifftshift", partial(_shift, sign=-1))
