"""`Heap`: this process's arrays in memory that the other ranks of its node can map.

One segment per process, of bounded size, of which only used pages cost memory. Arrays are cut
from it first fit and go back when the last view of them is gone. Every rank allocates for
itself; others learn an array's offset with each operation.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from bisect import insort
from collections import deque
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call_site import outer_frame
from hpcdist.transport.kernel import address_of
from hpcdist.transport.shm.segment import Bytes, Segment, create_segment, is_dead, open_segment

_LINE = 256
"""Arrays begin at multiples of this many bytes."""


class _Run:
    """A piece of the heap in use; NumPy arrays keep it alive as their base.

    It goes back to `returned` with the last of them; `place` is where it is, and how long.
    """

    __slots__ = ("__array_interface__", "memory", "place", "returned")

    def __init__(
        self,
        memory: Bytes,
        address: int,
        nbytes: int,
        place: tuple[int, int],
        returned: deque[tuple[int, int]],
    ) -> None:
        self.memory, self.place, self.returned = memory, place, returned
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }

    def __del__(self) -> None:
        self.returned.append(self.place)


@final
class Heap:
    """At most `capacity` bytes, backed by memory as they are needed; none in a forked child."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // mmap.PAGESIZE * mmap.PAGESIZE
        self.segment: Segment | None = None
        self.used = 0
        """Bytes in arrays that are alive."""
        self._memory: Bytes | None = None
        self._peers: dict[Segment, Bytes] = {}
        self._base = 0
        self._backed = 0
        self._free: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._warned = self._retired = False

    def open(self) -> Segment:
        """Make the segment, if that is not done, and return it."""
        with self._lock:
            if self.segment is None:
                self.segment, self._memory = create_segment(self.capacity, "heap")
                weakref.finalize(self, os.close, self.segment.descriptor).atexit = False
                self._base = address_of(self._memory)
        return self.segment

    def peer(self, segment: Segment) -> Bytes:
        """Map the heap of another process, once."""
        if segment == self.segment:
            assert self._memory is not None
            return self._memory
        if segment not in self._peers:
            self._peers[segment] = open_segment(segment)
        return self._peers[segment]

    def empty(self, nbytes: int) -> NumpyArray | None:
        """Return `nbytes` of uint8, or None (and warn, once) where there is no room.

        A signal handler or a destructor in the middle of this gets None, too.
        """
        if nbytes <= 0 or self.segment is None or os.getpid() != self._owner:
            return None
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return None
        length = -(-nbytes // _LINE) * _LINE
        with self._lock:
            try:
                offset = self._take(length)
            except OSError as error:
                offset, why = None, str(error)
            else:
                why = f"{self.used >> 20} of {self.capacity >> 20} MiB are used"
        if offset is None:
            self._warn(nbytes, why)
            return None
        assert self._memory is not None
        address = self._base + offset
        return np.asarray(_Run(self._memory, address, nbytes, (offset, length), self._returned))

    def offset_of(self, array: NumpyArray) -> int | None:
        """Return where in the segment a contiguous array lies; None for other memory."""
        if self.segment is None:
            return None
        offset = address_of(array) - self._base
        return offset if 0 <= offset <= self.capacity - array.nbytes else None

    def retire(self) -> None:
        """Never use returned memory again: another rank may still write to it."""
        self._retired = True

    def revive(self) -> None:
        """Use returned memory again; no other rank is in an operation that began before. Local.

        What this process sees of others that have died is given back with the last of its users.
        """
        with self._lock:
            self._retired = False
            self._peers = {
                each: seen for each, seen in self._peers.items() if not is_dead(each.pid)
            }

    def _warn(self, nbytes: int, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"an array of {nbytes} bytes does not fit into shared memory ({why}); it is an "
                "ordinary one, and its collectives copy. Set HPCDIST_SHARED_HEAP_MB to allow more",
                RuntimeWarning,
                stacklevel=outer_frame()[1],
            )

    def _take(self, length: int) -> int | None:
        if self._retired:
            return None
        while self._returned:
            offset, returned = self._returned.popleft()
            self.used -= returned
            self._give(offset, returned)
        place = next((i for i, (_, free) in enumerate(self._free) if free >= length), None)
        if place is None and self._grow(length):
            place = len(self._free) - 1
        if place is None:
            return None
        offset, free = self._free[place]
        if free == length:
            del self._free[place]
        else:
            self._free[place] = offset + length, free - length
        self.used += length
        return offset

    def _grow(self, length: int) -> bool:
        """Allocate more of the segment in the system, so that touching it cannot fail."""
        start, _ = self._tail()
        end = start + length
        if end > self.capacity:
            return False
        end = min(self.capacity, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        assert self.segment is not None
        os.posix_fallocate(self.segment.descriptor, self._backed, end - self._backed)
        backed, self._backed = self._backed, end
        self._give(backed, end - backed)
        return True

    def _tail(self) -> tuple[int, int]:
        """Return the free run at the end of what is backed."""
        if self._free and sum(self._free[-1]) == self._backed:
            return self._free[-1]
        return self._backed, 0

    def _give(self, offset: int, length: int) -> None:
        """Add a free run and join it with its neighbours."""
        insort(self._free, (offset, length))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((start, size))
        self._free = joined
