"""Room for this rank's part of an array: memory that the ranks of the node share, or a device's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty
from hpcdist.mesh.layout import Layout

SHARED_FROM = 1 << 18
"""Bytes from which memory of the node's heap pays: what is cut from it, others read in place."""


def room_for(layout: Layout, like: Any, dtype: Any = None, group: Group | None = None) -> Any:
    """Return new memory for this rank's part, any contents, where `like` is and of its dtype.

    On a rank outside the mesh it is empty. Large memory is shared by the ranks of `group`, None
    for all, if they are on one node.
    """
    return room_of(shape_here(layout), like, dtype, group)


def shape_here(layout: Layout) -> tuple[int, ...]:
    """Return the shape of this rank's part."""
    here = layout.mesh.coordinate
    return (0,) * max(1, len(layout.shape)) if here is None else layout.local_shape(here)


def room_of(
    shape: tuple[int, ...], like: Any, dtype: Any = None, group: Group | None = None
) -> Any:
    """Return the memory of `room_for` for a part of this shape."""
    dtype = like.dtype if dtype is None else dtype
    if type(like) is not np.ndarray:
        return np.empty_like(like, dtype=dtype, shape=shape)
    nbytes = math.prod(shape) * dtype.itemsize
    return np.empty(shape, dtype) if nbytes < SHARED_FROM else empty(shape, dtype, group)
