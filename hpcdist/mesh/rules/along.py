"""`along`: functions that need all elements along a dimension, as sorting and transforms do.

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
    make,
    resharded,
    result_array,
    settled,
)


def along(
    name: str,
    function: Callable[..., Any],
    x: DistArray,
    dims: Sequence[int],
    *,
    stacked: bool = False,
    new: int = 0,
    line: Callable[[DistArray], Any] | None = None,
    hint: str = "Give the array another dimension to cut it along",
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
        return without_rule(name, function, (x,), {}, hint)
    part = resharded(x, layout).local
    if layout.mesh.coordinate is None:  # nothing of what there is
        part = np.zeros([n if dim in dims else 0 for dim, n in enumerate(x.shape)], x.dtype)
    return _spread(function(part), layout, tuple(dims), stacked, new)


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
