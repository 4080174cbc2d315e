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
from hpcdist.arrays.libraries import library_of


def align_streams(data: DeviceArray) -> None:
    """Do `DeviceRuntime.align` for the device of `data`; nothing in host memory."""
    if type(data) is np.ndarray:
        return
    engine = device_runtime_of(data)
    if engine is not None:
        engine.align()


def on_device(data: Any) -> bool:
    """Say whether the memory of a buffer is on a device."""
    return data is not None and type(data) is not np.ndarray and device_runtime_of(data) is not None


def device_runtime_of(data: DeviceArray) -> DeviceRuntime | None:
    """Return the engine of the device that holds the memory of a buffer; None for the host."""
    find = library_of(data).engine
    return None if find is None else find(data)
