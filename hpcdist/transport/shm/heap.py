"""`Heap`: this process's arrays in memory that the other ranks of its node can map.

One segment per process, of bounded size, of which only used pages cost memory. Arrays are cut
from it (`blocks`) and go back when the last view of them is gone. Every rank allocates for
itself; others learn an array's offset with each operation.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from typing import Any, final

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.flight.call_site import outer_frame
from hpcdist.transport.shm.blocks import make_blocks
from hpcdist.transport.shm.kernel import address_of
from hpcdist.transport.shm.segment import Bytes, Segment, is_dead, make_segment, open_segment


@final
class Heap:
    """At most `capacity` bytes, backed by memory as they are needed; none in a forked child.

    `use_compiled` tells whether to use the compiled blocks, where there are any.
    """

    def __init__(self, capacity: int, *, use_compiled: bool = True) -> None:
        self.capacity = capacity // mmap.PAGESIZE * mmap.PAGESIZE
        self.segment: Segment | None = None
        self._use_compiled = use_compiled
        self._blocks: Any = None
        self._peers: dict[Segment, Bytes] = {}
        self._base = 0
        self._lock = threading.Lock()
        self._warned = False

    def open(self) -> Segment:
        """Make the segment, if that is not done, and return it."""
        with self._lock:
            if self.segment is None:
                self._open()
            assert self.segment is not None
        return self.segment

    def _open(self) -> None:
        segment = make_segment(self.capacity, "heap")
        try:
            blocks = make_blocks(segment.descriptor, self.capacity, use_compiled=self._use_compiled)
        except OSError:
            os.close(segment.descriptor)
            raise
        self._blocks, self._peers[segment] = blocks, blocks.memory()
        self._base = address_of(self._peers[segment])
        weakref.finalize(self, _close, segment.descriptor, blocks).atexit = False
        self.segment = segment

    @property
    def used(self) -> int:
        """Bytes in arrays that are alive."""
        return 0 if self._blocks is None else int(self._blocks.used)

    def peer(self, segment: Segment) -> Bytes:
        """Map the heap of another process, once."""
        if segment not in self._peers:
            self._peers[segment] = open_segment(segment)
        return self._peers[segment]

    def serve(self) -> None:
        """Be where ordinary arrays come from, too, in threads that ask for that. Local."""
        if self._blocks is not None:
            self._blocks.serve()

    def empty(self, nbytes: int) -> NumpyArray | None:
        """Return `nbytes` of uint8, or None (and warn, once) where there is no room."""
        if nbytes <= 0 or self._blocks is None:
            return None
        try:
            array: NumpyArray | None = self._blocks.empty(nbytes)
        except OSError as error:
            array, why = None, str(error)
        else:
            why = ""
        if array is None and self._blocks.is_open:
            self._warn(nbytes, why)
        return array

    def offset_of(self, array: NumpyArray) -> int | None:
        """Return where in the segment a contiguous array lies; None for other memory."""
        if self.segment is None:
            return None
        offset = address_of(array) - self._base
        return offset if 0 <= offset <= self.capacity - array.nbytes else None

    def retire(self) -> None:
        """Never use returned memory again: another rank may still write to it."""
        if self._blocks is not None:
            self._blocks.retire()

    def revive(self) -> None:
        """Use returned memory again; no other rank is in an operation that began before. Local.

        What this process sees of others that have died is given back with the last of its users.
        """
        if self._blocks is not None:
            self._blocks.revive()
        self._peers = {
            each: seen
            for each, seen in [*self._peers.items()]
            if each == self.segment or not is_dead(each.pid)
        }

    def _warn(self, nbytes: int, why: str) -> None:
        if not self._warned:
            self._warned = True
            why = why or f"{self.used >> 20} of {self.capacity >> 20} MiB are used"
            warnings.warn(
                f"an array of {nbytes} bytes does not fit into shared memory ({why}); it is an "
                "ordinary one, and its collectives copy. Set HPCDIST_SHARED_HEAP_MB to allow more",
                RuntimeWarning,
                stacklevel=outer_frame()[1],
            )


def _close(descriptor: int, blocks: Any) -> None:
    blocks.close()
    os.close(descriptor)
