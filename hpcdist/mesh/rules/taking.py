"""`take`: elements by an array of indices along one dimension.

Along a dimension that is not cut each rank takes from its part. Along one that is cut, each rank
gives the places that it has, and all ranks along the axes that cut it get the result: what travels
is the result, not the array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.policy import without_rule
from hpcdist.mesh.rules.basis import (
    as_dist,
    combined,
    cutting,
    delivered,
    dimension,
    make,
    own_box,
    settled,
)
from hpcdist.mesh.rules.shapes import ravel
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.reduction import ReduceOp


@rule("take", method=True)
def take(
    x: Any, indices: Any, /, axis: int | None = None, out: Any = None, mode: str = "raise"
) -> Any:
    """Return elements by their indices along a dimension."""
    x = settled(ravel(x) if axis is None else x)
    dim, places = dimension(axis or 0, x.ndim), as_dist(indices, x.layout.mesh)
    used = {axis for each in places.layout.axes for axis in each}
    if used.intersection(cutting(x.layout, range(x.ndim))):
        return without_rule(
            "numpy.take",
            np.take,
            (x, places),
            {"axis": dim},
            "Let every rank have all of the indices",
        )
    length = x.shape[dim]
    index = places.local
    if mode == "raise":
        if index.size and (index.min() < -length or index.max() >= length):
            raise IndexError(f"index out of bounds for axis {dim} with size {length}")
        index = np.where(index < 0, index + length, index)
    else:
        index = np.clip(index, 0, length - 1) if mode == "clip" else index % length
    layout = _result(x.layout, dim, places.layout)
    axes = x.layout.axes[dim]
    if not axes:
        return delivered(make(np.take(x.local, index, axis=dim), layout), out)
    lo, hi = own_box(x.layout)[dim]
    mine = (index >= lo) & (index < hi)
    part = np.zeros((*x.local.shape[:dim], *index.shape, *x.local.shape[dim + 1 :]), x.dtype)
    part[(slice(None),) * dim + (mine,)] = np.take(x.local, index[mine] - lo, axis=dim)
    combined(part.reshape(-1).view(np.uint8), x.layout.mesh, axes, ReduceOp.BOR)
    return delivered(make(part, layout), out)


def _result(layout: Layout, dim: int, places: Layout) -> Layout:
    return make_layout(
        layout.mesh,
        (*layout.shape[:dim], *places.shape, *layout.shape[dim + 1 :]),
        (*layout.axes[:dim], *places.axes, *layout.axes[dim + 1 :]),
        (*layout.cuts[:dim], *places.cuts, *layout.cuts[dim + 1 :]),
    )
