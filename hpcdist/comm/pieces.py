"""`in_pieces`, `from_pieces`: a pickle whose large values, of whatever kind, lie beside it.

[Note: pieces of a pickle] Pickle keeps arrays beside itself, but `bytes`, `bytearray` and `str` are
in it. It hands large ones to the file that it writes as they are, though, and reads them from a
file into the object that it makes of them. So the pickle is written into a list of pieces; the
large ones travel as buffers, and the rest says where they were. That is how arrays travel, too.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.pickled import Pickled, join, out_of_band
from hpcdist.errors import add_note
from hpcdist.transport.shm.segment import in_huge_pages

_IN_PIECES = 0
"""What a pickle in pieces begins with; pickles of this protocol begin with 128."""
_COUNT = struct.Struct("<xQ")
LARGE_NBYTES = 128 << 10
"""Pieces of at least so many bytes are sent as they are. Pickle joins what is below 64 KiB."""


class _Written(list[Any]):
    """A file that keeps what is written to it, in pieces."""

    write = list.append


def in_pieces(obj: Any, pickler: Any = pickle.Pickler) -> tuple[bytes, list[memoryview]]:
    """Pickle an object: return the rest of the pickle, and what lies beside it.

    Args:
        obj: any.
        pickler: a class of picklers.

    """
    beside: list[memoryview] = []
    written = _Written()
    made = pickler(written, 5, buffer_callback=out_of_band(beside))
    made.dispatch_table = _reducers(pickler)
    made.dump(obj)
    large = [piece for piece in written if len(piece) >= LARGE_NBYTES]
    if not large:
        return b"".join(written) if len(written) > 1 else written[0], beside
    places, at = [], 0
    for piece in written:
        if len(piece) >= LARGE_NBYTES:
            places.append(at)
        else:
            at += len(piece)
    small = [piece for piece in written if len(piece) < LARGE_NBYTES]
    head = [_COUNT.pack(len(large)), struct.pack(f"<{len(large)}Q", *places)]
    return b"".join([*head, *small]), [*(memoryview(each) for each in large), *beside]


def from_pieces(whole: Any, buffers: Sequence[Any]) -> Any:
    """Rebuild an object; arrays in it own the received buffers and are writable."""
    if whole[0] != _IN_PIECES:
        return pickle.loads(whole, buffers=buffers)
    pieces = _Pieces(memoryview(whole), buffers)
    file: Any = pieces  # it need not return bytes: the unpickler takes any buffer
    return pickle.Unpickler(file, buffers=pieces.beside).load()


def pack_object(obj: Any) -> Pickled:
    """Pickle `obj` for a collective or a message; whatever pickle raises comes through."""
    return join(*in_pieces(obj))


def unpack_object(pickled: Pickled) -> Any:
    """Rebuild what `pack_object` or the hot path has pickled."""
    start = 8 + 8 * len(pickled.buffers)
    try:
        return from_pieces(memoryview(pickled.meta)[start:], pickled.buffers)
    except Exception as error:
        note_unpickled(error)
        raise


def note_unpickled(error: Exception) -> None:
    """Add to an error where it comes from: its own words do not say."""
    add_note(
        error,
        "raised while an object that a rank has sent was unpickled here; all ranks have to import "
        "the same modules, and pickle.loads(pickle.dumps(obj)) has to work where it is sent",
    )


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
        if len(view) >= LARGE_NBYTES:
            # A new object: its pages cost more than what is copied into them.
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


def _reducers(pickler: Any) -> Mapping[type, Any]:
    """Return how types are pickled: tensors of torch as NumPy's arrays are, and views."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is not None and kind not in _own:
        from hpcdist.arrays.torch import reduce_tensor

        _own[kind] = reduce_tensor
    if pickler is not pickle.Pickler:
        return ChainMap(_own, getattr(pickler, "dispatch_table", copyreg.dispatch_table))
    state = len(_own), len(copyreg.dispatch_table)
    if _seen != [state]:
        _table.update({**copyreg.dispatch_table, **_own})
        _seen[:] = [state]
    return _table  # a dict: the pickler looks up in others by Python


def _reduce_view(view: memoryview) -> tuple[Any, ...]:
    """Pickle a view as the buffer that it shows."""
    kind = view.format.removeprefix("@")
    if kind not in _KINDS:
        raise pickle.PicklingError(
            f"a memoryview of format {view.format!r} cannot be pickled; send an array, or "
            "view.tobytes()"
        )
    flat = view if view.c_contiguous else view.tobytes()
    shown = None if view.ndim == 1 and kind == "B" else (kind, view.shape)
    return _view, (pickle.PickleBuffer(flat), shown)


def _view(buffer: Any, shown: tuple[str, tuple[int, ...]] | None) -> memoryview:
    flat = memoryview(buffer)
    if shown is None:
        return flat
    kind, shape = shown
    if not flat.nbytes:
        return np.empty(shape, _KINDS[kind]).data
    # The stubs want the kind as a literal; it is one of `_KINDS`.
    return flat.cast("B").cast(kind, shape)  # type: ignore[call-overload, no-any-return]


_KINDS = {kind: "S1" if kind == "c" else kind for kind in "cbB?hHiIlLqQfd"}
"""Formats that a view can be cast to, and their dtypes."""
_own: dict[type, Any] = {memoryview: _reduce_view}
_table: dict[type, Any] = {}
_seen: list[tuple[int, int]] = []
