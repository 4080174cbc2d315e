"""`Pickled`: a pickled object, with its large buffers kept beside the pickle.

Pickle protocol 5 hands large buffers (NumPy arrays and whatever else supports it) out of band
(PEP 574): they are sent from where they are and received where they will stay.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple

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
        """Return a pickle whose object shares no memory that can change with the packed one."""
        return Pickled(self.meta, [_fixed(buffer) for buffer in self.buffers])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pickle."""
        return len(self.meta) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


def _fixed(buffer: Any) -> Any:
    """Return a copy, or what shows an object of bytes as it is."""
    return buffer if type(getattr(buffer, "obj", None)) is bytes else bytearray(buffer)


def out_of_band(large: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return the `buffer_callback` of a pickler that puts large buffers into `large`."""

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        large.append(raw)
        return False

    return keep_in_band


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
