"""`Slabs`: rows of one length by slot, in pieces of memory that never move.

A table grows by slabs, so growing copies nothing and needs no room for two. `read` and `write`
move rows between slots and arrays; compiled loops do it in one pass, NumPy slab by slab.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import load
from hpcdist.errors import ExecuteError, UsageError
from hpcdist.runtime.scratch import node_folder

Allocate = Callable[[tuple[int, ...], np.dtype], Any]

_SLAB_BYTES = 16 << 20
_compiled = load("hpcdist.ps._native")
_take = getattr(_compiled, "take_rows", None)
_put = getattr(_compiled, "put_rows", None)


def slab_shift(row_bytes: int) -> int:
    """Return log2 of how many rows a slab has: 16 MiB of them, or less."""
    return max(0, (_SLAB_BYTES // max(1, row_bytes)).bit_length() - 1)


@final
class Slabs:
    """Rows of `width` numbers, in slabs of ``2**shift`` rows.

    Attributes:
        slabs: the memory; a row's slot is the number of the slab, shifted left, plus its place.

    """

    def __init__(self, width: int, dtype: np.dtype, shift: int, allocate: Allocate) -> None:
        self.width = width
        self.dtype = dtype
        self.shift = shift
        self._allocate = allocate
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self.slabs: list[NumpyArray] = []
        self._addresses = np.empty(0, np.uintp)

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return len(self.slabs) << self.shift

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def layout(self) -> tuple[NumpyArray, int, int]:
        """The addresses of the slabs, log2 of their rows, and the bytes of a row."""
        return self._addresses, self.shift, self.width * self.dtype.itemsize

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` rows in all; after an error there may be some more of it."""
        wanted = -(-rows >> self.shift) if self.width else 0
        while len(self.slabs) < wanted:
            slab = self._made((1 << self.shift, self.width))
            self._addresses = np.append(self._addresses, np.uintp(slab.ctypes.data))
            self.slabs.append(slab)

    def release(self, rows: int) -> None:
        """Give the slabs back that hold no row below `rows`."""
        kept = -(-rows >> self.shift)
        self._addresses = self._addresses[:kept]
        del self.slabs[kept:]

    def _made(self, shape: tuple[int, ...]) -> NumpyArray:
        slab = self._allocate(shape, self.dtype)
        view = np.asarray(slab)
        if view.shape != shape or view.dtype != self.dtype or not view.flags.c_contiguous:
            raise UsageError(
                f"slab({shape}, {self.dtype}) returned an array of shape {view.shape} and dtype "
                f"{view.dtype}; return a contiguous one of these"
            )
        return view

    def read(self, slots: NumpyArray, out: NumpyArray | None = None) -> NumpyArray:
        """Return rows; where a slot is negative, `out` keeps what it has."""
        if out is None:
            out = np.empty((slots.size, self.width), self.dtype)
        if not (slots.size and self.width):
            return out
        if _take is not None:
            slabs, *layout = self.layout
            _take(out.view(np.uint8), slabs, slots, *layout)
            return out
        for slab, chosen, places in self._split(slots):
            out[chosen] = slab[places]
        return out

    def write(self, slots: NumpyArray, rows: NumpyArray) -> None:
        """Put rows into their slots, which are distinct; negative ones are passed over."""
        if not (slots.size and self.width):
            return
        if _put is not None:
            slabs, *layout = self.layout
            _put(np.ascontiguousarray(rows, self.dtype).view(np.uint8), slabs, slots, *layout)
            return
        for slab, chosen, places in self._split(slots):
            slab[places] = rows[chosen]

    def _split(self, slots: NumpyArray) -> Iterator[tuple[NumpyArray, Any, NumpyArray]]:
        """Give each slab that slots are in, which slots those are, and their places in the slab."""
        numbers = slots >> self.shift
        first, last = int(numbers.min()), int(numbers.max())
        if first == last >= 0:
            yield self.slabs[first], slice(None), slots & ((1 << self.shift) - 1)
            return
        order = np.argsort(numbers, kind="stable")
        ends = np.searchsorted(numbers[order], np.arange(max(first, 0), last + 2))
        for number, (start, stop) in enumerate(pairwise(ends), max(first, 0)):
            if start < stop:
                chosen = order[start:stop]
                yield self.slabs[number], chosen, slots[chosen] & ((1 << self.shift) - 1)


def in_memory(shape: tuple[int, ...], dtype: np.dtype) -> NumpyArray:
    """Return a slab in ordinary memory, which takes pages as they are written."""
    return np.empty(shape, dtype)


@final
class SlabFile:
    """Slabs in a file on the node's disk, mapped into memory.

    The file has no name from the start, so it is gone when the process ends, however it ends. Its
    blocks are reserved before they are mapped: a full disk is an error here, not a signal later.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = node_folder() if folder is None else os.fspath(folder)
        try:
            self._file, path = tempfile.mkstemp(prefix="hpcdist-rows-", dir=self.folder)
        except OSError as error:
            raise ExecuteError(
                f"no file of rows can be made in {self.folder!r}: {error.strerror}; pass a folder "
                "of the node's disk as folder="
            ) from error
        os.unlink(path)
        self.nbytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> NumpyArray:
        """Return a slab at the end of the file."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        rounded = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file, self.nbytes, rounded)
            mapped = mmap.mmap(self._file, rounded, offset=self.nbytes)
        except OSError as error:
            os.ftruncate(self._file, self.nbytes)
            raise ExecuteError(
                f"{self.folder!r} has no room for {rounded >> 20} MiB more rows, besides "
                f"{self.nbytes >> 20} MiB: {error.strerror}; free some, pass another folder=, or "
                "limit the table with max_rows="
            ) from error
        self.nbytes += rounded
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)  # rows are far apart: reading ahead is in vain
        return np.frombuffer(mapped, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)

    def clear(self) -> None:
        """Give the disk back; slabs that are still in use keep theirs until they go."""
        os.ftruncate(self._file, 0)
        self.nbytes = 0

    def close(self) -> None:
        """Close the file; its blocks are free when the last slab is gone."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
