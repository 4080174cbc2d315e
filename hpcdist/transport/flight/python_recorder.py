"""`PythonRecorder`: `flight/native/recorder.c` in Python, for where that is not compiled."""

from __future__ import annotations

import struct
import threading
import time
from types import CodeType
from typing import Any, final

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.flight import layout
from hpcdist.transport.flight.call_site import outer_frame

_U64 = struct.Struct("Q")
_U32 = 0xFFFFFFFF


class CallLayout(NamedTuple):
    """Where the calls of a type have what is recorded: places in the tuple, below 0 if nowhere."""

    dtype: int
    shape: int
    root: int
    nbytes: int
    tag: int


@final
class PythonRecorder:
    """What `flight/native/recorder.c` is, in Python."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._layouts: dict[type, CallLayout] = {}
        self._sites: dict[tuple[int, int], tuple[CodeType, int, int]] = {}
        """By address of the code, which the entry keeps: alike pieces of code are equal."""
        self._files: dict[str, int] = {}
        self._adding = threading.Lock()

    def open(self, memory: Any, records_at: int, text_at: int) -> None:
        """Record in `memory`, a ring."""
        self.close()
        self._memory = memory

    def close(self) -> None:
        """Record no longer."""
        self._memory = None
        self._sites.clear()
        self._files.clear()

    def text(self, words: bytes) -> int:
        """Add to the text; return the place, 0 where there is no room, or nothing is recorded."""
        memory = self._memory
        if memory is None:
            return 0
        with self._adding:
            at: int = _U64.unpack_from(memory, layout.TEXT_USED_AT)[0]
            after = (at + len(words) + 7) & ~7
            if after > layout.TEXT_BYTES:
                return 0
            memory[layout.TEXT_AT + at : layout.TEXT_AT + at + len(words)] = words
            _U64.pack_into(memory, layout.TEXT_USED_AT, after)
        return at

    def layout(self, kind: type, dtype: int, shape: int, root: int, nbytes: int, tag: int) -> None:
        """Say where the calls of a type have what is recorded."""
        self._layouts[kind] = CallLayout(dtype, shape, root, nbytes, tag)

    def begin(self, call: Any, group: int, sequence: int | None, flags: int) -> int:
        """Record that a call begins; return its mark, 0 where nothing is recorded."""
        if self._memory is None or not group:
            return 0
        place = self._layouts.get(type(call))
        if place is None:
            return 0
        root = _signed(call[place.root]) if place.root >= 0 else 0
        dtype = call[place.dtype].code if place.dtype >= 0 else 0
        digest = call[place.tag] & _U32 if place.tag >= 0 else 0
        return self._put(
            int(call[0]), group, sequence or 0, int(call.nbytes), root, flags, dtype, digest
        )

    def note(self, kind: int, group: int, sequence: int, nbytes: int, peer: int, flags: int) -> int:
        """Do the same of what is no `Call`."""
        return self._put(kind, group, sequence, nbytes, peer, flags) if group else 0

    def _put(
        self,
        kind: int,
        group: int,
        sequence: int,
        nbytes: int,
        peer: int,
        flags: int,
        dtype: int = 0,
        digest: int = 0,
    ) -> int:
        memory = self._memory
        if memory is None:
            return 0
        file, line = self._site()
        number = _U64.unpack_from(memory, layout.HEAD_AT)[0] + 1
        layout.RECORD.pack_into(
            memory, _record_at(number), number, time.monotonic_ns(), 0, nbytes, file, line,
            sequence, group, peer, digest, kind, dtype & 0xFFFF, layout.BEGUN, flags, 0,
        )  # fmt: skip
        if sequence:
            _U64.pack_into(memory, layout.TEXT_AT + group, sequence)
        _U64.pack_into(memory, layout.HEAD_AT, number)
        return int(number)

    def _site(self) -> tuple[int, int]:
        frame, _ = outer_frame()
        if frame is None:
            return 0, 0
        key = id(frame.f_code), frame.f_lasti
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= layout.CAPACITY:
                self._sites.clear()
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = self.text(name.encode(errors="replace") + b"\0")
            site = self._sites[key] = frame.f_code, self._files[name], frame.f_lineno
        return site[1:]

    def end(self, mark: int) -> None:
        """Record that the operation of a mark has ended; once."""
        self._end(mark, layout.ENDED)

    def fail(self, mark: int) -> None:
        """Record that it has ended with an error."""
        self._end(mark, layout.FAILED)

    def _end(self, mark: int, state: int) -> None:
        memory = self._memory
        if not mark or memory is None:
            return
        at, now = _record_at(mark), time.monotonic_ns()
        found = list(layout.RECORD.unpack_from(memory, at))
        if found[0] != mark or found[12] != layout.BEGUN:
            return
        counter = layout.COUNTERS_AT + found[10] * layout.COUNTER.size
        count, nbytes, busy = layout.COUNTER.unpack_from(memory, counter)
        layout.COUNTER.pack_into(
            memory, counter, count + 1, nbytes + found[3], busy + now - found[1]
        )
        found[2], found[12] = now, state
        layout.RECORD.pack_into(memory, at, *found)


def _signed(number: int) -> int:
    """Return what 32 bits hold of a number, which may be a key instead of a rank."""
    return ((number & _U32) ^ 1 << 31) - (1 << 31)


def _record_at(number: int) -> int:
    return layout.RECORDS_AT + (number & (layout.CAPACITY - 1)) * layout.RECORD.size
