"""`Outbox`: small messages sent without waiting for anyone to receive them; and `take_in`."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.mpi.datatypes import block
from hpcdist.transport.polling import poll

_FEW = 16
_orphans: list[MPI.Request] = []
"""Receives that outlive their communicator; MPI writes into their memory to the end."""


@final
class Outbox:
    """Messages of one rank in one communicator; it keeps them until they are on their way."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._requests: dict[int, MPI.Request] = {}
        self._limit = _FEW
        self._testing = threading.Lock()

    def send(self, rank: int, content: Any, tag: int) -> None:
        """Send any object that pickles."""
        if len(self._requests) >= self._limit and self._testing.acquire(blocking=False):
            try:
                self._forget_sent()
            finally:
                self._testing.release()
        request = self._comm.isend(content, rank, tag)
        self._requests[id(request)] = request

    def _forget_sent(self) -> None:
        """Forget what is on its way; a signal handler, or another thread, may send meanwhile."""
        for request in list(self._requests.values()):
            if request.Test():
                del self._requests[id(request)]
        self._limit = max(_FEW, 2 * len(self._requests))  # so each is tested a few times


class Incoming(NamedTuple):
    """A message that MPI is receiving into memory of ours; `request` says when it is there."""

    source: int
    tag: int
    data: NumpyArray
    request: MPI.Request


def take_in(comm: MPI.Intracomm, source: int, tag: int, nbytes: int) -> Incoming:
    """Begin to receive a message that a probe has found; nobody else may receive in `comm`."""
    data = np.empty(nbytes, np.uint8)
    return Incoming(source, tag, data, comm.Irecv(block(data, nbytes), source, tag))


def discard_unread(comm: MPI.Intracomm, patience_s: float) -> None:
    """Receive what nobody has taken, before `comm` is freed.

    The library gives its number to a new communicator, whose first receive would get it. A sender
    that does not let MPI proceed is not waited for any longer than `patience_s`.
    """
    status, requests = MPI.Status(), []
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        nbytes = status.Get_elements(MPI.BYTE)
        requests.append(take_in(comm, status.Get_source(), status.Get_tag(), nbytes).request)
    keep(requests, patience_s)


def keep(requests: list[MPI.Request], patience_s: float) -> None:
    """Wait for receives whose messages nobody wants, and keep the memory of those under way."""
    if requests and not poll(lambda: MPI.Request.Testall(requests), patience_s):
        _orphans.extend(requests)
