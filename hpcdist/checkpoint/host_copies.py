"""Arrays as bytes in host memory; those of a device through a copy there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output
from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import DeviceView, NumpyArray, library_of
from hpcdist.arrays.transfer import await_streams, fill, on_host
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple


class Target(NamedTuple):
    """Memory to be filled; `finish` puts it where it belongs, and returns the array that has it.

    `is_new` says that nothing of the user's is overwritten before `finish`.
    """

    memory: memoryview
    finish: Callable[[], Any]
    is_new: bool


def bytes_of(array: NumpyArray) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data


def look(array: Any, what: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype (in native byte order) and shape of `array`, without touching its data."""
    try:
        view = array if type(array) is np.ndarray else library_of(array).view(array)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    if view.dtype.hasobject:
        raise UsageError(
            f"{what!r} holds Python objects, which cannot be saved; convert it with .astype(...)"
        )
    shape = view.data.shape if isinstance(view, DeviceView) else view.shape
    return dtype_row(view.dtype).numpy, tuple(shape)


def to_read(array: Any, what: str, start: int, stop: int) -> memoryview:
    """Return the bytes of the elements from `start` to before `stop` of `array`, flattened.

    They are its own memory where that is contiguous and the host's.
    """
    buffer = as_buffer(array, what)
    per = buffer.dtype.numpy.itemsize // buffer.data.itemsize
    run = buffer.data.reshape(-1)[start * per : stop * per]
    return bytes_of(run if device_runtime_of(run) is None else on_host(run))


def to_write(array: Any, what: str) -> Target:
    """Return memory of the shape of `array`, to be filled.

    An array that cannot be written, such as JAX's, is replaced by a new one of its library.
    """
    try:
        buffer = as_output(array, what)
    except UsageError:
        return _to_replace(array, as_buffer(array, what))
    if device_runtime_of(buffer.data) is not None:
        return _to_send_up(array, buffer)
    if buffer.home is None:
        return Target(bytes_of(buffer.data), lambda: array, is_new=False)
    buffer = buffer._replace(data=np.empty_like(buffer.data))

    def finish() -> Any:
        buffer.unpack()
        return array

    return Target(bytes_of(buffer.data), finish, is_new=True)


def new_target(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Target:
    """Return memory for a new NumPy array."""
    array = np.empty(shape, dtype)
    return Target(bytes_of(array), lambda: array, is_new=True)


def _to_replace(array: Any, buffer: Buffer) -> Target:
    new = np.empty(buffer.shape, buffer.dtype.numpy)
    return Target(bytes_of(new), lambda: library_of(array).wrap(new), is_new=True)


def _to_send_up(array: Any, buffer: Buffer) -> Target:
    host = np.empty(buffer.data.shape, buffer.data.dtype)

    def finish() -> Any:
        fill(buffer.data, host)
        buffer.unpack()
        engine = device_runtime_of(buffer.data)
        assert engine is not None
        await_streams(engine)
        return array

    return Target(bytes_of(host), finish, is_new=True)
