"""One row per array library: how to see its memory through NumPy, and how to make a new array.

`library_of` finds the row by ``type(array)``, once per type. Optional libraries are never
imported here: their own file is loaded when one of their arrays first appears.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdist.errors import UsageError

NumpyArray = np.ndarray[Any, Any]


class Library(NamedTuple):
    """`view` shows an array's own memory; `wrap` turns a fresh NumPy array into the library's.

    `remedy` is for messages: what to do about an array that cannot be written.
    """

    view: Callable[[Any], NumpyArray]
    wrap: Callable[[NumpyArray], Any]
    remedy: str = "pass a writable copy, for example numpy.array(x)"


def library_of(array: Any) -> Library:
    """Return the row for `array`, or raise `UsageError` saying what can be sent."""
    cls = type(array)
    return _LIBRARIES.get(cls) or _LIBRARIES.setdefault(cls, _find(array))


def _find(array: Any) -> Library:
    cls = type(array)
    for base in cls.__mro__:
        if base in _LIBRARIES:
            return _LIBRARIES[base]
        module = base.__module__.partition(".")[0]
        if base.__name__ == "MaskedArray" and module == "numpy":
            return Library(_from_masked, np.asarray)  # numpy.ma is slow to import: not asked for
        own_file = _OPTIONAL.get((module, base.__name__))
        if own_file is not None:
            row: Library = importlib.import_module(own_file).LIBRARY
            return row
    if hasattr(array, "__cuda_array_interface__"):
        return Library(_refuse_device, np.asarray)
    if hasattr(array, "__dlpack__"):
        return Library(_from_dlpack, np.asarray)
    if not isinstance(array, str) and _has_buffer(array):
        return Library(_from_memory, np.asarray)
    raise UsageError(
        f"a {cls.__name__} is not an array; pass a numpy.ndarray, a torch.Tensor, a jax.Array or "
        "an object with the buffer protocol or DLPack (numpy.asarray(x) makes one), or send it "
        "with an object collective such as all_gather_object"
    )


def _has_buffer(array: Any) -> bool:
    try:
        memoryview(array).release()
    except TypeError:
        return False
    return True


def _from_subclass(array: NumpyArray) -> NumpyArray:
    return np.asarray(array)


def _from_masked(array: Any) -> NumpyArray:
    raise UsageError(
        "a numpy masked array would lose its mask; send array.filled(value), or the .data and "
        ".mask arrays one after the other"
    )


def _from_scalar(value: np.generic) -> NumpyArray:
    array = np.asarray(value)
    array.flags.writeable = False
    return array


def _from_memory(array: Any) -> NumpyArray:
    return np.asarray(memoryview(array))


def _from_dlpack(array: Any) -> NumpyArray:
    device_type = array.__dlpack_device__()[0]
    if device_type not in _HOST_DEVICES:
        _refuse_device(array)
    return np.from_dlpack(array)


def _refuse_device(array: Any) -> NumpyArray:
    raise UsageError(device_message(type(array).__name__))


def device_message(kind: str) -> str:
    """Say why an array in GPU memory is refused and what to do instead."""
    return (
        f"this {kind} lives in GPU memory, which no transport of this installation can reach; "
        "copy it to the host first (cupy.asnumpy(x), tensor.cpu()) and back afterwards"
    )


_HOST_DEVICES = (1, 3, 11, 13)
"""DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged: memory the CPU can address."""

_OPTIONAL = {
    ("torch", "Tensor"): "hpcdist.arrays.torch",
    ("jaxlib", "ArrayImpl"): "hpcdist.arrays.jax",
    ("jax", "Tracer"): "hpcdist.arrays.jax",
    ("jax", "PRNGKeyArray"): "hpcdist.arrays.jax",
}
"""By package and name of a class: the file of the library it belongs to."""

_LIBRARIES: dict[type, Library] = {
    np.ndarray: Library(_from_subclass, np.asarray),
    np.generic: Library(_from_scalar, np.asarray),
}
