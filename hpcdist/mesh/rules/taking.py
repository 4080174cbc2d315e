"""`take`: elements by arrays of indices.

Along a dimension that is not cut each rank takes from its part. Along one that is cut it depends on
the indices. Those that every rank has: each rank gives the places that it has, and all ranks along
the axes that cut the dimension get the result. Those that are cut by the same axes go to the ranks
that have their places, and the elements come back: the result lies as the indices. In both cases
what travels is the result, not the array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, longest, make_layout
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.along import pencils
from hpcdist.mesh.rules.basis import (
    as_dist,
    broadcast,
    combined,
    cutting,
    delivered,
    dimension,
    integer,
    make,
    mesh_of,
    own_box,
    resharded,
    settled,
)
from hpcdist.mesh.rules.dividing import told, traded
from hpcdist.mesh.rules.shapes import broadcast_to, ravel, reshape
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.call.reduction import ReduceOp


@rule("take", method=True)
def take(
    x: Any, indices: Any, /, axis: int | None = None, out: Any = None, mode: str = "raise"
) -> Any:
    """Return elements by their indices along a dimension.

    Args:
        x: the array.
        indices: integers, of any shape; negative ones count from the end.
        axis: the dimension; None for the flat array.
        out: a `DistArray` of the result's shape, which takes it and is returned.
        mode: what to do with indices beyond the ends: "raise" an `IndexError` on every rank, "clip"
            them to the ends, or "wrap" them around.

    """
    mesh = mesh_of(x, indices)
    x, places = as_dist(x, mesh), as_indices(indices, mesh)
    x = settled(ravel(x) if axis is None or not x.ndim else x)
    dim = dimension(0 if axis is None else integer(axis), x.ndim)
    places = apart(places, x.layout, dim)
    index = _valid(places, x.shape[dim], dim, mode)
    layout = _result(x.layout, dim, places.layout)
    axes = x.layout.axes[dim]
    if not axes:
        return delivered(make(np.take(x.local, index, axis=dim), layout), out, "unsafe")
    if {*axes}.intersection(cutting(places.layout, range(places.ndim))):
        return delivered(make(_asked(x, dim, index), layout), out, "unsafe")
    lo, hi = own_box(x.layout)[dim]
    mine = (index >= lo) & (index < hi)
    part = np.zeros((*x.local.shape[:dim], *index.shape, *x.local.shape[dim + 1 :]), x.dtype)
    part[(slice(None),) * dim + (mine,)] = np.take(x.local, index[mine] - lo, axis=dim)
    combined(part.reshape(-1).view(np.uint8), x.layout.mesh, axes, ReduceOp.BOR)
    return delivered(make(part, layout), out, "unsafe")


def apart(places: DistArray, layout: Layout, dim: int) -> DistArray:
    """Return indices along a dimension, not cut by the axes that cut others of the array.

    If they are cut by an axis that cuts the dimension, they are cut by such ones only: all ranks
    that have the same part of it ask for the same.
    """
    own = places.layout
    used = {*cutting(own, range(places.ndim))}
    others = {axis for each, cut in enumerate(layout.axes) if each != dim for axis in cut}
    if used.intersection(layout.axes[dim]):
        others |= used.difference(layout.axes[dim])
    if not others.intersection(used):
        return places
    axes = [tuple(axis for axis in each if axis not in others) for each in own.axes]
    cuts = [
        cut if kept == each else None
        for cut, kept, each in zip(own.cuts, axes, own.axes, strict=True)
    ]
    return resharded(places, make_layout(own.mesh, places.shape, axes, cuts))


def as_indices(value: Any, mesh: ProcessMesh) -> DistArray:
    """Return indices as a DistArray: a list without any is one of integers."""
    if isinstance(value, (list, tuple)) and not np.size(value):
        value = np.asarray(value, np.intp)
    return as_dist(value, mesh)


def _valid(places: DistArray, length: int, dim: int, mode: str) -> Any:
    """Return this rank's indices, from 0 on; if any rank's is wrong, all raise the error."""
    _check_kind(places.dtype, places.size, length)
    index = places.local.astype(np.intp)
    if mode != "raise":
        return np.clip(index, 0, length - 1) if mode == "clip" else index % length
    wrong = np.array([_is_wrong(index, length)], np.uint8)
    layout = places.layout
    if combined(wrong, layout.mesh, cutting(layout, range(places.ndim)), ReduceOp.MAX)[0]:
        raise _out_of_bounds(length, dim)
    return np.where(index < 0, index + length, index)


def check_indices(index: Any, length: int, dim: int) -> None:
    """Raise `IndexError` for an array that is no index along a dimension."""
    _check_kind(index.dtype, index.size, length)
    if _is_wrong(index, length):
        raise _out_of_bounds(length, dim)


def _check_kind(dtype: Any, size: int, length: int) -> None:
    if dtype.kind not in "biu":
        raise IndexError(f"indices must be integers, got {dtype}")
    if size and not length:
        raise IndexError("cannot do a non-empty take from an empty axes.")


def _is_wrong(index: Any, length: int) -> bool:
    return bool(((index < -length) | (index >= length)).any())


def _out_of_bounds(length: int, dim: int) -> IndexError:
    return IndexError(f"index out of bounds for axis {dim} with size {length}")


def valid(places: DistArray, length: int, dim: int) -> DistArray:
    """Return indices, from 0 on; if any rank's is wrong, all raise the error."""
    return make(_valid(places, length, dim, "raise"), places.layout)


