"""Functions of neighbouring elements, and functions that move elements along a dimension.

Each rank takes what it lacks of the parts beside its own, in one exchange; what it has is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcdist.boxes import Box, lengths, volume, within
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.process_mesh import Coordinate
from hpcdist.mesh.rules.basis import (
    along,
    as_dist,
    cutting,
    dimension,
    dimensions,
    make,
    mesh_of,
    own_box,
    replaced,
    resharded,
    settled,
    uncut,
)
from hpcdist.mesh.rules.cumulative import diff
from hpcdist.mesh.rules.reductions import sum as total
from hpcdist.mesh.rules.shapes import reshape
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.stencil import EDGES, Surroundings, extended, fill_beyond
from hpcdist.mesh.windows import Edge, Windows, read_windows

# ---- to other places


@rule("roll")
def roll(x: Any, /, shift: Any, axis: Any = None) -> Any:
    """Return the array with elements moved along dimensions, the last ones to the front."""
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, 0), x.shape)
    x = settled(x)
    shifts, axes = np.broadcast_arrays(shift, axis)
    steps = [0] * x.ndim
    for step, each in zip(shifts.reshape(-1).tolist(), axes.reshape(-1).tolist(), strict=True):
        steps[dimension(each, x.ndim)] += operator.index(step)
    steps = [step % length if length else 0 for step, length in zip(steps, x.shape, strict=True)]
    return make(_shifted(x, x.layout, steps, Edge.PERIODIC), x.layout)


def _shifted(x: DistArray, layout: Layout, steps: list[int], edge: Edge) -> Any:
    """Return this rank's part of an array in a layout, moved by `steps` along each dimension."""

    def window(_: Layout, place: Coordinate) -> Box:
        return tuple(
            [
                (lo - step, hi - step)
                for (lo, hi), step in zip(layout.box(place), steps, strict=True)
            ]
        )

    moves = tuple(
        dim
        for dim, (step, length) in enumerate(zip(steps, layout.shape, strict=True))
        if edge is not Edge.NOTHING and (step or length != x.shape[dim])
    )
    name = f"{edge.name.lower()} by {steps} to {layout.shape}"
    return read_windows(x, Windows(name, window, (edge,) * x.ndim, moves))


_MODES = {
    "constant": Edge.NOTHING,
    "empty": Edge.NOTHING,
    "edge": EDGES["nearest"],
    "reflect": EDGES["reflect"],
    "symmetric": EDGES["symmetric"],
    "wrap": EDGES["periodic"],
}
"""What is beyond the ends of a dimension, by NumPy's names."""
_pad: Any = np.pad


@rule("pad")
def pad(array: Any, pad_width: Any, mode: Any = "constant", **options: Any) -> Any:
    """Return the array with elements before and behind it; the first and the last parts grow."""
    widths: Any = _pairs(pad_width, array.ndim)
    if mode.__class__ is str:
        _pad(np.zeros((1,) * array.ndim), 0, mode, **options)  # refuses what NumPy refuses
    if any(width < 0 for pair in widths for width in pair):
        raise ValueError("index can't contain negative values")
    x = settled(array)
    padded = [dim for dim, pair in enumerate(widths) if any(pair)]
    layout = x.layout
    for dim in padded:
        before, behind = widths[dim]
        *cuts, last = (cut + before for cut in layout.cuts[dim])
        layout = replaced(layout, dim, (0, *cuts[1:], last + behind))
    edge = _MODES.get(mode) if mode.__class__ is str else None
    if edge is None or options.get("reflect_type", "even") != "even":
        if mode.__class__ is str and not cutting(x.layout, padded):
            return make(_pad(x.local, widths, mode, **options), layout)
        return without_rule(f"pad with mode={mode!r}", _pad, (x, widths, mode), options)
    for dim in padded:
        if not x.shape[dim] and edge is not Edge.NOTHING:
            raise ValueError(
                f"can't extend empty axis {dim} using modes other than 'constant' or 'empty'"
            )
    steps = [before for before, _ in widths]
    part = _shifted(x, layout, steps, edge)
    if mode == "constant":
        window: Box = tuple(
            [(lo - step, hi - step) for (lo, hi), step in zip(own_box(layout), steps, strict=True)]
        )
        fill_beyond(part, window, x.shape, _pairs(options.get("constant_values", 0), x.ndim))
    return make(part, layout)


def _pairs(given: Any, ndim: int) -> list[tuple[Any, Any]]:
    """Return a pair for each dimension: of a number, a pair, pairs, or a dict from dimensions."""
    if isinstance(given, Mapping):
        pairs = [(0, 0)] * ndim
        for axis, pair in given.items():
            pairs[dimension(axis, ndim)] = tuple(np.broadcast_to(pair, 2).tolist())
        return pairs
    return [tuple(pair) for pair in np.broadcast_to(given, (ndim, 2)).tolist()]


# ---- of neighbours


