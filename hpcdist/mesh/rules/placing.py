"""Assignment to elements chosen by arrays of indices.

Every rank gets the indices, and writes those of the elements that it has. Where one element is
chosen several times, the last value is written, as in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules.basis import as_dist, broadcast, mesh_of, own_box, resharded, uncut
from hpcdist.mesh.rules.pointwise import astype
from hpcdist.mesh.rules.shapes import broadcast_to, flip, moveaxis, reshape
from hpcdist.mesh.rules.taking import valid


def converted(value: Any, dtype: Any) -> Any:
    """Return an array to be assigned; words and objects in the dtype of where they go.

    One that is no such value is an error on all ranks, whichever would write it.
    """
    array = value if isinstance(value, DistArray) else np.asarray(value)
    if array.dtype.kind not in "SUO" or array.dtype.kind == dtype.kind:
        return array
    return astype(array, dtype) if isinstance(array, DistArray) else array.astype(dtype)


def places_of(
    indices: Sequence[DistArray], dims: Sequence[int], shape: Sequence[int]
) -> list[DistArray]:
    """Return indices along some dimensions of a shape as every rank has them, from 0 on."""
    whole = [resharded(each, uncut(each.layout)) for each in indices]
    return [valid(each, shape[dim], dim) for each, dim in zip(whole, dims, strict=True)]


def check_value(
    x: DistArray,
    layout: Layout,
    dims: Sequence[int],
    places: Sequence[DistArray],
    home: int,
    value: Any,
) -> None:
    """Raise unless a value can be written to the elements at places; arguments as of `place`."""
    if isinstance(value, DistArray):
        mesh_of(x, value)
    given = tuple(np.shape(value))
    shape = _shape_at(layout, dims, places, home)
    while len(given) > len(shape) and given[0] == 1:
        given = given[1:]
    if broadcast(given, shape) != shape:
        raise ValueError(f"cannot broadcast an array of shape {given} to {shape}")


def _shape_at(
    layout: Layout, dims: Sequence[int], places: Sequence[DistArray], home: int
) -> tuple[int, ...]:
    """Return the shape of the elements at places."""
    rest = [length for dim, length in enumerate(layout.shape) if dim not in dims]
    return (*rest[:home], *shape_of(places), *rest[home:])


def shape_of(indices: Sequence[DistArray]) -> tuple[int, ...]:
    """Return the shape of the places that several indices mean together."""
    try:
        return broadcast(*[each.shape for each in indices])
    except ValueError as error:
        raise IndexError(f"the indices do not fit together: {error}") from None


def place(
    x: DistArray,
    here: tuple[slice, ...],
    layout: Layout,
    dims: Sequence[int],
    places: Sequence[DistArray],
    home: int,
    backwards: Sequence[int],
    value: Any,
) -> None:
    """Write a value to the elements at places along some dimensions. On the ranks of the mesh.

    Args:
        x: the array.
        here: what is selected along the other dimensions, within this rank's part.
        layout: of what is selected; all along `dims`.
        dims: the dimensions that are indexed.
        places: for each of them, as `places_of` returns them.
        home: which dimension of the value is the first that the indices have.
        backwards: the dimensions in which the value is written from the end.
        value: a number or an array, which `check_value` has found to fit.

    """
    spread = np.broadcast_arrays(*[each.local for each in places])
    count, shape = spread[0].size, spread[0].shape
    mine, own = np.ones(count, bool), []
    for dim, each in zip(dims, spread, strict=True):
        lo, hi = own_box(x.layout)[dim]
        mine &= (each.reshape(-1) >= lo) & (each.reshape(-1) < hi)
        own.append(each.reshape(-1) - lo)
    part = np.moveaxis(x.local[here], dims, range(len(dims)))
    key = tuple([each[mine] for each in own])
    if np.ndim(value) == 0 and not isinstance(value, DistArray):
        part[key] = value
        return
    others = [dim for dim in range(x.ndim) if dim not in dims]
    rest = [layout.shape[dim] for dim in others]
    value = _fitting(as_dist(value, x.layout.mesh), _shape_at(layout, dims, places, home))
    value = moveaxis(value, [*range(home, home + len(shape))], [*range(len(shape))])
    value = reshape(value, (count, *rest))
    turned = [1 + others.index(dim) for dim in backwards]
    value = resharded(
        flip(value, tuple(turned)) if turned else value,
        make_layout(
            layout.mesh,
            (count, *rest),
            ((), *[layout.axes[dim] for dim in others]),
            (None, *[layout.cuts[dim] for dim in others]),
        ),
    )
    part[key] = value.local[mine]


def _fitting(value: DistArray, shape: tuple[int, ...]) -> DistArray:
    """Return a value repeated to a shape; leading dimensions of length 1 may be too many."""
    return broadcast_to(trimmed(value, len(shape)), shape)  # type: ignore[no-any-return]


def trimmed(value: Any, ndim: int) -> Any:
    """Return an array without leading dimensions of length 1 that its target does not have."""
    spare = value.ndim - ndim
    if spare > 0 and value.shape[:spare] == (1,) * spare:
        return value.reshape(value.shape[spare:])
    return value
