"""Merging: one gradient for each id of a push, before it travels or is applied.

`compiled` loops do it in two passes: the ids are sorted with their places, by digits; the rows are
added up segment by segment. NumPy does the same where they were not compiled, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import load
from hpcdist.named_tuple import NamedTuple

_compiled = load("hpcdist.ps._native")
_group = getattr(_compiled, "group_ids", None)
_add = getattr(_compiled, "segment_add", None)
_LOOPS = {"float32": 4, "float64": 8}
_NARROW = 2


class Merged(NamedTuple):
    """Distinct ids, ascending; the sum of the gradients of each; and how many there were."""

    ids: NumpyArray
    grads: NumpyArray
    counts: NumpyArray


class Groups(NamedTuple):
    """Equal ids brought together.

    `order` has the places of the ids, those of the smallest id first, of equal ids in the order
    they came. Those of id number ``i`` begin at ``starts[i]``, which has one more entry than ids.
    """

    ids: NumpyArray
    order: NumpyArray
    starts: NumpyArray


def group(ids: NumpyArray) -> Groups:
    """Bring equal ids (int64, flat, contiguous) together."""
    if _group is None:
        return group_in_python(ids)
    unique, order = np.empty_like(ids), np.empty(ids.size, np.int64)
    starts = np.empty(ids.size + 1, np.int64)
    size = _group(ids, unique, order, starts)
    return Groups(unique[:size], order, starts[: size + 1])


def group_in_python(ids: NumpyArray) -> Groups:
    """Return what `group` returns, without compiled loops."""
    order = np.argsort(ids, kind="stable").astype(np.int64, copy=False)
    ordered = ids[order]
    first = np.ones(ids.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    heads = np.flatnonzero(first)
    return Groups(ordered[heads], order, np.append(heads, ids.size).astype(np.int64, copy=False))


def unique(ids: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """Return the distinct ids, ascending, and for each id which of them it is."""
    found, order, starts = group(ids)
    inverse = np.empty(ids.size, np.intp)
    inverse[order] = np.repeat(np.arange(found.size), np.diff(starts))
    return found, inverse


def spread(inverse: NumpyArray, rows: NumpyArray) -> Callable[[NumpyArray], NumpyArray]:
    """Return what copies the rows of distinct ids to where the ids were, and returns all of them.

    Args:
        inverse: see `unique`.
        rows: takes them, one for each id.

    """

    def fill(found: NumpyArray) -> NumpyArray:
        return found.take(inverse, axis=0, out=rows, mode="clip")  # "raise" would copy them twice

    return fill


def merge(ids: NumpyArray, grads: NumpyArray) -> Merged:
    """Add up the gradients (one row for each id) of equal ids, in the order they come.

    Floats of 16 bits are added in float32, and the sums rounded once.
    """
    found, order, starts = group(ids)
    counts = np.diff(starts)
    if grads.dtype.itemsize == _NARROW:
        total = segment_add(grads.astype(np.float32), order, starts)
        return Merged(found, total.astype(grads.dtype), counts)
    return Merged(found, segment_add(grads, order, starts), counts)


def segment_add(rows: NumpyArray, order: NumpyArray, starts: NumpyArray) -> NumpyArray:
    """Return sums of rows: of ``rows[order[starts[i]]]`` and what follows, to ``starts[i + 1]``."""
    loop = _LOOPS.get(rows.dtype.name)
    if _add is None or loop is None:
        return segment_add_in_python(rows, order, starts)
    sums = np.empty((starts.size - 1, rows.shape[1]), rows.dtype)
    _add(loop, sums, np.ascontiguousarray(rows), order, starts)
    return sums


def segment_add_in_python(rows: NumpyArray, order: NumpyArray, starts: NumpyArray) -> NumpyArray:
    """Return what `segment_add` returns, without compiled loops."""
    sums: NumpyArray = rows[order[starts[:-1]]]
    later = np.ones(order.size, bool)
    later[starts[:-1]] = False
    target = np.repeat(np.arange(starts.size - 1), np.diff(starts))[later]
    np.add.at(sums, target, rows[order[later]])  # one after the other, in this order
    return sums
