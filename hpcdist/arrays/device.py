"""Which device holds an array, and its streams; `DeviceRuntime` is what a device can do."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.arrays.interface import (
    DeviceArray as DeviceArray,
    DeviceRuntime as DeviceRuntime,
    Event as Event,
    Stream as Stream,
)
from hpcdist.arrays.libraries import NumpyArray, library_of


def align_streams(data: DeviceArray) -> None:
    """Call `DeviceRuntime.align` for the device of `data`; no-op in host memory."""
    if type(data) is np.ndarray:
        return
    engine = device_runtime_of(data)
    if engine is not None:
        engine.align()


def on_device(data: Any) -> bool:
    """Return whether the memory of a buffer is on a device."""
    return data is not None and type(data) is not np.ndarray and device_runtime_of(data) is not None


def on_host(data: Any) -> NumpyArray:
    """Return an array, or what a device's array holds, copied."""
    return data if isinstance(data, np.ndarray) else data.get()


def where_is(like: Any, values: NumpyArray) -> Any:
    """Return values in the memory of an array, which may be that of a device."""
    if isinstance(like, (np.ndarray, np.generic)):
        return values
    room = np.empty_like(like, dtype=values.dtype, shape=(values.size,))  # CuPy ignores ()
    room.set(values.reshape(-1))
    return room.reshape(values.shape)


def device_runtime_of(data: DeviceArray) -> DeviceRuntime | None:
    """Return the engine of the device that holds the memory of a buffer; None for the host."""
    find = library_of(data).engine
    return None if find is None else find(data)
