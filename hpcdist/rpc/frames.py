"""Frames: what two ranks write into their connection, one after the other. Pure.

A frame is a header of fixed size, the lengths of its buffers, a pickle, and the buffers that the
pickle hands out (large arrays). These are sent from where they are and received where they stay;
or they are `PASSED`: the connection hands over the memory that they lie in.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any

from hpcdist.errors import TransportError
from hpcdist.named_tuple import NamedTuple

CALL = 1
"""A function, its arguments: the receiver runs it."""
INLINE = 2
"""The same, for a function that runs on the thread that reads."""
RESULT = 3
"""What the function returned."""
FAILURE = 4
"""What it raised."""
FAREWELL = 5
"""Why the sender takes no more calls; it is the last frame."""

PARTING = 6
"""The sender makes no more calls by this connection; who has none under way either closes it."""

_KINDS = frozenset({CALL, INLINE, RESULT, FAILURE, FAREWELL, PARTING})
_MAGIC = b"hRPC"
_HEADER = struct.Struct("<4sB3xIIQQ")
HEADER_BYTES = _HEADER.size

PASSED = 1 << 63
"""In a length: the buffer does not follow, its memory is passed along."""
MOST_PASSED = 64
"""Buffers of a frame whose memory is passed, at most; Linux takes 253."""
MOST_BUFFERS = 1 << 24
MOST_BYTES = 1 << 42
"""A length beyond these comes from no rank: the connection is out of step."""


class FrameError(TransportError):
    """What arrived is not a frame: the connection cannot be used any more."""


class Parcel(NamedTuple):
    """A pickle, and the large buffers beside it."""

    pickle: Any
    buffers: Sequence[Any] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        nbytes = len(self.pickle)
        return nbytes + sum(map(_nbytes, self.buffers)) if self.buffers else nbytes


class Frame(NamedTuple):
    """What arrives: `call` is the number that the caller gave, which the answer repeats."""

    kind: int
    call: int
    parcel: Parcel


class Head(NamedTuple):
    """What a header says of its frame."""

    kind: int
    buffers: int
    call: int
    pickle_bytes: int


def parts(kind: int, call: int, parcel: Parcel, passed: Collection[int] = ()) -> list[Any]:
    """Return what is to be written, in order; nothing large is copied.

    Args:
        kind: `CALL` or another one.
        call: the number of the call.
        parcel: what is sent.
        passed: the places of the buffers whose memory is passed, not written.

    """
    pickle, buffers = parcel
    header = _HEADER.pack(_MAGIC, kind, len(buffers), len(passed), call, len(pickle))
    if not buffers:
        return [header, pickle]
    lengths = [_nbytes(each) | (PASSED if i in passed else 0) for i, each in enumerate(buffers)]
    written = [each for i, each in enumerate(buffers) if i not in passed]
    return [header, struct.pack(f"<{len(lengths)}Q", *lengths), pickle, *written]


def joined(kind: int, call: int, pickle: Any) -> bytes:
    """Return a frame without buffers, as one piece."""
    header: bytes = _HEADER.pack(_MAGIC, kind, 0, 0, call, len(pickle))
    return header + bytes(pickle)


def read_head(raw: Any, at: int = 0) -> Head:
    """Read a header.

    Raises:
        FrameError: it is none.

    """
    magic, kind, buffers, passed, call, pickle_bytes = _HEADER.unpack_from(raw, at)
    if magic != _MAGIC or kind not in _KINDS:
        raise FrameError(f"what arrived is not a frame: it begins with {bytes(raw[at : at + 8])!r}")
    if buffers > MOST_BUFFERS or passed > MOST_PASSED or pickle_bytes > MOST_BYTES:
        raise FrameError(
            f"a frame claims {buffers} buffers, {passed} of them passed, and a pickle of "
            f"{pickle_bytes} bytes"
        )
    return Head(kind, buffers, call, pickle_bytes)


def read_lengths(raw: Any, buffers: int) -> tuple[int, ...]:
    """Read how many bytes each buffer has, with `PASSED` for those that do not follow.

    Raises:
        FrameError: together they are more than a rank sends.

    """
    lengths = struct.unpack_from(f"<{buffers}Q", raw)
    total = sum(length & ~PASSED for length in lengths)
    if total > MOST_BYTES:
        raise FrameError(f"the {buffers} buffers of a frame claim {total} bytes")
    return lengths


def _nbytes(buffer: Any) -> int:
    return memoryview(buffer).nbytes