def _asked(x: DistArray, dim: int, index: Any) -> Any:
    """Return the elements at this rank's indices, which the ranks that have them send."""
    layout, flat = x.layout, index.reshape(-1)
    line = make_layout(
        layout.mesh, x.shape[dim : dim + 1], (layout.axes[dim],), (layout.cuts[dim],)
    )
    owner = np.searchsorted(line.cuts[0], flat, "right") - 1
    order = np.argsort(owner, kind="stable")
    counts = told(np.bincount(owner, minlength=len(line.cuts[0]) - 1), line)
    asked = traded(flat[order], counts, line)
    rows, ((lo, _),) = np.moveaxis(x.local, dim, 0), own_box(line)
    width = math.prod(rows.shape[1:])
    # Rows are as long on all ranks, so that all lines of ranks send alike.
    most = math.prod([longest(cut) for each, cut in enumerate(layout.cuts) if each != dim])
    sent = np.zeros((asked.size, most), x.dtype)
    sent[:, :width] = rows[asked - lo].reshape(-1, width) if width else 0
    answers = traded(sent.reshape(-1), counts.T * most, line).reshape(flat.size, most)
    part = np.empty((flat.size, width), x.dtype)
    part[order] = answers[:, :width]
    part = np.moveaxis(part.reshape(flat.size, *rows.shape[1:]), 0, dim)
    return part.reshape(*part.shape[:dim], *index.shape, *part.shape[dim + 1 :])


@rule("take_along_axis")
def take_along_axis(x: Any, indices: Any, /, axis: int | None = -1) -> Any:
    """Return elements by their indices along a dimension, others for each place of the others."""
    places = as_dist(indices, mesh_of(x, indices))
    x = settled(ravel(x) if axis is None else x)
    dim = dimension(-1 if axis is None else axis, x.ndim)
    if places.dtype.kind not in "iu":
        raise IndexError(f"indices must be integers, got {places.dtype}")
    if places.ndim != x.ndim:
        raise ValueError(f"indices of {places.ndim} dimensions for an array of {x.ndim}")
    others = [each for each in range(x.ndim) if each != dim]
    shape = broadcast(*[[each.shape[other] for other in others] for each in (x, places)])
    x, places = (
        broadcast_to(each, (*shape[:dim], each.shape[dim], *shape[dim:])) for each in (x, places)
    )
    home = pencils(x.layout, (dim,))
    if home is None:  # there is nothing but this dimension
        return reshape(take(ravel(x), ravel(places)), places.shape)
    own = make_layout(home.mesh, places.shape, home.axes, _uncut_at(home.cuts, dim))
    index = _valid(resharded(places, own), x.shape[dim], dim, "raise")
    part = resharded(x, home).local
    return make(np.take_along_axis(part, index, dim), own)


def _uncut_at(cuts: Any, dim: int) -> list[Any]:
    return [None if each == dim else cut for each, cut in enumerate(cuts)]


def _result(layout: Layout, dim: int, places: Layout) -> Layout:
    return make_layout(
        layout.mesh,
        (*layout.shape[:dim], *places.shape, *layout.shape[dim + 1 :]),
        (*layout.axes[:dim], *places.axes, *layout.axes[dim + 1 :]),
        (*layout.cuts[:dim], *places.cuts, *layout.cuts[dim + 1 :]),
    )
