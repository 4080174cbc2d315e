"""A device made of host memory that completes late: for tests of what is done around a device.

Everything put on a stream runs on the stream's own thread after a short random pause, so whoever
forgets to wait for an event reads old numbers. It says nothing about real GPUs or NCCL.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import numpy as np

from hpcdist.arrays.device import Engine
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import DeviceView, Library, NumpyArray, register_library


class SlowArray(np.ndarray):
    """An array whose memory only the device touches: all arithmetic waits for its stream."""

    def __array_function__(self, *args: Any) -> Any:
        DEVICE.arrive()
        return super().__array_function__(*args)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        DEVICE.arrive()
        bare = [each.view(np.ndarray) if type(each) is SlowArray else each for each in given]
        out = options.pop("out", (None,))[0]
        if out is not None:
            options["out"] = out.view(np.ndarray)
        result = getattr(ufunc, method)(*bare, **options)
        return out if out is not None else np.asarray(result).view(SlowArray)

    def __setitem__(self, key: Any, value: Any) -> None:
        DEVICE.arrive()
        super().__setitem__(key, value)

    def copy(self, order: Any = "C") -> Any:
        DEVICE.arrive()
        return super().copy(order)

    def astype(self, *args: Any, **options: Any) -> Any:
        DEVICE.arrive()
        return super().astype(*args, **options)


@final
class SlowStream:
    """Runs jobs in order on a thread of its own."""

    def __init__(self, longest_pause_s: float) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._pause_s = longest_pause_s
        self._random = random.Random(1)
        threading.Thread(target=self._serve, name="slow-stream", daemon=True).start()

    def put(self, job: Callable[[], Any]) -> None:
        """Run `job` after what was put before."""
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            time.sleep(self._random.random() * self._pause_s)
            job()


@final
class SlowDevice(Engine):
    """The engine of `SlowArray`; `current` is the one current stream of all threads."""

    name = "slow:0"
    failures = (OSError,)

    def __init__(self, longest_pause_s: float = 1e-3, *, can_pin: bool = True) -> None:
        self._pause_s, self._can_pin = longest_pause_s, can_pin
        self.current = self.new_stream()
        self._here = threading.local()
        self.pinned: list[int] = []

    def array(self, values: Any) -> Any:
        """Return a new array whose numbers arrive late, on the current stream.

        An array that is not contiguous becomes one that is not contiguous either.
        """
        given = np.array(values, values.dtype.newbyteorder("="), order="K", copy=True)
        gaps = 1 if values.flags.c_contiguous else 2
        room = (
            np.zeros((*given.shape[:-1], given.shape[-1] * gaps), given.dtype)
            if gaps > 1
            else (np.zeros_like(given, order="C"))
        )
        made = room[..., ::gaps] if gaps > 1 else room
        self.current.put(lambda: np.copyto(made, given))
        return made.view(SlowArray)

    def numbers(self, array: Any) -> NumpyArray:
        """Return what the array holds when the current stream has come to this point."""
        self._drain(self.current)
        return np.array(array.view(np.ndarray))

    def arrive(self) -> None:
        """Wait until the stream that is current in this thread has come to this point."""
        self._drain(getattr(self._here, "stream", self.current))

    def _drain(self, stream: SlowStream) -> None:
        event = self.record(stream)
        event.wait()

    # ---- Engine

    def current_streams(self) -> tuple[Any, ...]:
        return (self.current,)

    def new_stream(self) -> SlowStream:
        return SlowStream(self._pause_s)

    def use(self) -> None:
        pass

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        @contextmanager
        def block() -> Iterator[None]:
            self._here.stream = stream
            try:
                yield
            finally:
                del self._here.stream

        return block()

    def record(self, stream: Any) -> threading.Event:
        event = threading.Event()
        stream.put(event.set)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.put(event.wait)

    def is_done(self, event: Any) -> bool:
        return bool(event.is_set())

    def is_capturing(self, stream: Any) -> bool:
        return False

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def copy_to_host(self, source: Any, target: NumpyArray, stream: Any) -> None:
        stream.put(lambda: np.copyto(target, source.view(np.ndarray)))

    def copy_to_device(self, source: NumpyArray, target: Any, stream: Any) -> None:
        stream.put(lambda: np.copyto(target.view(np.ndarray), source))

    def pin(self, memory: NumpyArray) -> bool:
        if self._can_pin:
            self.pinned.append(memory.ctypes.data)
        return self._can_pin

    def unpin(self, memory: NumpyArray) -> None:
        self.pinned.remove(memory.ctypes.data)


def _view(array: Any) -> DeviceView:
    carrier = dtype_row(array.dtype).carrier
    return DeviceView(array if carrier is None else _in_carrier(array, carrier), array.dtype)


def _in_carrier(array: Any, carrier: np.dtype) -> Any:
    return array.view(carrier)


def _wrap_device(data: Any, dtype: np.dtype) -> Any:
    return data.view(dtype)


DEVICE = SlowDevice()
register_library(
    SlowArray, Library(_view, np.asarray, engine=lambda _: DEVICE, wrap_device=_wrap_device)
)
