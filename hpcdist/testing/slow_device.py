"""A device made of host memory that completes late: for tests of what is done around a device.

Everything put on a stream runs on the stream's own thread after a short random pause, so whoever
forgets to wait for an event reads old numbers. It says nothing about real GPUs or NCCL.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import numpy as np

from hpcdist.arrays.device import DeviceRuntime
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import DeviceView, Library, NumpyArray, register_library
from hpcdist.named_tuple import NamedTuple


class Flags(NamedTuple):
    """What CuPy's flags say; there is no ``writeable``."""

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


@final
class SlowArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array whose memory only the device touches: all arithmetic waits for its stream.

    It has what CuPy's has of NumPy's: the functions of NEP 13 and NEP 18, for arrays on the device
    and for numbers. Reductions stay on the device, and NumPy gets no numbers of it unasked.
    """

    def __init__(self, memory: NumpyArray) -> None:
        self.memory = memory

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        DEVICE.arrive()
        _refuse(options.keys() & _UNKNOWN)
        if function in _LIKE and not options.get("shape", True):
            options = {name: value for name, value in options.items() if name != "shape"}  # CuPy 14
        return _on_device(function(*_bare(args), **_bare(options)))

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        DEVICE.arrive()
        _refuse({method} - {"__call__"})
        result = ufunc(*_bare(given), **_bare(options))
        return options["out"][0] if "out" in options else _on_device(result)

    # ---- what is known without waiting

    shape = property(lambda self: self.memory.shape)
    strides = property(lambda self: self.memory.strides)
    dtype = property(lambda self: self.memory.dtype)
    ndim = property(lambda self: self.memory.ndim)
    size = property(lambda self: self.memory.size)
    nbytes = property(lambda self: self.memory.nbytes)
    itemsize = property(lambda self: self.memory.itemsize)
    real = property(lambda self: SlowArray(self.memory.real))
    base = property(lambda self: None if self.memory.base is None else SlowArray(self.memory.base))
    T = property(lambda self: SlowArray(self.memory.T))

    @property
    def flags(self) -> Flags:
        flags = self.memory.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, flags.owndata)

    def __len__(self) -> int:
        return len(self.memory)

    def view(self, dtype: Any) -> Any:
        """See the memory in another dtype; as `numpy.ndarray`, for whoever plays the device."""
        return self.memory if dtype is np.ndarray else SlowArray(self.memory.view(dtype))

    def reshape(self, *shape: Any) -> SlowArray:
        if not self.flags.c_contiguous:  # a copy
            DEVICE.arrive()
        return SlowArray(self.memory.reshape(*shape))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, SlowArray):
            DEVICE.arrive()
        return _on_device(self.memory[_bare(key)])

    # ---- work on the device

    def __setitem__(self, key: Any, value: Any) -> None:
        DEVICE.arrive()
        self.memory[_bare(key)] = _bare(value)

    def fill(self, value: Any) -> None:
        DEVICE.arrive()
        self.memory.fill(value)

    def copy(self, order: Any = "C") -> SlowArray:
        DEVICE.arrive()
        return SlowArray(self.memory.copy(order))

    def astype(self, dtype: Any, order: Any = "K", *, copy: bool = True) -> SlowArray:
        DEVICE.arrive()
        return SlowArray(self.memory.astype(dtype, order, copy=copy))

    def sum(self, axis: Any = None, dtype: Any = None) -> Any:
        return np.sum(self, axis=axis, dtype=dtype)

    def max(self, axis: Any = None) -> Any:
        return np.max(self, axis=axis)

    def all(self, axis: Any = None) -> Any:
        return np.all(self, axis=axis)

    def any(self, axis: Any = None) -> Any:
        return np.any(self, axis=axis)

    # ---- numbers for the host, which waits for them

    def tolist(self) -> Any:
        return DEVICE.numbers_here(self).tolist()

    def item(self) -> Any:
        return DEVICE.numbers_here(self).item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())


_LIKE = (np.empty_like, np.zeros_like, np.ones_like)
_UNKNOWN = {"initial", "subok"}
"""Arguments of NumPy's functions that CuPy's do not take."""


def _refuse(unknown: Iterable[str]) -> None:
    if unknown:
        raise TypeError(f"CuPy has no {', '.join(unknown)} here")


def _bare(value: Any) -> Any:
    """Return arguments with the memory of arrays in place of arrays; none may be NumPy's."""
    if isinstance(value, SlowArray):
        return value.memory
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_bare, value))
    return value


def _on_device(result: Any) -> Any:
    """Return the results of a function where CuPy leaves them: numbers are arrays, too."""
    if isinstance(result, (np.ndarray, np.generic)):
        return SlowArray(np.asarray(result))
    return type(result)(map(_on_device, result)) if type(result) in (list, tuple) else result


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
class SlowDevice(DeviceRuntime):
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
        return SlowArray(made)

    def numbers(self, array: Any) -> NumpyArray:
        """Return what the array holds when the current stream has come to this point."""
        self._drain(self.current)
        return np.array(array.memory)

    def numbers_here(self, array: SlowArray) -> NumpyArray:
        """Return what the array holds when the stream of this thread has come to this point."""
        self.arrive()
        return np.array(array.memory)

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
        return int(array.memory.ctypes.data)

    def copy_to_host(self, source: Any, target: NumpyArray, stream: Any) -> None:
        stream.put(lambda: np.copyto(target, source.memory))

    def copy_to_device(self, source: NumpyArray, target: Any, stream: Any) -> None:
        stream.put(lambda: np.copyto(target.memory, source))

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


def _wrap(array: Any) -> Any:
    return array if isinstance(array, SlowArray) else DEVICE.array(array)


def _wrap_device(data: Any, dtype: np.dtype) -> Any:
    return data.view(dtype)


DEVICE = SlowDevice()
register_library(
    SlowArray, Library(_view, _wrap, engine=lambda _: DEVICE, wrap_device=_wrap_device)
)
