"""Sorting.

Where [Note: pencils] applies each rank sorts its part. An array of one dimension is divided by
value, in one exchange, and each rank sorts what it gets (see `dividing`); the result lies as the
array, in parts of equal length.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules.along import along
from hpcdist.mesh.rules.basis import (
    dimension,
    make,
    own_box,
    part_number,
    replaced,
    resharded,
)
from hpcdist.mesh.rules.dividing import boundaries, memory, near, traded
from hpcdist.mesh.rules.shapes import flip, ravel, reshape
from hpcdist.mesh.rules.table import METHODS, rule

FEW = 8
"""Up to how many parts it is faster to compare with each boundary than to sort twice."""


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
    _check(order)
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
    """Return the indices that sort along a dimension, or flat; equal elements in their order."""
    _check(order)
    x = ravel(x) if axis is None else x
    dim = dimension(-1 if axis is None else axis, x.ndim)
    result = along(
        "numpy.argsort",
        lambda part: np.argsort(part, dim, "stable"),
        flip(x, dim) if descending else x,
        (dim,),
        line=_order_line,
    )
    return x.shape[dim] - 1 - flip(result, dim) if descending else result


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
    """Sort the array itself along a dimension."""
    a.local[...] = resharded(sort(a, axis, kind, order), a.layout).local


METHODS["sort"] = _sort_in_place


def _check(order: Any) -> None:
    if order is not None:
        raise UsageError(f"order= is for arrays of fields, which a DistArray is not, got {order!r}")


def _check_places(a: Any, kth: Any, axis: int | None) -> None:
    length = math.prod(a.shape) if axis is None else a.shape[dimension(axis, a.ndim)]
    for place in np.atleast_1d(kth):
        if not -length <= place < length:
            raise ValueError(f"kth(={place}) out of bounds ({length})")


# ---- one dimension that is cut


def _sorted_line(x: DistArray) -> DistArray:
    return _evened(_sorted(reshape(x, (x.size,))), x)


def _order_line(x: DistArray) -> DistArray:
    return _evened(_order(reshape(x, (x.size,))), x)


def _evened(result: DistArray, x: DistArray) -> DistArray:
    """Return a result in the shape of an array, in parts of equal length."""
    even = make_layout(x.layout.mesh, x.shape, x.layout.axes)
    return resharded(reshape(result, x.shape), even)


def in_order(x: DistArray) -> DistArray:
    """Return the elements of an array of one dimension in order; its parts are about equal."""
    return _sorted(x) if x.layout.axes[0] else make(np.sort(x.local), x.layout)


def _sorted(x: DistArray) -> DistArray:
    layout, part, lengths = x.layout, x.local, np.diff(x.layout.cuts[0])
    places = _places(layout)
    chosen = near(part, layout, places, lengths)
    compares = part.dtype.kind in "biuf" and len(lengths) <= FEW
    if not compares:
        part = np.sort(part)
    counts = _compared(part, chosen) if compares else _found(part, chosen)
    ends = boundaries(*counts, layout, places, lengths)
    if compares:
        part = _parted(part, ends[part_number(layout, 0)])
    received = traded(part, np.diff(ends), layout)
    received.sort()
    return make(received, replaced(layout, 0, ends.sum(0).tolist()))


def _order(x: DistArray) -> DistArray:
    layout, lengths, places = x.layout, np.diff(x.layout.cuts[0]), _places(x.layout)
    order = np.argsort(x.local, kind="stable")
    part, ((lo, _),) = x.local[order], own_box(layout)
    chosen = near(part, layout, places, lengths)
    ends = boundaries(*_found(part, chosen), layout, places, lengths)
    values = traded(part, np.diff(ends), layout)
    indices = traded(order + lo, np.diff(ends), layout)
    result = indices[np.argsort(values, kind="stable")]
    return make(result, replaced(layout, 0, ends.sum(0).tolist()))


def _places(layout: Layout) -> Any:
    """Return the boundaries between parts of equal length."""
    even = make_layout(layout.mesh, layout.shape, layout.axes)
    return np.array(even.cuts[0][1:-1], np.int64)


def _found(part: Any, chosen: Any) -> tuple[Any, Any]:
    """Return how many elements of a sorted part are less than values, and less or equal."""
    return np.searchsorted(part, chosen, "left"), np.searchsorted(part, chosen, "right")


def _compared(part: Any, chosen: Any) -> tuple[Any, Any]:
    """Return the same of a part in any order."""
    numbers = part.size - np.count_nonzero(part != part)
    below, upto = [], []
    for value in chosen:
        is_number = bool(value == value)
        below.append(np.count_nonzero(part < value) if is_number else numbers)
        upto.append(np.count_nonzero(part <= value) if is_number else part.size)
    return np.array(below, np.int64), np.array(upto, np.int64)


def _parted(part: Any, ends: Any) -> Any:
    """Return a part arranged so that nothing before one of the boundaries is larger than after."""
    arranged = memory(part.size, part.dtype)
    arranged[...] = part
    inner = sorted({*ends[1:-1].tolist()} - {0, part.size})
    if inner:
        arranged.partition(inner)
    return arranged
