"""`Blocks`: runs of a segment as arrays; each comes back when the last view of it is gone.

Runs are cut from the segment first fit and joined when they come back. The compiled ones
(`native/arrays.c`) are faster, and serve ordinary arrays, too (`ordinary`); `PythonBlocks` are the
rest.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import insort
from collections import deque
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import load
from hpcdist.transport.shm.kernel import address_of
from hpcdist.transport.shm.segment import Bytes, map_segment

compiled = load("hpcdist.transport._arrays")

_LINE = 256
"""Arrays begin at multiples of this many bytes."""


def make_blocks(descriptor: int, capacity: int, *, use_compiled: bool) -> Any:
    """Map an open segment, and return what hands out runs of it. Local.

    Raises:
        OSError: it cannot be mapped.

    """
    if use_compiled and compiled is not None:
        return compiled.Blocks(descriptor, capacity)
    return PythonBlocks(descriptor, capacity)


class _Run:
    """A piece of the segment in use; NumPy arrays keep it alive as their base.

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
class PythonBlocks:
    """The runs of a segment of `capacity` bytes, of which only used pages cost memory."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self._used = 0
        self._descriptor, self._capacity = descriptor, capacity
        self._memory = map_segment(descriptor, capacity)
        self._base = address_of(self._memory)
        self._backed = 0
        self._free: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._retired = False

    @property
    def used(self) -> int:
        """Bytes in arrays that are alive."""
        return self._used - sum(length for _, length in [*self._returned])

    @property
    def is_open(self) -> bool:
        """Whether runs can be handed out here and now, as far as there are any."""
        is_inside: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return not is_inside and os.getpid() == self._owner

    def memory(self) -> Bytes:
        """Return all of the segment."""
        return self._memory

    def empty(self, nbytes: int) -> NumpyArray | None:
        """Return `nbytes` of uint8, or None where there is no room; none in a forked child.

        A signal handler or a destructor in the middle of this gets None, too.

        Raises:
            OSError: the system has no memory.

        """
        if not self.is_open:
            return None
        length = -(-nbytes // _LINE) * _LINE
        with self._lock:
            offset = self._take(length)
        if offset is None:
            return None
        run = _Run(self._memory, self._base + offset, nbytes, (offset, length), self._returned)
        return np.asarray(run)

    def retire(self) -> None:
        """Hand out nothing until `revive`."""
        self._retired = True

    def revive(self) -> None:
        """Hand out runs again, those that have come back meanwhile, too."""
        self._retired = False

    def serve(self) -> None:
        """Do nothing: ordinary arrays stay where they are."""

    def close(self) -> None:
        """Hand out nothing any more. What there is stays."""
        self._retired = True

    def _take(self, length: int) -> int | None:
        if self._retired:
            return None
        while self._returned:
            offset, returned = self._returned.popleft()
            self._used -= returned
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
        self._used += length
        return offset

    def _grow(self, length: int) -> bool:
        """Allocate more of the segment in the system, so that touching it cannot fail."""
        start, _ = self._tail()
        end = start + length
        if end > self._capacity:
            return False
        end = min(self._capacity, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        os.posix_fallocate(self._descriptor, self._backed, end - self._backed)
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
