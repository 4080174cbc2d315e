"""`Owned`, `Window`, `Reader`: rows in memory that the node shares: who keeps, and who reads them.

[Note: reading past] One process changes a table; others of the node read it, without a word. The
owner counts in a header before and after each change: the count is odd meanwhile. Who reads looks
at the count, finds and copies rows, and looks again: if the count was even and is the same, the
rows are those of one moment. Else it tries again, and then asks the owner. What it finds meanwhile
may be anything, so every number is checked before it is followed. Where arrays move, because the
table grows, the generation in the header says so, and who reads asks for the new places. The owner
reads its own rows like this, too, and so waits for nobody who changes others.

The order of two writes, as others see them, is that of x86; elsewhere nobody reads past.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import expect, load
from hpcdist.errors import ExecuteError
from hpcdist.named_tuple import NamedTuple
from hpcdist.ps.slabs import Slabs
from hpcdist.ps.slots import Slots
from hpcdist.transport.shm.segment import Bytes, Segment, create_segment, forget, open_segment

_compiled = load("hpcdist.ps._native")
_read: Any = getattr(_compiled, "read_rows", None)
_pull: Any = getattr(_compiled, "pull_rows", None)
_IN_ORDER = ("x86_64", "AMD64")
_CHANGES, _GENERATION = 0, 1
_GONE = -1
_READ = 1
_NOWHERE = np.empty(0, np.intp)
_PAGE = 4096
_TRIES = 4
_PAUSE_S = 2e-5


def can_share() -> bool:
    """Return whether rows can be read past their owner here."""
    return _read is not None and platform.machine() in _IN_ORDER


def read_own(slots: Slots, rows: Slabs, ids: NumpyArray, out: NumpyArray) -> bool:
    """Copy rows that nobody else changes; return whether all ids have one. What is absent stays."""
    if _pull is None or not out.size:
        found = slots.find(ids)
        rows.read(found, out)
        return not (found < 0).any()
    (index, kept), (slabs, shift, _) = slots.arrays, rows.layout
    missing = _pull(index, kept, slabs, ids, out, index.itemsize, slots.key, shift)
    return not missing


def new_owned() -> Owned | None:
    """Return memory for a table that the node can read; None where there is no such memory."""
    if not can_share():
        return None
    try:
        return Owned()
    except (OSError, ValueError):  # no memfd, no descriptor, no room among the addresses
        return None


class Layout(NamedTuple):
    """Where the parts of a table are, in which process, and how they are read."""

    header: Segment
    hashes: Segment
    ids: Segment
    rows: Segment
    generation: int
    key: int
    index_item: int
    dtype: str
    width: int
    shift: int
    slab_bytes: int


@final
class Owned:
    """The memory of one table, as the process has it that changes the table.

    Raises:
        OSError: the system has no such memory.

    """

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        weakref.finalize(self, _close_all, self._segments).atexit = False
        self._memory: dict[str, Bytes] = {}
        self.header = self.make("header", 2, np.dtype(np.int64))
        self._segments["rows"], self._rows = create_segment(_all_memory(), "rows")
        self._memory["rows"] = self._rows
        self._end = self._slab_bytes = 0

    def make(self, name: str, count: int, dtype: Any) -> NumpyArray:
        """Return memory for a part of the table, instead of what that part had before."""
        segment, memory = create_segment(count * np.dtype(dtype).itemsize, name)
        before = self._segments.get(name)
        self._segments[name], self._memory[name] = segment, memory
        if before is not None:
            os.close(before.descriptor)
            self._note_move()
        return memory.view(dtype)

    def slab(self, shape: tuple[int, ...], dtype: np.dtype) -> NumpyArray:
        """Return memory for some more rows."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not self._slab_bytes:  # who has looked before knows of no rows
            self._slab_bytes = -(-nbytes // _PAGE) * _PAGE
            self._note_move()
        begin = self._end
        if begin + self._slab_bytes > self._rows.nbytes:
            raise ExecuteError("a table has more rows than the node has memory")
        self._end = begin + self._slab_bytes
        return self._rows[begin : begin + nbytes].view(dtype).reshape(shape)

    def _note_move(self) -> None:
        if self.header[_GENERATION] != _GONE:  # what has gone stays so while its parts are cleared
            self.header[_GENERATION] += 1

    def release(self, slabs: int) -> None:
        """Give the memory back behind so many slabs."""
        begin = slabs * self._slab_bytes
        if begin < self._end:
            forget(self._rows[begin : self._end])
            self._end = begin

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the table as changing, for its readers, in this block."""
        self.header[_CHANGES] += 1
        try:
            yield
        finally:
            self.header[_CHANGES] += 1

    @property
    def mapped(self) -> dict[Segment, Bytes]:
        """The parts of the table as they are mapped here."""
        return {self._segments[name]: memory for name, memory in self._memory.items()}

    def layout(self, slots: Any, rows: Any) -> Layout:
        """Return where others find the table."""
        places = self._segments
        return Layout(
            header=places["header"],
            hashes=places["index"],
            ids=places["ids"],
            rows=places["rows"],
            generation=int(self.header[_GENERATION]),
            key=slots.key,
            index_item=slots.index_item,
            dtype=rows.dtype.name,
            width=rows.width,
            shift=rows.shift,
            slab_bytes=self._slab_bytes,
        )

    def close(self) -> None:
        """Mark the table as gone, for its readers."""
        self.header[_GENERATION] = _GONE
        self.release(0)


def _close_all(segments: dict[str, Segment]) -> None:
    for segment in segments.values():
        os.close(segment.descriptor)


def _all_memory() -> int:
    """Return the bytes of memory of the node; of a segment only what is used takes some."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@final
class Window:
    """A table of a process of the node, to be read.

    Args:
        layout: where its parts are.
        known: parts that are mapped already.

    Attributes:
        mapped: its parts.
        view: what the compiled loop knows of it; the addresses are those of `mapped` and `slabs`.

    Raises:
        OSError: its memory cannot be reached.

    """

    def __init__(self, layout: Layout, known: Mapping[Segment, Bytes]) -> None:
        self._generation = layout.generation
        parts = (layout.header, layout.hashes, layout.ids, layout.rows)
        self.mapped: dict[Segment, Bytes] = {
            each: known[each] if each in known else open_segment(each) for each in parts
        }
        self._header = self.mapped[layout.header].view(np.int64)
        header, index, ids, rows = (self.mapped[each].ctypes.data for each in parts)
        slabs = layout.rows.nbytes // layout.slab_bytes if layout.slab_bytes else 0
        self.slabs = (rows + layout.slab_bytes * np.arange(slabs)).astype(np.uintp)
        self.view = (
            header,
            layout.generation % (1 << 64),
            index,
            layout.hashes.nbytes // layout.index_item,
            layout.index_item,
            ids,
            layout.ids.nbytes // 8,
            layout.key,
            self.slabs.ctypes.data,
            slabs,
            layout.shift,
        )

    @property
    def is_old(self) -> bool:
        """Whether the table is elsewhere now."""
        return int(self._header[_GENERATION]) != self._generation


_NO_VIEW = (0,) * 11
expect(_compiled, CHANGES=_CHANGES, GENERATION=_GENERATION, READ=_READ, VIEW=len(_NO_VIEW))

Open: TypeAlias = "Callable[[int, Window | None], Window | None]"
"""Opens the table of a server, of which there has been a window, perhaps; None: nobody can."""


@final
class Reader:
    """The tables of all servers of one worker, as far as it can read them.

    Args:
        servers: how many there are.
        opened: opens their tables.

    """

    def __init__(self, servers: int, opened: Open) -> None:
        self._servers, self._opened = servers, opened
        self._state: tuple[list[Window | None], NumpyArray] | None = None

    def read(self, ids: NumpyArray, rows: NumpyArray) -> NumpyArray:
        """Copy the rows of `ids`, and return the places of those whose owner has to be asked.

        Rows of one server are those of one moment. The owner has to be asked for ids without a
        row, for what nobody can read, and where a table changes all the time.

        Args:
            ids: int64, flat; some may be there twice.
            rows: contiguous, one for each of them.

        """
        states, shown = np.zeros(ids.size, np.uint8), rows.view(np.uint8)
        for _ in range(_TRIES if ids.size and can_share() else 0):
            state = self._state  # holds what the addresses in the views are of
            if state is not None:
                if not _read(state[1], ids, states, shown):
                    return _NOWHERE
                if states.all():  # what is not read is absent
                    break
            if not self._open_again():
                time.sleep(_PAUSE_S)
        return np.flatnonzero(states != _READ)

    def _open_again(self) -> bool:
        """Open the tables that are elsewhere now; return whether there were any."""
        first = self._state is None
        before = [None] * self._servers if self._state is None else self._state[0]
        again = [first or (each is not None and each.is_old) for each in before]
        if not any(again):
            return False
        now = [
            self._opened(number, each) if old else each
            for number, (each, old) in enumerate(zip(before, again, strict=True))
        ]
        views = [_NO_VIEW if each is None else each.view for each in now]
        self._state = now, np.array(views, np.uint64)
        return True
