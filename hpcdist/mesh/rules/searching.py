"""Places in a sorted array.

Where every rank has the needles, each counts in its part, and the counts are added. Needles that
are cut as the sorted array is go to the rank that has their place, and their places come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.rules.basis import (
    as_dist,
    combined,
    cutting,
    make,
    mesh_of,
    own_box,
    result_array,
)
from hpcdist.mesh.rules.dividing import told, traded
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.taking import apart, take
from hpcdist.transport.call.reduction import ReduceOp


@rule("searchsorted", method=True)
def searchsorted(a: Any, v: Any, side: Any = "left", sorter: Any = None) -> Any:
    """Return where elements belong in a sorted array of one dimension, before or after equals.

    Args:
        a: the array.
        v: what to look for, of any shape.
        side: "left": before equal elements; "right": after them.
        sorter: the indices that sort the array, if it is not sorted.

    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    if np.ndim(a) != 1:
        raise ValueError(f"the sorted array must have one dimension, got {np.ndim(a)}")
    mesh = mesh_of(a, v, sorter)
    ours, needles = as_dist(a, mesh), as_dist(v, mesh)
    if sorter is not None:
        ours = take(ours, sorter, axis=0)
    needles, axes = apart(needles, ours.layout, 0), ours.layout.axes[0]
    if {*axes}.intersection(cutting(needles.layout, range(needles.ndim))):
        return make(_asked(ours, needles.local, side), needles.layout)
    places = result_array(np.searchsorted(ours.local, needles.local, side))
    return make(combined(places, mesh, axes, ReduceOp.SUM), needles.layout)


def _asked(ours: DistArray, needles: Any, side: Any) -> Any:
    """Return the places of needles of which each rank has others."""
    layout, part, flat = ours.layout, ours.local, needles.reshape(-1)
    lengths = told(np.array([part.size, flat.size]), layout)
    # The first elements of the parts that have any say where needles belong: to the last part
    # whose first element is less (or equal), all parts before which have nothing larger.
    first = part[:1] if part.size else np.zeros(1, part.dtype)
    filled = np.flatnonzero(lengths[:, 0])
    if not filled.size:
        return np.zeros(needles.shape, np.intp)
    bounds = told(first, layout)[filled, 0]
    owner = filled[np.maximum(np.searchsorted(bounds, flat, side) - 1, 0)]
    order = np.argsort(owner, kind="stable")
    counts = told(np.bincount(owner, minlength=len(lengths)), layout)
    received = traded(flat[order], counts, layout)
    ((lo, _),) = own_box(layout)
    places = np.empty(flat.size, np.intp)
    places[order] = traded(np.searchsorted(part, received, side) + lo, counts.T, layout)
    return places.reshape(needles.shape)
