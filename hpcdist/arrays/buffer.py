"""`Buffer`: a contiguous run of memory that stands for a user's array.

`as_buffer` is for arrays that are read, `as_output` for arrays that are written. An array
that is not C-contiguous in native byte order is packed here; `Buffer.unpack` writes the
packed memory back into the user's own array when the operation has ended. Memory of a device is
packed on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays.device import align_streams
from hpcdist.arrays.dtypes import Dtype, dtype_row
from hpcdist.arrays.libraries import DeviceView, NumpyArray, in_kind, library_of
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple


class Buffer(NamedTuple):
    """`data` is C-contiguous and may be handed to MPI; `home` is where `unpack` writes it."""

    array: Any
    data: NumpyArray
    dtype: Dtype
    shape: tuple[int, ...]
    home: NumpyArray | None = None

    def unpack(self) -> None:
        """Copy packed memory back to the user's array; nothing to do for contiguous ones."""
        if self.home is not None:
            alike = self.data.dtype == self.home.dtype
            data = self.data if alike else typed(self.data, self.dtype)
            self.home[...] = data.reshape(self.shape)

    @property
    def finish(self) -> Callable[[Any], None] | None:
        """The `finish` of a call that writes into this one; None where nothing is packed."""
        return None if self.home is None else lambda _: self.unpack()


def as_buffer(array: Any, what: str = "tensor") -> Buffer:
    """View `array` for reading, packed only if it is not contiguous."""
    known = ordinary(array)
    if known is not None:
        return Buffer(array, array, known, array.shape)
    view = array if type(array) is np.ndarray else _view(array, what)
    if type(view) is DeviceView:
        return _on_device(array, view)
    dtype = dtype_row(view.dtype)
    if dtype.plain and view.flags.c_contiguous:
        return Buffer(array, view, dtype, view.shape)
    return _packed(array, view, dtype)


def as_output(array: Any, what: str = "tensor") -> Buffer:
    """View `array` for writing (and reading); a read-only one is a `UsageError`."""
    known = ordinary(array)
    if known is not None:
        return Buffer(array, array, known, array.shape)
    buffer = as_buffer(array, what)
    if not is_writeable(buffer.data) or not is_writeable(buffer.home):
        raise UsageError(
            f"{what} is read-only ({type(array).__name__}, shape {buffer.shape}) but would be "
            f"written; {library_of(array).remedy}"
        )
    return buffer


def is_writeable(data: Any) -> bool:
    """Return whether memory may be written; that of a device always may."""
    return data is None or getattr(data.flags, "writeable", True)


def ordinary(array: Any) -> Dtype | None:
    """Return the dtype row of a writable C-contiguous NumPy array that is its own buffer.

    None for everything else: the quick look of the hot path, before `as_output`.
    """
    if type(array) is _ndarray and array.flags.carray:  # contiguous, aligned and writable
        dtype = _by_identity.get(id(array.dtype)) or _identify(array.dtype)
        if dtype.plain:
            return dtype
    return None


_ndarray = np.ndarray
_by_identity: dict[int, Dtype] = {}
"""Rows of NumPy's own dtype objects, which live as long as NumPy: hashing a dtype is slow."""


def _identify(dtype: np.dtype) -> Dtype:
    row = dtype_row(dtype)
    if dtype.isbuiltin == 1 and dtype is np.dtype(dtype.char):
        _by_identity[id(dtype)] = row
    return row


def is_numpys_own(dtype: np.dtype) -> bool:
    """Return whether `dtype` was met by `ordinary` and lives as long as NumPy: it has an id."""
    return id(dtype) in _by_identity


def typed(data: NumpyArray, dtype: Dtype) -> NumpyArray:
    """Show the memory of a buffer in its real dtype, flat if it travels in a carrier."""
    return data if dtype.carrier is None else data.view(dtype.numpy)


def carried(array: NumpyArray, dtype: Dtype) -> NumpyArray:
    """Show a contiguous array the way buffers keep it: itself, or flat in its carrier dtype."""
    return array if dtype.carrier is None else array.reshape(-1).view(dtype.carrier)


def wrap_like(like: Any, data: NumpyArray, dtype: Dtype, shape: tuple[int, ...]) -> Any:
    """Hand fresh memory over to the library, or subclass of NumPy's, that `like` comes from."""
    if isinstance(like, np.ndarray):
        fresh = typed(data, dtype).reshape(shape)
        return in_kind(like, fresh) if fresh.ndim == like.ndim else fresh
    library = library_of(like)
    if type(data) is not np.ndarray and library.wrap_device is not None:
        return library.wrap_device(data.reshape(shape), dtype.numpy)
    return library.wrap(typed(data, dtype).reshape(shape))


def _view(array: Any, what: str) -> Any:
    try:
        return library_of(array).view(array)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise UsageError(
            f"{what}: this {type(array).__name__} does not show its memory ({error}); pass "
            "numpy.asarray(x)"
        ) from error


def _on_device(array: Any, view: DeviceView) -> Buffer:
    data, dtype = view.data, dtype_row(view.dtype)
    if data.flags.c_contiguous:
        return Buffer(array, data, dtype, data.shape)
    align_streams(data)
    return Buffer(array, data.copy(order="C"), dtype, data.shape, home=data)


def _packed(array: Any, view: NumpyArray, dtype: Dtype) -> Buffer:
    if view.flags.c_contiguous and view.dtype.isnative:
        return Buffer(array, carried(view, dtype), dtype, view.shape)
    dtype = dtype_row(dtype.numpy)  # the same, in native byte order
    packed = view.astype(dtype.numpy, order="C", copy=True)
    return Buffer(array, carried(packed, dtype), dtype, view.shape, home=view)