@rule("gradient")
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: Any = 1) -> Any:
    """Return the differences of the neighbours of each element, by their distance."""
    if edge_order > 2:
        raise ValueError("'edge_order' greater than 2 not supported")
    x = settled(f)
    given = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    dims = [dimension(each, x.ndim) for each in given]
    dimensions(dims, x.ndim)  # refuses one that is given twice
    spacings: tuple[Any, ...] = varargs or (1.0,)
    if len(spacings) == 1 and np.ndim(spacings[0]) == 0:
        spacings = spacings * len(dims)
    if len(spacings) != len(dims):
        raise TypeError("invalid number of arguments")
    # NumPy has a list or a tuple for several dimensions, depending on its version.
    several: Any = type(np.gradient(np.zeros((2, 2))))
    found = [
        _gradient(x, dim, np.asarray(spacing), edge_order)
        for dim, spacing in zip(dims, spacings, strict=True)
    ]
    return found[0] if len(found) == 1 else several(found)


def _gradient(x: DistArray, dim: int, spacing: Any, edge_order: Any) -> DistArray:
    length, layout = x.shape[dim], x.layout
    if spacing.dtype.kind not in "biufcmM":
        raise TypeError(f"distances must be numbers, got {spacing.dtype}")
    if spacing.ndim and spacing.shape != (length,):
        raise ValueError(
            "when 1d, distances must match the length of the corresponding dimension"
            if spacing.ndim == 1
            else "distances must be either scalars or 1d"
        )
    if length < edge_order + 1:
        raise ValueError(
            f"Shape of array too small to calculate a numerical gradient, at least "
            f"{edge_order + 1} elements are required."
        )
    none = (0, 0)
    around = Surroundings(
        tuple([(edge_order, edge_order) if each == dim else none for each in range(x.ndim)]),
        (Edge.NOTHING,) * x.ndim,
        (None,) * x.ndim,
    )
    part, own, here = extended(x, around), own_box(layout), layout.mesh.coordinate
    if here is None or not volume(own):
        dtype = np.gradient(np.zeros(3, x.dtype)).dtype
        return make(np.empty(part.shape if here is None else lengths(own), dtype), layout)
    window = around.window(layout, here)
    places = spacing[slice(*window[dim])] if spacing.ndim else spacing
    found = np.gradient(part, places, axis=dim, edge_order=edge_order)
    return make(np.ascontiguousarray(found[within(own, window)]), layout)


@rule("trapezoid", "trapz")
def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    """Return the area under values along a dimension, at places `x` or at distances `dx`."""
    mesh = mesh_of(y, x)
    values = as_dist(y, mesh)
    dim = dimension(axis, values.ndim)
    if x is not None:
        places = as_dist(x, mesh)
        dx = diff(places, axis=-1 if places.ndim == 1 else axis)
        if places.ndim == 1:
            dx = reshape(dx, [-1 if each == dim else 1 for each in range(values.ndim)])
    later, sooner = values[along(dim, slice(1, None))], values[along(dim, slice(-1))]
    return total(dx * (later + sooner) / 2.0, dim)


@rule("convolve")
def convolve(a: Any, v: Any, mode: str = "full") -> Any:
    """Return the convolution of two sequences, cut as the longer one; all ranks have the other."""
    mesh = mesh_of(a, v)
    x, kernel = as_dist(a, mesh), as_dist(v, mesh)
    if max(x.ndim, kernel.ndim) > 1:
        raise ValueError(f"convolve takes sequences, got the shapes {x.shape} and {kernel.shape}")
    x, kernel = reshape(x, (-1,)), reshape(kernel, (-1,))
    for name, each in (("a", x), ("v", kernel)):
        if not each.size:
            raise ValueError(f"{name} cannot be empty")
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"mode must be one of 'valid', 'same', or 'full' (got {mode!r})")
    if kernel.size > x.size:
        x, kernel = kernel, x
    weights = resharded(kernel, uncut(kernel.layout)).local
    return _convolve(x, weights, kernel.size - 1, mode)


def _convolve(x: DistArray, weights: Any, reach: int, mode: str) -> DistArray:
    """Return the places from `first` on of the full convolution, as many as the mode says.

    A place of it is of one in `x` and of `reach` before that.
    """
    length = x.size
    first, count = {
        "full": (0, length + reach),
        "same": (reach // 2, length),
        "valid": (reach, length - reach),
    }[mode]
    *cuts, _ = (min(cut, count) for cut in x.layout.cuts[0])
    layout = replaced(x.layout, 0, (*cuts, count))

    def window(_: Layout, place: Coordinate) -> Box:
        ((lo, hi),) = layout.box(place)
        return ((max(lo + first - reach, 0), min(hi + first, length)) if lo < hi else (0, 0),)

    part = read_windows(
        x, Windows(f"convolve {mode} by {reach + 1}", window, (Edge.NOTHING,), (0,))
    )
    ((lo, hi),) = own_box(layout)
    if lo == hi:
        nothing = np.convolve(np.ones(1, x.dtype), np.ones(1, weights.dtype))[:0]
        return make(nothing, layout)
    found = np.convolve(part, weights, "full")
    start = lo + first - max(lo + first - reach, 0)
    return make(found[start : start + hi - lo].copy(), layout)
