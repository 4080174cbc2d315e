"""`Pickled`: a pickled object, with its large buffers kept beside the pickle.

Pickle protocol 5 hands large buffers (NumPy arrays and whatever else supports it) out of band
(PEP 574): they are sent from where they are and received where they will stay.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcdist.arrays.libraries import NumpyArray

OUT_OF_BAND = 16 << 10
"""Buffers of at least this many bytes travel beside the pickle."""

EAGER = 4096
"""Pickles up to this many bytes travel together in one padded collective."""

_NO_BUFFERS = struct.pack("<q", 0)


class Pickled(NamedTuple):
    """`meta` starts with the number of buffers and their lengths; the pickle follows."""

    meta: Any
    buffers: Sequence[Any] = ()

    def copy(self) -> Pickled:
        """Return a pickle whose object shares no memory with the one that was packed."""
        return Pickled(self.meta, [bytearray(buffer) for buffer in self.buffers])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pickle."""
        return len(self.meta) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


def out_of_band(large: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return the `buffer_callback` of a pickler that puts large buffers into `large`."""

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        large.append(raw)
        return False

    return keep_in_band


def pack_object(obj: Any) -> Pickled:
    """Pickle `obj`; whatever pickle raises comes through."""
    large: list[memoryview] = []
    return join(pickle.dumps(obj, 5, buffer_callback=out_of_band(large)), large)


def join(pickled: bytes, large: Sequence[memoryview]) -> Pickled:
    """Return a pickle together with the buffers that were kept beside it."""
    if not large:
        return Pickled(_NO_BUFFERS + pickled)
    lengths = [raw.nbytes for raw in large]
    head = struct.pack(f"<q{len(large)}q", len(large), *lengths)
    return Pickled(head + pickled, large)


def pickled_detail(pickles: Sequence[Pickled]) -> int:
    """Return the bytes of the largest pickle; more than `EAGER` if one has buffers."""
    return max(
        (
            max(pickled.nbytes, EAGER + 1) if pickled.buffers else len(pickled.meta)
            for pickled in pickles
        ),
        default=0,
    )


def buffer_lengths(meta: Any) -> tuple[int, ...]:
    """Read from `meta` how many bytes each out-of-band buffer has."""
    (count,) = struct.unpack_from("<q", meta)
    return struct.unpack_from(f"<{count}q", meta, 8) if count else ()


def empty_buffers(meta: Any) -> list[NumpyArray]:
    """Allocate the out-of-band buffers that belong to `meta`."""
    return [np.empty(length, np.uint8) for length in buffer_lengths(meta)]


def unpack_object(pickled: Pickled) -> Any:
    """Rebuild the object; arrays in it own the received buffers and are writable."""
    start = 8 + 8 * len(pickled.buffers)
    return pickle.loads(memoryview(pickled.meta)[start:], buffers=pickled.buffers)
