"""Where pulled rows go: into an array of the caller's, or a new one of the library that it uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.libraries import NumpyArray, library_of, view_of
from hpcdist.arrays.transfer import fill
from hpcdist.errors import UsageError


def room_of(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return the memory of what takes rows, or raise `UsageError`."""
    room = view_of(out)
    if tuple(room.shape) != shape or room.dtype != dtype:
        raise UsageError(
            f"out must be of shape {shape} and dtype {dtype}, got {tuple(room.shape)} and "
            f"{room.dtype}"
        )
    if isinstance(room, np.ndarray) and not room.flags.writeable:
        raise UsageError("out cannot be written to; pass an array that can")
    return room


def rows_in(room: Any, shape: tuple[int, int], dtype: Any) -> NumpyArray:
    """Return an array for rows: the memory of what takes them, if it is contiguous on the host."""
    if isinstance(room, np.ndarray) and room.flags.c_contiguous:
        rows: NumpyArray = room.view().reshape(shape)
        return rows
    return np.empty(shape, dtype)


def as_given(like: Any, found: NumpyArray) -> Any:
    """Return rows as an array of the library, and on the device, of `like`."""
    if isinstance(like, (np.ndarray, list, tuple, range, int, np.generic)):
        return found
    library, view = library_of(like), view_of(like)
    if device_runtime_of(view) is None or library.wrap_device is None:
        return library.wrap(found)
    room = np.empty_like(view, shape=found.shape, dtype=found.dtype)
    fill(room, np.ascontiguousarray(found))
    return library.wrap_device(room, found.dtype)


def put_into(room: Any, found: NumpyArray) -> None:
    """Copy rows into the memory of what takes them."""
    if device_runtime_of(room) is None:
        room[...] = found
    else:
        fill(room, np.ascontiguousarray(found))
