"""Arrays put together of several, and taken apart: columns, blocks, what is inserted and deleted.

All of them are `concat`, slices and `take` with indices that are cut, so that the result is cut as
the array was, and no rank has more than its share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout
from hpcdist.mesh.rules.basis import (
    arrays_in,
    as_dist,
    cutting,
    dimension,
    integer,
    is_dist,
    make,
    mesh_of,
    own_box,
    resharded,
    settled,
    uncut,
)
from hpcdist.mesh.rules.masks import compress
from hpcdist.mesh.rules.placing import converted
from hpcdist.mesh.rules.pointwise import astype
from hpcdist.mesh.rules.shapes import (
    at_least,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    ravel,
    reshape,
    split,
    swapaxes,
)
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.taking import take

# ---- joined


@rule("atleast_3d")
def atleast_3d(*arrays: Any) -> Any:
    """Return arrays with at least three dimensions."""
    new = {0: [0, 1, 2], 1: [0, 2], 2: [2]}
    return at_least(arrays, lambda x: expand_dims(x, new[x.ndim]) if x.ndim in new else x)


@rule("column_stack")
def column_stack(tup: Any) -> Any:
    """Return arrays joined along the second dimension; those of one dimension are columns."""
    mesh = mesh_of(*tup)
    given = [as_dist(each, mesh) for each in tup]
    given = [each if each.ndim else reshape(each, (1,)) for each in given]
    return concat([expand_dims(each, 1) if each.ndim < 2 else each for each in given], 1)


@rule("dstack")
def dstack(tup: Any) -> Any:
    """Return arrays joined along the third dimension."""
    mesh = mesh_of(*tup)
    return concat([atleast_3d(as_dist(each, mesh)) for each in tup], 2)


@rule("block")
def block(arrays: Any) -> Any:
    """Return an array of nested lists of blocks: innermost lists along the last dimension."""
    mesh = mesh_of(*arrays_in(arrays))
    depth = _depth(arrays)
    ndim = max(depth, *_leaves(arrays, np.ndim))
    return _concat_blocks(arrays, mesh, ndim, ndim - depth)


def _depth(tree: Any) -> int:
    """Return how deep lists are nested; refuse those of different depths."""
    if isinstance(tree, tuple):
        raise TypeError("blocks are nested in lists, not in tuples")
    if not isinstance(tree, list):
        return 0
    if not tree:
        raise ValueError("List depths are mismatched: a list of blocks is empty")
    depths = {_depth(each) for each in tree}
    if len(depths) > 1:
        raise ValueError(f"List depths are mismatched: {sorted(depths)}")
    return 1 + depths.pop()


def _leaves(tree: Any, function: Callable[[Any], Any]) -> list[Any]:
    if not isinstance(tree, list):
        return [function(tree)]
    return [leaf for each in tree for leaf in _leaves(each, function)]


def _concat_blocks(tree: Any, mesh: Any, ndim: int, dim: int) -> DistArray:
    if isinstance(tree, list):
        return concat([_concat_blocks(each, mesh, ndim, dim + 1) for each in tree], dim)  # type: ignore[no-any-return]
    x = as_dist(tree, mesh)
    return expand_dims(x, [*range(ndim - x.ndim)]) if x.ndim < ndim else x


# ---- split


def _split_along(name: str, dim: int, least: int) -> None:
    def parts(ary: Any, indices_or_sections: Any) -> Any:
        if ary.ndim < least:
            raise ValueError(f"{name} only works on arrays of {least} or more dimensions")
        return split(ary, indices_or_sections, min(dim, ary.ndim - 1))

    parts.__name__ = name
    parts.__doc__ = f"Return equal parts of the array along dimension {dim}; nothing is moved."
    rule(name)(parts)


for _name, _dim, _least in (("vsplit", 0, 2), ("hsplit", 1, 1), ("dsplit", 2, 3)):
    _split_along(_name, _dim, _least)


# ---- turned


def _turns_move(m: Any, k: int = 1, axes: Any = (0, 1)) -> bool:
    first, second = (dimension(each, m.ndim) for each in axes)
    turned = {0: (), 1: (second,), 2: (first, second), 3: (first,)}[k % 4]
    return bool(m.size and cutting(m.layout, turned))


@rule("rot90", moved=_turns_move)
def rot90(m: Any, k: int = 1, axes: Any = (0, 1)) -> Any:
    """Return the array turned by 90 degrees, `k` times, from the first dimension to the second."""
    if len(axes) != 2:
        raise ValueError("len(axes) must be 2.")
    first, second = (dimension(each, m.ndim) for each in axes)
    if first == second:
        raise ValueError("Axes must be different.")
    x, k = settled(m), k % 4
    if k == 2:
        return flip(x, (first, second))
    if k == 1:
        return swapaxes(flip(x, second), first, second)
    return swapaxes(flip(x, first), first, second) if k else x[...]


# ---- longer and shorter


@rule("append")
def append(arr: Any, values: Any, axis: int | None = None) -> Any:
    """Return the array with values behind it along a dimension, or flat."""
    return concat([arr, values], axis)


@rule("insert")
def insert(arr: Any, obj: Any, values: Any, axis: int | None = None) -> Any:
    """Return the array with values before some places of a dimension, or of the flat array."""
    mesh = mesh_of(arr, values)
    x = as_dist(arr, mesh)
    x, dim = _along(x, axis)
    length = x.shape[dim]
    places = _places(obj, length)
    values = converted(values, x.dtype)
    values = as_dist(values, mesh)
    values = expand_dims(values, [*range(x.ndim - values.ndim)]) if values.ndim < x.ndim else values
    values = astype(values, x.dtype, copy=False)
    if places.size == 1:  # as many as there are values, before one place
        values = moveaxis(values, 0, dim) if places.ndim == 0 else values
        count = values.shape[dim]
        places = np.full(count, places.reshape(-1)[0])
    wanted = [places.size if each == dim else n for each, n in enumerate(x.shape)]
    values = broadcast_to(values, wanted)
    order = np.argsort(places, kind="stable")
    source = np.empty(length + places.size, np.intp)
    inserted = places[order] + np.arange(places.size)
    old = np.ones(source.size, bool)
    old[inserted] = False
    source[inserted], source[old] = order + length, np.arange(length)
    return take(concat([x, values], dim), _spread(source, x, dim), dim)


def _spread(index: Any, x: DistArray, dim: int) -> DistArray:
    """Return indices along a dimension, cut by what cuts it."""
    layout = make_layout(x.layout.mesh, index.shape, (x.layout.axes[dim],))
    ((lo, hi),) = own_box(layout)
    return make(index[lo:hi].copy(), layout)


def _along(x: DistArray, axis: int | None) -> tuple[DistArray, int]:
    """Return the array and the dimension, or the flat array."""
    if axis is None:
        x = ravel(x) if x.ndim != 1 else x
        return x, 0
    return x, dimension(integer(axis), x.ndim)


def _places(obj: Any, length: int) -> Any:
    """Return places before which is inserted, from 0 on."""
    places = _whole(obj, length)
    if places.dtype.kind == "b":
        if places.ndim != 1:
            raise ValueError("boolean array argument obj to insert must be one dimensional")
        places = np.flatnonzero(places)
    if places.ndim > 1:
        raise ValueError("index array argument obj to insert must be one dimensional or scalar")
    if places.dtype.kind not in "iu":
        raise IndexError(f"indices must be integers, got {places.dtype}")
    if ((places < -length) | (places > length)).any():
        raise IndexError(f"index {obj} is out of bounds for size {length}")
    return np.where(places < 0, places + length, places)


def _whole(obj: Any, length: int) -> Any:
    """Return a slice, indices or a mask as an array that every rank has."""
    if isinstance(obj, slice):
        return np.arange(*obj.indices(length))
    if is_dist(obj):
        return resharded(obj, uncut(obj.layout)).local
    places = np.asarray(obj)
    return places if places.size else places.astype(np.intp)


@rule("delete")
def delete(arr: Any, obj: Any, axis: int | None = None) -> Any:
    """Return the array without some places of a dimension, or of the flat array."""
    x, dim = _along(settled(arr), axis)
    length = x.shape[dim]
    gone = _whole(obj, length)
    if gone.dtype.kind == "b" and gone.shape != (length,):
        raise ValueError(
            f"boolean array argument obj to delete must be one dimensional and match the axis "
            f"length of {length}"
        )
    if gone.dtype.kind not in "biu":
        raise IndexError(f"indices must be integers, got {gone.dtype}")
    kept = np.ones(length, bool)
    kept[gone] = False
    return compress(kept, x, dim)
