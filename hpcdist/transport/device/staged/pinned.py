"""`Pinned`: host memory, locked for direct copies, that staged operations use again and again.

It is cut from the heap that the ranks of a node share, where there is one: the host's operations
then read and write it in place, and no host copy remains between two devices of a node.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import final

import numpy as np

from hpcdist.arrays.device import DeviceRuntime
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.shm.heap import Heap

_PAGE = 4096
_SMALLEST = 64 << 10


@final
class Pinned:
    """Blocks whose sizes are powers of two; given back, they serve the next operation.

    Locking costs about 0.3 s per GiB, so nothing is unlocked before `close`. Memory that the
    system does not let us lock (``ulimit -l``) is used as it is.
    """

    def __init__(self, runtime: DeviceRuntime, heap: Heap) -> None:
        self._runtime, self._heap = runtime, heap
        self._lock = threading.RLock()  # a signal handler, or a destructor, may give back blocks
        self._free: dict[int, list[NumpyArray]] = {}
        self._locked: list[NumpyArray] = []
        self._lost: list[NumpyArray] = []
        self._others: list[NumpyArray] = []

    def take(self, nbytes: int) -> NumpyArray:
        """Return at least `nbytes` of uint8, aligned to pages."""
        length = max(_SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes else _SMALLEST
        with self._lock:
            with suppress(IndexError):  # in one step, for one of them may take the last block
                return self._free.setdefault(length, []).pop()
            return self._make(length)

    def give_back(self, block: NumpyArray) -> None:
        """Give a block back, for another operation."""
        with self._lock:
            self._free[block.nbytes].append(block)

    def lock(self, memory: NumpyArray) -> None:
        """Lock memory that is not ours until `close`, once."""
        with self._lock:
            if any(each is memory for each in self._others):
                return
            self._others.append(memory)
            if self._runtime.pin(memory):
                self._locked.append(memory)

    def lose(self, blocks: list[NumpyArray]) -> None:
        """Keep blocks that the device may still use from ever being used again."""
        with self._lock:
            self._lost += blocks

    def close(self) -> None:
        """Unlock everything."""
        with self._lock:
            for block in self._locked:
                with suppress(*self._runtime.failures):  # the device is gone, and its locks
                    self._runtime.unpin(block)
            self._locked.clear()
            self._others.clear()
            self._free.clear()

    def _make(self, length: int) -> NumpyArray:
        room = self._heap.empty(length + _PAGE)
        if room is None:
            room = np.empty(length + _PAGE, np.uint8)
        start = -room.ctypes.data % _PAGE  # two blocks must not share a page
        block = room[start : start + length]
        if self._runtime.pin(block):
            self._locked.append(block)
        return block
