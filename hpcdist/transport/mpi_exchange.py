"""`Exchange`: the least of six integers over all ranks, again and again.

`MpiExchange` is a persistent all-reduce, polled. `BoardExchange` uses the memory that the ranks
of a node share; it costs a microsecond, and publishes an address and a few data besides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, final

import numpy as np
from mpi4py import MPI

from hpcdist.transport.patience import SPIN
from hpcdist.transport.shared_board import Six

SPINS = 300
"""Looks at a board before Python takes over the waiting: a few microseconds."""

_SIX = struct.Struct("6q")


class Exchange(Protocol):
    """What an `Agreement` needs."""

    post: Callable[..., Six | None]
    """Begin: six numbers, an address, data or None, looks; the result if it is there by then."""
    test: Callable[[], Six | None]
    """Return the result, or None as long as a rank is missing."""

    def close(self) -> None:
        """Give back what the exchange uses; it must have ended."""


@final
class MpiExchange:
    """Between the ranks of a communicator; collective to create."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        mine: Any = np.zeros(6, np.int64)
        least: Any = np.zeros(6, np.int64)
        self._write = partial(_SIX.pack_into, mine, 0)
        self._read = partial(_SIX.unpack_from, least, 0)
        self._request = _repeatable(
            comm, ([mine, 6, MPI.INT64_T], [least, 6, MPI.INT64_T], MPI.MIN)
        )
        self._start, self._done = self._request.Start, self._request.Test

    def post(self, *args: Any) -> Six | None:
        """Begin; address and data are not sent."""
        self._write(*args[:6])
        self._start()
        done = self._done
        for _ in range(SPIN):
            if done():
                return self._read()
        return None

    def test(self) -> Six | None:
        """Return the result if it is there."""
        return self._read() if self._done() else None

    def close(self) -> None:
        """Free the request."""
        self._request.Free()


@final
class BoardExchange:
    """Between the ranks of a board; `progress` lets MPI proceed while a rank waits."""

    def __init__(self, board: Any, progress: Callable[[], Any]) -> None:
        self.post = board.post
        self._test = board.test
        self._progress = progress

    def test(self) -> Six | None:
        """Return the result if it is there."""
        found: Six | None = self._test()
        if found is None:
            self._progress()
        return found

    def close(self) -> None:
        """Nothing to free: the memory goes with its last user."""


class _Iallreduce:
    """A repeatable all-reduce for MPI libraries without persistent collectives (before MPI-4)."""

    def __init__(self, comm: MPI.Intracomm, args: tuple[Any, ...]) -> None:
        self._comm, self._args = comm, args
        self._request = MPI.REQUEST_NULL

    def Start(self) -> None:  # noqa: N802 (MPI's name)
        self._request = self._comm.Iallreduce(*self._args)

    def Test(self) -> bool:  # noqa: N802 (MPI's name)
        return self._request.Test()

    def Free(self) -> None:  # noqa: N802 (MPI's name)
        self._request = MPI.REQUEST_NULL


def _repeatable(comm: MPI.Intracomm, args: tuple[Any, ...]) -> MPI.Prequest | _Iallreduce:
    try:
        return comm.Allreduce_init(*args)
    except NotImplementedError:
        return _Iallreduce(comm, args)
