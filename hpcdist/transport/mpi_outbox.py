"""`Outbox`: small messages sent without waiting for anyone to receive them."""

from __future__ import annotations

from typing import Any, final

from mpi4py import MPI

_FEW = 16


@final
class Outbox:
    """Messages of one rank in one communicator; it keeps them until they are on their way."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._requests: list[MPI.Request] = []
        self._limit = _FEW

    def send(self, rank: int, content: Any, tag: int) -> None:
        """Send any object that pickles."""
        if len(self._requests) >= self._limit:  # at twice as many: each is tested a few times
            self._requests = [request for request in self._requests if not request.Test()]
            self._limit = max(_FEW, 2 * len(self._requests))
        self._requests.append(self._comm.isend(content, rank, tag))
