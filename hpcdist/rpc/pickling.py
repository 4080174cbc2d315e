"""`pack`, `unpack`: what is called and returned, as a `Parcel`.

Pickle does it where it can. What it cannot (a lambda, a function inside a function) cloudpickle
takes by value; what both can name is named, so that a class is the same class on both sides.

[Note: pieces of a pickle] Pickle keeps arrays beside itself, but `bytes`, `bytearray` and `str` are
in it. It hands large ones to the file that it writes as they are, though, and reads them from a
file into the object that it makes of them. So the pickle is written into a list of pieces; the
large ones travel as buffers, and the rest says where they were. That is how arrays travel, too.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.pickled import out_of_band
from hpcdist.rpc.frames import Parcel
from hpcdist.transport.shm.segment import in_huge_pages


def pack(obj: Any) -> Parcel:
    """Pickle `obj`; large arrays stay beside the pickle, where they are.

    Raises:
        Exception: what pickle raised, if cloudpickle cannot do it either, or is not installed.

    """
    try:
        return _packed(obj, pickle.Pickler, _tensors())
    except Exception as error:
        by_value = _by_value()
        if by_value is None:
            raise _without_cloudpickle(error) from error
        return _packed(obj, by_value)


def unpack(parcel: Parcel) -> Any:
    """Rebuild the object; arrays in it own the received buffers and are writable."""
    whole, buffers = parcel
    if whole[0] != _IN_PIECES:
        return pickle.loads(whole, buffers=buffers)
    pieces = _Pieces(memoryview(whole), buffers)
    file: Any = pieces  # it need not return bytes: the unpickler takes any buffer
    return pickle.Unpickler(file, buffers=pieces.beside).load()


_IN_PIECES = 0
"""What a pickle in pieces begins with; pickles of this protocol begin with 128."""
_COUNT = struct.Struct("<xQ")
_LARGE = 128 << 10
"""Pieces of at least so many bytes are sent as they are. Pickle joins what is below 64 KiB."""


class _Written(list[Any]):
    """A file that keeps what is written to it, in pieces."""

    write = list.append


def _packed(obj: Any, pickler: Any, table: dict[type, Any] | None = None) -> Parcel:
    """Pickle an object; see [Note: pieces of a pickle]."""
    beside: list[memoryview] = []
    written = _Written()
    made = pickler(written, 5, buffer_callback=out_of_band(beside))
    if table is not None:
        made.dispatch_table = table
    made.dump(obj)
    large = [piece for piece in written if len(piece) >= _LARGE]
    if not large:
        return Parcel(b"".join(written) if len(written) > 1 else written[0], beside)
    places, at = [], 0
    for piece in written:
        if len(piece) >= _LARGE:
            places.append(at)
        else:
            at += len(piece)
    small = [piece for piece in written if len(piece) < _LARGE]
    head = [_COUNT.pack(len(large)), struct.pack(f"<{len(large)}Q", *places)]
    return Parcel(b"".join([*head, *small]), [*(memoryview(each) for each in large), *beside])


@final
class _Pieces:
    """The file that an `Unpickler` reads: a pickle, and its large pieces at their places."""

    def __init__(self, whole: memoryview, buffers: Sequence[Any]) -> None:
        (count,) = _COUNT.unpack_from(whole)
        places = struct.unpack_from(f"<{count}Q", whole, _COUNT.size)
        small = whole[_COUNT.size + 8 * count :]
        self.beside = buffers[count:]
        self._pieces: list[memoryview] = []
        for begin, end, large in zip((0, *places), places, buffers, strict=False):
            self._pieces += [small[begin:end], memoryview(large).cast("B")]
        self._pieces.append(small[places[-1] if places else 0 :])
        self._pieces.reverse()

    def read(self, nbytes: int) -> memoryview | bytes:
        """Return so many bytes, as they are where they are all of one piece."""
        taken = self._take(nbytes)
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def readinto(self, target: Any) -> int:
        view, at = memoryview(target).cast("B"), 0
        if len(view) >= _LARGE:  # a new object, whose pages cost more than what is copied into them
            in_huge_pages(np.frombuffer(view, np.uint8))
        for piece in self._take(len(view)):
            view[at : at + len(piece)] = piece
            at += len(piece)
        return at

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("lines are of protocols that ranks do not use")

    def _take(self, nbytes: int) -> list[memoryview]:
        taken = []
        while nbytes and self._pieces:
            piece = self._pieces.pop()
            if len(piece) > nbytes:
                self._pieces.append(piece[nbytes:])
                piece = piece[:nbytes]
            taken.append(piece)
            nbytes -= len(piece)
        return taken


def _tensors() -> dict[type, Any] | None:
    """Return what else pickles tensors of torch than torch, which copies them; None without it."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is None:
        return None
    if kind not in _table:
        from hpcdist.arrays.torch import reduce_tensor

        _table.update(copyreg.dispatch_table)
        _table[kind] = reduce_tensor
    return _table


_table: dict[type, Any] = {}


def _without_cloudpickle(error: Exception) -> Exception:
    return type(error)(
        f"{error}; functions and classes that have no name in a module need cloudpickle: "
        "pip install 'hpcdist[rpc]'"
    )


@functools.cache
def _by_value() -> Any:
    """Return the pickler of what has no name, or None."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return None

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        """Takes by value only what has no name, also in the program's own module."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and _has_name(obj):
                return NotImplemented
            return super().reducer_override(obj)

    return ByValue


def _has_name(obj: Any) -> bool:
    """Return whether a function or a class is one of the program itself, by its name there."""
    if getattr(obj, "__module__", None) != "__main__":
        return False
    found: Any = sys.modules.get("__main__")
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj
