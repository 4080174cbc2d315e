"""`Exchange`: the least of six integers over all ranks, again and again.

By MPI it is a persistent all-reduce, polled. Through the memory that the ranks of a node share
it costs a microsecond, and publishes an address and a few data besides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from itertools import count, islice
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
    `posted()` returns how many have begun: after an interrupt in `post`, too.
    """

    post: Callable[..., Six | None]
    test: Callable[[], Six | None]
    progress: Callable[[], Any]
    close: Callable[[], None]
    posted: Callable[[], int]


def mpi_exchange(comm: MPI.Intracomm) -> Exchange:
    """Exchange by MPI; address and data are not sent. Collective."""
    mine: Any = np.zeros(6, np.int64)
    least: Any = np.zeros(6, np.int64)
    write = partial(_SIX.pack_into, mine, 0)
    read = partial(_SIX.unpack_from, least, 0)
    begin, done, close = _repeatable(comm, ([mine, 6, MPI.INT64_T], [least, 6, MPI.INT64_T]))

    def post(*args: Any) -> Any:
        write(*args[:6])
        begin()
        for _ in range(SPIN):
            if done():
                return read()
        return None

    def test() -> Any:
        return read() if done() else None

    # the test lets MPI proceed
    return Exchange(post, test, _nothing, close, begin.times)


def shared_exchange(control: Any, progress: Callable[[], Any]) -> Exchange:
    """Exchange through a control block; `progress` lets MPI proceed while this rank waits."""
    return Exchange(control.post, control.test, progress, _nothing, lambda: control.sequence)


def _nothing() -> None:
    pass


class _Counted:
    """A function of C, and how often it was called: counted in the same moment as called."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._calls = zip(iter(function, self), count(1), strict=False)
        self._last: list[tuple[Any, int]] = [(None, 0)]

    def __call__(self) -> None:
        self._last[:] = islice(self._calls, 1)

    def times(self) -> int:
        return self._last[0][1]

    def result(self) -> Any:
        return self._last[0][0]


def _repeatable(
    comm: MPI.Intracomm, buffers: tuple[Any, Any]
) -> tuple[_Counted, Callable[[], bool], Callable[[], None]]:
    """Return what begins an all-reduce, what tests it, and what frees it at last."""
    try:
        request = comm.Allreduce_init(*buffers, MPI.MIN)
    except NotImplementedError:  # before MPI-4
        begin = _Counted(partial(comm.Iallreduce, *buffers, MPI.MIN))
        return begin, lambda: begin.result().Test(), _nothing
    return _Counted(request.Start), request.Test, request.Free
