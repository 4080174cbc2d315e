"""Sorting.

Where [Note: pencils] applies each rank sorts its part. Of an array of one dimension each rank sorts
its part, too, and merges what it gets of the others, where parts of equal length are cut anew by
value (see `dividing`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules.along import along
from hpcdist.mesh.rules.basis import (
    arrays_in,
    as_dist,
    check_writable,
    dimension,
    integer,
    make,
    mesh_of,
    own_box,
    resharded,
)
from hpcdist.mesh.rules.dividing import counts_told, divided, memory, traded
from hpcdist.mesh.rules.merging import merged
from hpcdist.mesh.rules.shapes import flip, ravel, reshape
from hpcdist.mesh.rules.table import METHODS, rule
from hpcdist.mesh.rules.taking import take_along_axis


@rule("sort")
def sort(
    x: Any,
    /,
    axis: int | None = -1,
    kind: Any = None,
    order: Any = None,
    *,
    descending: bool = False,
    stable: bool | None = None,
) -> Any:
    """Return the elements in ascending order along a dimension, or flat; NaN last."""
    _refuse_order(order)
    x = ravel(x) if axis is None else x
    dim = dimension(-1 if axis is None else axis, x.ndim)
    kind = kind or ("stable" if stable else None)
    result = along(
        "numpy.sort", lambda part: np.sort(part, dim, kind), x, (dim,), line=_sorted_line
    )
    return flip(result, dim) if descending else result


@rule("argsort", method=True)
def argsort(
    x: Any,
    /,
    axis: int | None = -1,
    kind: Any = None,
    order: Any = None,
    *,
    descending: bool = False,
    stable: bool | None = None,
) -> Any:
    """Return the indices that sort along a dimension, or flat; equal elements keep their order.

    Args:
        x: the array.
        axis: the dimension; None for the flat array.
        kind: accepted: the order is always stable.
        order: None: there are no fields.
        descending: the largest first.
        stable: accepted.

    """
    _refuse_order(order)
    x = ravel(x) if axis is None or not x.ndim else x
    dim = dimension(-1 if axis is None else integer(axis), x.ndim)
    result = along(
        "numpy.argsort",
        lambda part: np.argsort(part, dim, "stable"),
        flip(x, dim) if descending else x,
        (dim,),
        line=_order_line,
    )
    return x.shape[dim] - 1 - flip(result, dim) if descending else result


@rule("lexsort")
def lexsort(keys: Any, axis: int = -1) -> Any:
    """Return the indices that sort by several keys, of which the last one counts first."""
    mesh = mesh_of(*arrays_in(keys))
    given = [as_dist(key, mesh) for key in keys]
    if not given:
        raise TypeError("need sequence of keys with len > 0 in lexsort")
    if len({key.shape for key in given}) > 1:
        raise ValueError("all keys need to be the same shape")
    if not given[0].ndim:
        return as_dist(np.intp(0), mesh)
    order = argsort(given[0], axis)
    for key in given[1:]:
        order = take_along_axis(order, argsort(take_along_axis(key, order, axis), axis), axis)
    return order


@rule("partition")
def partition(a: Any, kth: Any, axis: int | None = -1, kind: Any = None, order: Any = None) -> Any:
    """Return the elements with those before `kth` not larger, and those after not smaller."""
    _check_places(a, kth, axis)
    return sort(a, axis, order=order)


@rule("argpartition")
def argpartition(
    a: Any, kth: Any, axis: int | None = -1, kind: Any = None, order: Any = None
) -> Any:
    """Return the indices of `partition`."""
    _check_places(a, kth, axis)
    return argsort(a, axis, order=order)


def _sort_in_place(a: DistArray, axis: int = -1, kind: Any = None, order: Any = None) -> None:
    """Sort the array itself along a dimension.

    Args:
        a: the array.
        axis: the dimension.
        kind: as of `numpy.sort`.
        order: None: there are no fields.

    """
    check_writable(a)
    a.local[...] = resharded(sort(a, axis, kind, order), a.layout).local


METHODS["sort"] = _sort_in_place


def _refuse_order(order: Any) -> None:
    if order is not None:
        raise UsageError(f"order= is for arrays of fields, which a DistArray is not, got {order!r}")


def _check_places(a: Any, kth: Any, axis: int | None) -> None:
    length = math.prod(a.shape) if axis is None else a.shape[dimension(axis, a.ndim)]
    for place in np.atleast_1d(kth):
        if not -length <= place < length:
            raise ValueError(f"kth(={place}) out of bounds ({length})")


# ---- one dimension that is cut


def _sorted_line(x: DistArray) -> DistArray:
    return _shaped(in_order(reshape(x, (x.size,))), x)


def _order_line(x: DistArray) -> DistArray:
    return _shaped(_order(reshape(x, (x.size,))), x)


def _shaped(result: DistArray, x: DistArray) -> DistArray:
    """Return a result in the shape of an array, and spread as it is."""
    return resharded(reshape(result, x.shape), _even(x.layout))


def in_order(x: DistArray) -> DistArray:
    """Return the elements of an array of one dimension in order, in parts of equal length."""
    even = _even(x.layout)
    if not x.layout.axes[0]:
        return make(np.sort(x.local), even)
    if x.layout.mesh.coordinate is None:
        return make(x.local, even)
    part = memory(x.local.size, x.dtype)
    part[...] = x.local
    part.sort()
    with divided(part, x.layout, _places(even)) as runs:
        return make(merged(runs, memory(sum(map(len, runs)), x.dtype)), even)


def _order(x: DistArray) -> DistArray:
    """Return the indices that put an array of one dimension in order."""
    layout, even = x.layout, _even(x.layout)
    order = np.argsort(x.local, kind="stable")
    if not layout.axes[0] or layout.mesh.coordinate is None:
        return make(order, even)
    part, ((lo, _),) = x.local[order], own_box(layout)
    counts = counts_told(part, layout, _places(even))
    values, indices = traded(part, counts, layout), traded(order + lo, counts, layout)
    return make(indices[np.argsort(values, kind="stable")], even)


def _places(even: Layout) -> NumpyArray:
    """Return the boundaries between the parts."""
    return np.array(even.cuts[0][1:-1], np.int64)


def _even(layout: Layout) -> Layout:
    return make_layout(layout.mesh, layout.shape, layout.axes)
