"""`Outbox`: small messages sent without waiting for anyone to receive them; and `take_in`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, final

from mpi4py import MPI

from hpcdist.transport.mpi_types import block

_FEW = 16


@final
class Outbox:
    """Messages of one rank in one communicator; it keeps them until they are on their way."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._requests: list[MPI.Request] = []
        self._limit = _FEW
        self._lock = threading.Lock()

    def send(self, rank: int, content: Any, tag: int) -> None:
        """Send any object that pickles."""
        with self._lock:
            if len(self._requests) >= self._limit:  # at twice as many: each is tested a few times
                self._requests = [request for request in self._requests if not request.Test()]
                self._limit = max(_FEW, 2 * len(self._requests))
            self._requests.append(self._comm.isend(content, rank, tag))


def take_in(comm: MPI.Intracomm) -> Iterator[tuple[int, int, bytearray]]:
    """Receive whatever has been sent in `comm`: source, tag and bytes of each message."""
    status = MPI.Status()
    while (message := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
        nbytes = status.Get_elements(MPI.BYTE)
        data = bytearray(nbytes)
        message.Recv(block(data, nbytes))
        yield status.Get_source(), status.Get_tag(), data


def discard_unread(comm: MPI.Intracomm) -> None:
    """Receive what nobody has taken, before `comm` is freed.

    The library gives its number to a new communicator, whose first receive would get it.
    """
    for _ in take_in(comm):
        pass
