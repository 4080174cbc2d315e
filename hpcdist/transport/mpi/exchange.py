"""`Exchange`: the least of six integers over all ranks, again and again.

By MPI it is a persistent all-reduce, polled. Through the memory that the ranks of a node share
it costs a microsecond, and publishes an address and a few data besides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdist.transport.shm.control import Six
from hpcdist.transport.waiting.polling import SPIN

_SIX = struct.Struct("6q")


class Exchange(NamedTuple):
    """What an `Agreement` needs.

    `post(six numbers, address, data or None, looks)` begins, and returns the result if it is
    there after so many looks; `test()` returns it, or None as long as a rank is missing, and
    `progress()` lets MPI proceed meanwhile; `close()` gives back what the exchange uses.
    """

    post: Callable[..., Six | None]
    test: Callable[[], Six | None]
    progress: Callable[[], Any]
    close: Callable[[], None]


def mpi_exchange(comm: MPI.Intracomm) -> Exchange:
    """Exchange by MPI; address and data are not sent. Collective."""
    mine: Any = np.zeros(6, np.int64)
    least: Any = np.zeros(6, np.int64)
    write = partial(_SIX.pack_into, mine, 0)
    read = partial(_SIX.unpack_from, least, 0)
    request = _repeatable(comm, ([mine, 6, MPI.INT64_T], [least, 6, MPI.INT64_T], MPI.MIN))
    start, done = request.Start, request.Test

    def post(*args: Any) -> Any:
        write(*args[:6])
        start()
        for _ in range(SPIN):
            if done():
                return read()
        return None

    def test() -> Any:
        return read() if done() else None

    return Exchange(post, test, _nothing, request.Free)  # the test lets MPI proceed


def shared_exchange(control: Any, progress: Callable[[], Any]) -> Exchange:
    """Exchange through a control block; `progress` lets MPI proceed while this rank waits."""
    return Exchange(control.post, control.test, progress, _nothing)


def _nothing() -> None:
    pass


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
