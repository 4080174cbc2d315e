"""Early messages: those a rank has taken in before they were asked for, and their bound on memory.

[Note: early messages] A send must not wait for a receive that comes later in the receiver's
program, or two ranks that send to each other first would wait for ever. So whoever waits in
hpcdist, for whatever it is, takes in what others have sent to it, in all groups, and keeps it for
the receives to come. What would go beyond the bound stays with its sender, which waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.mpi.datatypes import block
from hpcdist.transport.waiting.polling import at_once, poll, step

_MiB = 1 << 20
_FEW = 8
_orphans: list[Any] = []
"""What outlives its communicator, or has failed; MPI uses its memory to the end."""


@final
class Early:
    """A message that is taken in; `world` and `user_tag` are its sender's words for it."""

    def __init__(self, source: int, tag: int, nbytes: int, world: int, user_tag: int) -> None:
        self.source, self.tag, self.data = source, tag, np.empty(nbytes, np.uint8)
        self.world, self.user_tag = world, user_tag
        self.noted: list[Any] = []
        """Its request, from when it is taken in."""
        self.counts = False
        """Whether the `Allowance` has counted it."""

    @property
    def request(self) -> MPI.Request:
        """What MPI receives it by."""
        request: MPI.Request = self.noted[0]
        return request

    def receive(self, comm: MPI.Intracomm) -> Iterator[Any]:
        """Return the step that begins to receive it; nobody else may receive in `comm`."""
        return step(comm.Irecv, block(self.data, self.data.nbytes), self.source, self.tag)

    def has_arrived(self) -> bool:
        """Return whether all of its bytes are here."""
        return self.request.Test()

    def copy_to(self, buffers: list[NumpyArray]) -> None:
        """Spread the message over `buffers`."""
        start = 0
        for buffer in buffers:
            flat = buffer.reshape(-1).view(np.uint8)
            flat[...] = self.data[start : start + flat.size]
            start += flat.size


@final
class Allowance:
    """How much memory the early messages of all groups of this process may take together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._kept: Counter[tuple[int, int]] = Counter()
        self._lock = threading.RLock()
        self._refused: tuple[int, int, int] | None = None

    def admits(self, nbytes: int, world: int, user_tag: int) -> bool:
        """Return whether a message may be taken in; it is noted if not."""
        with self._lock:
            fits = self._held + nbytes <= self._limit
            self._refused = None if fits else (nbytes, world, user_tag)
            return fits

    def take(self, early: Early) -> None:
        """Count a message that is taken in."""
        self._count(early, counts=True)

    def give_back(self, early: Early) -> None:
        """Count a message that has been received, or is of no interest any more."""
        self._count(early, counts=False)
        self._refused = None

    def _count(self, early: Early, *, counts: bool) -> None:
        with self._lock:
            sign = counts - early.counts
            early.counts = counts
            self._held += sign * early.data.nbytes
            self._kept[early.world, early.user_tag] += sign

    def complaint(self) -> str:
        """Return a sentence about what the bound keeps out; nothing if it keeps out nothing."""
        with self._lock:
            if self._refused is None:
                return ""
            kept = [(*key, count) for key, count in sorted(self._kept.items()) if count]
            nbytes, world, user_tag = self._refused
            held, limit = self._held / _MiB, self._limit / _MiB
        listed = ", ".join(
            f"{count} from rank {source} with tag {tag}" for source, tag, count in kept[:_FEW]
        )
        more = f" and from {len(kept) - _FEW} more" if len(kept) > _FEW else ""
        return (
            f"takes in no more messages before it receives some: the {nbytes / _MiB:.3g} MiB from "
            f"rank {world} with tag {user_tag} do not fit into the {limit:g} MiB of "
            f"HPCDIST_EARLY_MB, of which {held:.3g} MiB are taken by {listed or 'no messages'}"
            f"{more}; receive messages earlier in the program, or set HPCDIST_EARLY_MB higher"
        )


def discard_unread(comm: MPI.Intracomm, patience_s: float) -> None:
    """Receive what nobody has taken, before `comm` is freed.

    The library gives its number to a new communicator, whose first receive would get it. A sender
    that does not let MPI proceed is not waited for any longer than `patience_s`.
    """
    status = MPI.Status()
    requests: list[MPI.Request] = []
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        nbytes = status.Get_elements(MPI.BYTE)
        early = Early(status.Get_source(), status.Get_tag(), nbytes, 0, 0)
        at_once(requests, early.receive(comm))
    keep(requests, patience_s)


def keep_for_ever(used: list[Any]) -> None:
    """Keep requests that have failed, and other memory that may still be used."""
    _orphans.extend(used)


def keep(requests: list[MPI.Request], patience_s: float) -> None:
    """Wait for receives whose messages nobody wants, and keep the memory of those under way."""
    if requests and not poll(lambda: MPI.Request.Testall(requests), patience_s):
        _orphans.extend(requests)
