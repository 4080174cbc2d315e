"""`Mail`: frames as messages of MPI, for sites where ranks must not open sockets.

A rank notices a message only by asking MPI. One thread asks without end: it takes a core, and each
question needs Python's lock, which a rank that computes in Python holds.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.rpc import frames
from hpcdist.rpc.frames import FAREWELL, Frame, Parcel
from hpcdist.rpc.links import LinkError, Task
from hpcdist.rpc.serve import Pool
from hpcdist.runtime.mpi import load_mpi

_HEAD, _BODY = 1, 2
_SENDER = struct.Struct("<q")
_HEAD_BYTES = _SENDER.size + frames.HEADER_BYTES
_PIECE = 1 << 30
"""What one message holds: counts of MPI may be 32-bit integers."""


@final
class MailLink:
    """The way to one rank of a communicator."""

    parting = False
    has_more = True
    """The thread that reads serves all ranks, so it runs no calls."""

    def __init__(self, comm: Any, peer: int, place: int) -> None:
        self.peer = peer
        self.ended = self.farewell = ""
        self._comm, self._place = comm, place
        self._writes = threading.Lock()
        self.used = False
        """Whether a frame went or came, so that the other side wants to know of the end."""

    def send(
        self,
        kind: int,
        call: int,
        parcel: Parcel,
        until: float | None = None,
        carry_on: Callable[[Task], Any] | None = None,
        *,
        batched: bool = False,
    ) -> bool:
        """Send a frame; return when MPI has it. At `until` nothing is begun any more."""
        if until is not None and until <= time.monotonic():
            return False
        head, *body = frames.parts(kind, call, parcel)
        with self._writes:
            if self.ended:
                raise LinkError(self.ended)
            self.used = True
            try:
                self._send(head, body)
            except load_mpi().Exception as error:
                self.break_off(_broken(self.peer, error))
                raise LinkError(self.ended) from error
        return True

    def _send(self, head: bytes, body: Sequence[Any]) -> None:
        self._comm.Send(_SENDER.pack(self._comm.rank) + head, self._place, _HEAD)
        for part in body:
            view = memoryview(part)
            for at in range(0, view.nbytes, _PIECE):
                self._comm.Send(view[at : at + _PIECE], self._place, _BODY)

    def take(self, target: Any) -> Any:
        """Receive the next part of a frame whose head has come."""
        view = memoryview(target)
        for at in range(0, view.nbytes, _PIECE):
            self._comm.Recv(view[at : at + _PIECE], self._place, _BODY)
        return target

    def break_off(self, why: str) -> None:
        """Use it no more."""
        self.ended = self.ended or why


def _broken(peer: int, error: Exception) -> str:
    return f"MPI, by which rank {peer} is called, has failed, as it does when a rank dies: {error}"


@final
class Mail:
    """The links of a rank over a communicator of its own; does what a `Switchboard` does."""

    def __init__(
        self,
        comm: Any,
        ranks: Sequence[int],
        pool: Pool,
        take: Callable[[Any, Frame], Any],
        lost: Callable[[Any], Any],
    ) -> None:
        self._comm, self._me = comm, ranks[comm.rank]
        self._take, self._lost = take, lost
        self._links = [MailLink(comm, rank, place) for place, rank in enumerate(ranks)]
        self._by_rank = {link.peer: link for link in self._links}
        self._closed = False
        self._pool = pool

    def open(self) -> None:
        """Begin to take messages."""
        self._pool.spawn(self._read)

    def link_to(self, rank: int, until: float | None = None) -> MailLink:
        """Return the link to a rank; it is there."""
        return self._by_rank[rank]

    def read_on(self, link: MailLink) -> None:
        """No-op: one thread reads all links."""

    def close(self, why: str, farewell: Parcel) -> None:
        """Take and send no more; the others are told. Local."""
        for link in self._links:
            if link.used and link.peer != self._me:
                with contextlib.suppress(LinkError):
                    link.send(FAREWELL, 0, farewell)
            link.break_off(why)
        self._closed = True
        for link in self._links:
            self._lost(link)

    def abandon(self) -> None:
        """No-op: a forked child has no thread that reads."""

    def _read(self) -> None:
        """Take messages until the end, or until MPI fails, for all links if a rank has died."""
        try:
            self._read_all()
        except load_mpi().Exception as error:
            for link in self._links:
                link.break_off(_broken(link.peer, error))
                self._lost(link)

    def _read_all(self) -> None:
        while not self._closed:
            message = self._comm.Improbe(tag=_HEAD)
            if message is None:
                time.sleep(0)
                continue
            head = bytearray(_HEAD_BYTES)
            message.Recv(head)
            (place,) = _SENDER.unpack_from(head)
            link = self._links[place]
            link.used = True
            frame = self._frame(link, head)
            self._take(link, frame)
            if frame.kind == FAREWELL:
                link.break_off(link.farewell)
                self._lost(link)

    def _frame(self, link: MailLink, head: bytearray) -> Frame:
        kind, count, call, pickle_bytes = frames.read_head(head, _SENDER.size)
        lengths: tuple[int, ...] = ()
        if count:
            lengths = frames.read_lengths(link.take(bytearray(8 * count)), count)
        pickle = link.take(bytearray(pickle_bytes))
        buffers = [link.take(np.empty(length, np.uint8)) for length in lengths]
        return Frame(kind, call, Parcel(pickle, buffers))
