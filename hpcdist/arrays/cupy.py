"""CuPy arrays, and through them all arrays in CUDA memory; the `DeviceRuntime` of a CUDA device.

Arrays of other libraries are seen by their pointer and not by DLPack, which would make one of
the streams wait: who waits for what is settled once per operation, by events.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, final

import cupy
import numpy as np
from cupy.cuda import Event, Stream, runtime

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.interface import DeviceRuntime, DeviceView, Library, NumpyArray
from hpcdist.errors import TransportError


def adopt(
    pointer: int,
    device: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype,
    owner: Any,
) -> DeviceView:
    """See memory that `owner` keeps alive; `strides` are in bytes, `dtype` is the real one."""
    carrier = dtype_row(dtype).carrier or dtype
    span = sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    nbytes = 0 if 0 in shape else span + dtype.itemsize
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, nbytes, owner, device), 0)
    return DeviceView(cupy.ndarray(shape, carrier, memory, strides), dtype)


def _view(array: Any) -> DeviceView:
    if not isinstance(array, cupy.ndarray):
        array = _asarray(array)
    dtype = array.dtype
    carrier = dtype_row(dtype).carrier
    return DeviceView(array if carrier is None else array.view(carrier), dtype)


def _asarray(array: Any) -> Any:
    if hasattr(array, "__cuda_array_interface__"):
        return cupy.asarray(array)
    return cupy.from_dlpack(array)


def _wrap_device(data: Any, dtype: np.dtype) -> Any:
    return data if data.dtype == dtype else data.view(dtype)


@final
class CudaRuntime(DeviceRuntime):
    """A CUDA device by its number in this process."""

    failures = (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, MemoryError)

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self._device = cupy.cuda.Device(number)

    def current_streams(self) -> tuple[Any, ...]:
        """Return CuPy's current stream, and torch's if it is another one."""
        own = cupy.cuda.get_current_stream(self._device.id)
        torch = _torch()
        theirs = None if torch is None else torch.cuda.current_stream(self._device.id)
        if theirs is None or theirs.cuda_stream == own.ptr:
            return (own,)
        return own, _foreign(theirs)

    def new_stream(self) -> Any:
        """Make a stream of the highest priority."""
        with self._device:
            return Stream(non_blocking=True, priority=_FIRST)

    def use(self) -> None:
        """Do cudaSetDevice."""
        self._device.use()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make device and stream the current ones."""
        return _on(self._device, stream)

    def record(self, stream: Any) -> Any:
        """Record an event that does not measure time."""
        with self._device:
            event = Event(block=False, disable_timing=True)
            event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        """Do cudaStreamWaitEvent."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Do cudaEventQuery; raise what the device has failed with."""
        status = runtime.eventQuery(event.ptr)  # `Event.done` takes a failure for "not yet"
        if status not in (_SUCCESS, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == _SUCCESS)

    def is_capturing(self, stream: Any) -> bool:
        """Do cudaStreamIsCapturing; the default stream cannot capture."""
        return stream.ptr > _PER_THREAD_STREAM and bool(stream.is_capturing())

    def address(self, array: Any) -> int:
        """Return the pointer."""
        return int(array.data.ptr)

    def copy_to_host(self, source: Any, target: NumpyArray, stream: Any) -> None:
        """Do cudaMemcpyAsync."""
        way = runtime.memcpyDeviceToHost
        self._copy(target.ctypes.data, source.data.ptr, source.nbytes, way, stream)

    def copy_to_device(self, source: NumpyArray, target: Any, stream: Any) -> None:
        """Do cudaMemcpyAsync."""
        way = runtime.memcpyHostToDevice
        self._copy(target.data.ptr, source.ctypes.data, source.nbytes, way, stream)

    def _copy(self, to: int, start: int, nbytes: int, way: int, stream: Any) -> None:
        if nbytes:
            with self._device:
                runtime.memcpyAsync(to, start, nbytes, way, stream.ptr)

    def pin(self, memory: NumpyArray) -> bool:
        """Do cudaHostRegister, portable to all contexts."""
        try:
            with self._device:
                runtime.hostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        except runtime.CUDARuntimeError:  # `ulimit -l`, or memory that cannot be locked
            return False
        return True

    def unpin(self, memory: NumpyArray) -> None:
        """Do cudaHostUnregister."""
        with self._device:
            runtime.hostUnregister(memory.ctypes.data)


@contextmanager
def _on(device: Any, stream: Any) -> Iterator[None]:
    """Make device and stream the current ones of CuPy and, if it is in use, of torch."""
    torch = _torch()
    with device, stream:
        if torch is None:
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device=device.id)):
                yield


def _foreign(stream: Any) -> Any:
    """Return a stream of torch's as one of CuPy's, which does not own it."""
    if hasattr(Stream, "from_external"):
        return Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)  # CuPy before 14


def _torch() -> Any:
    """Return torch, if this process uses it on GPUs."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


@cache
def _engine(number: int) -> CudaRuntime:
    return CudaRuntime(number)


def _device_runtime_of(data: Any) -> CudaRuntime:
    return _engine(data.device.id)


def current_runtime() -> CudaRuntime:
    """Return the engine of this thread's current device.

    Raises:
        TransportError: there is no usable GPU.

    """
    try:
        return _engine(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise TransportError(f"there is no usable GPU: {error}") from error


_PORTABLE = 1
"""cudaHostRegisterPortable."""

_FIRST = -100
"""A priority above all that devices have: CUDA takes the highest there is."""

_SUCCESS, _NOT_READY = 0, 600
"""cudaSuccess and cudaErrorNotReady."""

_PER_THREAD_STREAM = 2
"""Handles up to this one are CUDA's default streams."""

LIBRARY = Library(_view, cupy.asarray, engine=_device_runtime_of, wrap_device=_wrap_device)
