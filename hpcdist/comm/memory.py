"""`empty`, `zeros`, `empty_like`: arrays made for communication.

They are ordinary NumPy arrays, in memory that the ranks of a node share: a collective on them
reads and writes them where they are.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group

Shape = int | tuple[int, ...]


def empty(
    shape: Shape, dtype: npt.DTypeLike = np.float64, group: Group | None = None
) -> NumpyArray:
    """Return a new array with any contents, for collectives of `group`. Local.

    Args:
        shape: its shape.
        dtype: anything NumPy takes as a dtype of fixed size.
        group: the ranks it will be communicated with; None for all.

    The memory of all such arrays of a process is bounded by ``HPCDIST_SHARED_HEAP_MB``; it is
    used again when an array and all views of it are gone. Where it is used up, or does not
    exist (simulated ranks, a single rank), the array is an ordinary one.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = dist.empty((2, 3))
        >>> x[:] = 1.0
        >>> _ = dist.all_reduce(x)

    """
    transport = resolve_group(group).transport
    dtype = np.dtype(dtype)
    dtype_row(dtype)
    if transport is not None:
        sizes = (shape,) if hasattr(shape, "__index__") else shape
        room = transport.empty(math.prod(map(operator.index, sizes)) * dtype.itemsize)
        if room is not None:
            return room.view(dtype).reshape(shape)
    return np.empty(shape, dtype)


def zeros(
    shape: Shape, dtype: npt.DTypeLike = np.float64, group: Group | None = None
) -> NumpyArray:
    """Return a new array of zeros, for collectives of `group`. Local; see `empty`.

    Args:
        shape: its shape.
        dtype: anything NumPy takes as a dtype of fixed size.
        group: the ranks it will be communicated with; None for all.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> dist.zeros(3)
        array([0., 0., 0.])

    """
    array = empty(shape, dtype, group)
    array.fill(0)
    return array


def empty_like(array: Any, group: Group | None = None) -> NumpyArray:
    """Return a new NumPy array of the shape and dtype of `array`. Local; see `empty`.

    Args:
        array: an array of any library; its contents are not copied.
        group: the ranks it will be communicated with; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> gradients = np.ones((2, 3), dtype=np.float32)
        >>> shared = dist.empty_like(gradients)
        >>> shared.shape, shared.dtype
        ((2, 3), dtype('float32'))

    """
    view = array if type(array) is np.ndarray else view_of(array)
    return empty(view.shape, view.dtype, group)


def empty_near(like: NumpyArray, size: int, group: Group | None = None) -> NumpyArray:
    """Return new flat memory like that of `view_of`: on its device, or as `empty`. Local."""
    if type(like) is np.ndarray:
        return empty(size, like.dtype, group)
    return np.empty_like(like, shape=(size,))
