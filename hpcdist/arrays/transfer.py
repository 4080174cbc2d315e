"""Transfer: numbers taken from a device to the host and back, complete when the function returns.

For what one rank needs at once: norms, states, checkpoints. Collectives have faster ways.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcdist.arrays.device import DeviceArray, DeviceRuntime, align_streams, device_runtime_of
from hpcdist.arrays.libraries import NumpyArray, view_of


def on_host(data: NumpyArray | DeviceArray) -> NumpyArray:
    """Return a copy of what `view_of` shows, in memory of the host."""
    engine = device_runtime_of(data)
    if engine is None:
        return np.array(data, order="C")
    if not data.flags.c_contiguous:
        align_streams(data)
        data = data.copy(order="C")
    host, stream = np.empty(data.shape, data.dtype), _joined_stream(engine)
    engine.copy_to_host(data, host, stream)
    _wait(engine, stream)
    return host


def fill(target: DeviceArray, source: NumpyArray) -> None:
    """Copy memory of the host into contiguous memory of a device, of the same shape and dtype."""
    engine = device_runtime_of(target)
    assert engine is not None
    stream = _joined_stream(engine)
    engine.copy_to_device(source, target, stream)
    _wait(engine, stream)


def near(like: NumpyArray | DeviceArray, given: Any) -> NumpyArray | DeviceArray:
    """Show an array, or a nest of numbers, in the kind of memory that `like` is in.

    That is its own memory if it is there already, else a copy in the dtype of `like`.
    """
    seen = np.asarray(given) if isinstance(given, _NUMBERS) else view_of(given)
    here, there = device_runtime_of(like), device_runtime_of(seen)
    if here is there:
        return seen
    if there is not None:
        seen = on_host(seen)
    if here is None:
        return seen
    room = np.empty_like(like, shape=(seen.size,))  # CuPy takes () for "as like"
    fill(room, np.ascontiguousarray(seen.reshape(-1), like.dtype))
    return room.reshape(seen.shape)


def host_numbers(values: Iterable[Any]) -> list[float]:
    """Return numbers, of which some may be on a device yet; the host waits for them once."""
    given = list(values)
    late = [index for index, value in enumerate(given) if not isinstance(value, _NUMBERS)]
    if late:
        found = on_host(np.stack([given[index] for index in late]))
        for index, number in zip(late, found, strict=True):
            given[index] = number
    return list(map(float, given))


def await_streams(engine: DeviceRuntime) -> None:
    """Block the host until all work queued on a device so far is done."""
    _wait(engine, _joined_stream(engine))


def _joined_stream(engine: DeviceRuntime) -> Any:
    """Return a stream that goes on when all that was computed so far is complete."""
    first, *others = engine.current_streams()
    for other in others:
        engine.wait_event(first, engine.record(other))
    return first


def _wait(engine: DeviceRuntime, stream: Any) -> None:
    event = engine.record(stream)
    while not engine.is_done(event):
        time.sleep(_PAUSE_S)


_PAUSE_S = 2e-5

_NUMBERS = (int, float, complex, np.generic, list, tuple)
"""What holds numbers of the host without being an array."""
