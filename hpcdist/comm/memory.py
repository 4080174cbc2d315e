"""`empty`, `zeros`, `empty_like`: arrays made for communication.

They are ordinary NumPy arrays, made where the group's transport moves data best.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, library_of
from hpcdist.comm.group import Group
from hpcdist.comm.session import group_at_hand

Shape = int | tuple[int, ...]


def empty(
    shape: Shape, dtype: npt.DTypeLike = np.float64, group: Group | None = None
) -> NumpyArray:
    """Return a new array with any contents, for collectives of `group`. Local.

    Args:
        shape: its shape.
        dtype: anything NumPy takes as a dtype of fixed size.
        group: the ranks it will be communicated with; None for all.

    """
    group_at_hand(group)
    dtype_row(np.dtype(dtype))
    return np.empty(shape, dtype)


def zeros(
    shape: Shape, dtype: npt.DTypeLike = np.float64, group: Group | None = None
) -> NumpyArray:
    """Return a new array of zeros, for collectives of `group`. Local; see `empty`."""
    array = empty(shape, dtype, group)
    array.fill(0)
    return array


def empty_like(array: Any, group: Group | None = None) -> NumpyArray:
    """Return a new NumPy array of the shape and dtype of `array`. Local; see `empty`."""
    view = array if isinstance(array, np.ndarray) else library_of(array).view(array)
    return empty(view.shape, view.dtype, group)
