"""`Owned`, `Window`: rows in memory that the node shares: who keeps them, and who reads past them.

[Note: reading past] One process changes a table; others of the node read it, without a word. The
owner counts in a header before and after each change: the count is odd meanwhile. Who reads looks
at the count, finds and copies rows, and looks again: if the count was even and is the same, the
rows are those of one moment. Else it tries again, and then asks the owner. What it finds meanwhile
may be anything, so every number is checked before it is followed. Where arrays move, because the
table grows, the generation in the header says so, and who reads asks for the new places.

The order of two writes, as others see them, is that of x86; elsewhere nobody reads past.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import ExecuteError
from hpcdist.transport.kernel import address_of, compiled
from hpcdist.transport.shm.segment import Bytes, Segment, create_segment, forget, open_segment

_find: Any = getattr(compiled, "find_slots", None)
_take: Any = getattr(compiled, "take_rows", None)
_IN_ORDER = ("x86_64", "AMD64")
_CHANGES, _GENERATION = 0, 1
_GONE = -1
_PAGE = 4096
_TRIES = 4
_PAUSE_S = 2e-5


def can_share() -> bool:
    """Return whether rows can be read past their owner here."""
    return _find is not None and _take is not None and platform.machine() in _IN_ORDER


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
        self.header = self.make("header", 2, np.dtype(np.int64))
        self._segments["rows"], self._rows = create_segment(_all_memory(), "rows")
        self._end = self._slab_bytes = 0

    def make(self, name: str, count: int, dtype: Any) -> NumpyArray:
        """Return memory for a part of the table, instead of what that part had before."""
        segment, memory = create_segment(count * np.dtype(dtype).itemsize, name)
        before = self._segments.get(name)
        self._segments[name] = segment
        if before is not None:
            os.close(before.descriptor)
            self.header[_GENERATION] += 1
        return memory.view(dtype)

    def slab(self, shape: tuple[int, ...], dtype: np.dtype) -> NumpyArray:
        """Return memory for some more rows."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not self._slab_bytes:  # who has looked before knows of no rows
            self._slab_bytes = -(-nbytes // _PAGE) * _PAGE
            self.header[_GENERATION] += 1
        begin, self._end = self._end, self._end + self._slab_bytes
        if self._end > self._rows.nbytes:
            raise ExecuteError("a table has more rows than the node has memory")
        return self._rows[begin : begin + nbytes].view(dtype).reshape(shape)

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


class Found(NamedTuple):
    """Rows, and the places of those that are not there."""

    rows: NumpyArray
    absent: NumpyArray


@final
class Window:
    """A table of another process of the node, to be read.

    Raises:
        OSError: its memory cannot be reached.

    """

    def __init__(self, layout: Layout, before: Window | None = None) -> None:
        self.layout = layout
        known = {} if before is None else before.mapped
        parts = (layout.header, layout.hashes, layout.ids, layout.rows)
        self.mapped: dict[Segment, Bytes] = {
            each: known[each] if each in known else open_segment(each) for each in parts
        }
        self._header = self.mapped[layout.header].view(np.int64)
        self._index, self._ids = self.mapped[layout.hashes], self.mapped[layout.ids].view(np.int64)
        slabs = layout.rows.nbytes // layout.slab_bytes if layout.slab_bytes else 0
        first = address_of(self.mapped[layout.rows])
        self._slabs = (first + layout.slab_bytes * np.arange(slabs)).astype(np.uintp)

    @property
    def is_old(self) -> bool:
        """Whether the table is elsewhere now."""
        return int(self._header[_GENERATION]) != self.layout.generation

    def read(self, ids: NumpyArray) -> Found | None:
        """Return the rows of `ids` as they are at one moment; None if it changes all the time."""
        layout, ids = self.layout, np.ascontiguousarray(ids)
        slots = np.empty(ids.size, np.intp)
        rows = np.empty((ids.size, layout.width), layout.dtype)
        for _ in range(_TRIES):
            count = int(self._header[_CHANGES])
            if count % 2 == 0 and not self.is_old:
                _find(layout.index_item, self._index, self._ids, ids, slots, layout.key)
                if int(slots.max(initial=-1)) < self._slabs.size << layout.shift:
                    row_bytes = rows.itemsize * layout.width
                    _take(rows.view(np.uint8), self._slabs, slots, layout.shift, row_bytes)
                    if int(self._header[_CHANGES]) == count and not self.is_old:
                        return Found(rows, np.flatnonzero(slots < 0))
            elif self.is_old:
                return None
            time.sleep(_PAUSE_S)
        return None
