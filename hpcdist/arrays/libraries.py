"""One row per array library: how to see its memory through NumPy, and how to make a new array.

`library_of` finds the row by ``type(array)``, once per type. Optional libraries are never
imported here: their own file is loaded when one of their arrays first appears.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays.cuda import cuda_library
from hpcdist.arrays.interface import (
    DeviceView as DeviceView,
    Library as Library,
    NumpyArray as NumpyArray,
)
from hpcdist.errors import UsageError
from hpcdist.text import an

Row = TypeVar("Row")


def library_of(array: Any) -> Library:
    """Return the row for `array`, or raise `UsageError` saying what can be sent."""
    cls = type(array)
    return _LIBRARIES.get(cls) or _LIBRARIES.setdefault(cls, _find(array))


def view_of(array: Any) -> NumpyArray:
    """Show an array's memory as one of NumPy, or of its device's library, in its real dtype."""
    view = library_of(array).view(array)
    if type(view) is not DeviceView:
        seen: NumpyArray = view
        return seen
    memory: NumpyArray = view.data if view.data.dtype == view.dtype else view.data.view(view.dtype)
    return memory


def in_kind(like: NumpyArray, array: NumpyArray) -> NumpyArray:
    """Show an array of NumPy's as the subclass that `like` is, with its attributes.

    A memory map is one by its file, in which `array` is not.
    """
    kind = type(like)
    if kind is np.ndarray or isinstance(like, np.memmap):
        return array
    shown: NumpyArray = array.view(kind)
    shown.__array_finalize__(like)
    return shown


def register_library(cls: type, library: Library) -> None:
    """Accept arrays of class `cls`, of a library that hpcdist does not know."""
    _LIBRARIES[cls] = library


def row_of(cls: type, table: Mapping[tuple[str, str], Row]) -> Row | None:
    """Return the row of the first class that `cls` is made of, by its package and its name.

    So a table can speak of classes of optional libraries without importing them.
    """
    for base in cls.__mro__:
        row = table.get((base.__module__.partition(".")[0], base.__name__))
        if row is not None:
            return row
    return None


def _find(array: Any) -> Library:
    cls = type(array)
    if row_of(cls, _MASKED):  # numpy.ma is slow to import: not asked for
        return Library(_from_masked, np.asarray)
    for base in cls.__mro__:
        if base in _LIBRARIES:
            return _LIBRARIES[base]
    own_file = row_of(cls, _OPTIONAL)
    if own_file is not None:
        row: Library = importlib.import_module(own_file).LIBRARY
        return row
    if hasattr(array, "__cuda_array_interface__"):
        return cuda_library()
    if hasattr(array, "__dlpack__"):
        return Library(_from_dlpack, np.asarray)
    if not isinstance(array, str) and _has_buffer(array):
        return Library(_from_memory, np.asarray)
    given = "None" if array is None else an(cls.__name__)
    reducible = isinstance(array, (int, float, complex, dict, list, tuple))
    more = "; dist.all_reduced(x) reduces numbers, dicts and lists" if reducible else ""
    raise UsageError(
        f"{given} is not an array; pass a numpy.ndarray, a torch.Tensor, a jax.Array or "
        "an object with the buffer protocol or DLPack (numpy.asarray(x) makes one), or send it "
        f"with an object collective such as all_gather_object{more}"
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


def _from_dlpack(array: Any) -> Any:
    device_type = array.__dlpack_device__()[0]
    if device_type == _CUDA:
        return cuda_library().view(array)
    if device_type not in _HOST_DEVICES:
        raise UsageError(
            f"this {type(array).__name__} lives on a device that is no CUDA GPU; "
            "copy it to the host first and back afterwards"
        )
    return np.from_dlpack(array)


_CUDA = 2
_HOST_DEVICES = (1, 3, 11, 13)
"""DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged: memory the CPU can address."""

_OPTIONAL = {
    ("torch", "Tensor"): "hpcdist.arrays.torch",
    ("cupy", "ndarray"): "hpcdist.arrays.cupy",
    ("jaxlib", "ArrayImpl"): "hpcdist.arrays.jax",
    ("jax", "Tracer"): "hpcdist.arrays.jax",
    ("jax", "PRNGKeyArray"): "hpcdist.arrays.jax",
}
"""By package and name of a class: the file of the library it belongs to."""

_MASKED = {("numpy", "MaskedArray"): True}

_LIBRARIES: dict[type, Library] = {
    np.ndarray: Library(_from_subclass, np.asarray),
    np.generic: Library(_from_scalar, np.asarray),
}
