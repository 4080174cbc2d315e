"""`Exchange`: the least of six integers over all ranks, again and again.

By MPI it is a persistent collective, polled: of a few ranks an all-gather of slots, in which a few
data travel along, else an all-reduce. Through the memory that the ranks of a node share it costs a
microsecond, and publishes an address and more data besides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.shm.control import Six
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.shm.node import Place
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


GATHERED_UP_TO = 16
"""So many ranks send each other slots; of more, the messages would be too many."""

ROOM = 192
"""Bytes of data in a slot."""

_NUMBERS = 64
_SLOT = _NUMBERS + ROOM


class Slots(NamedTuple):
    """What the ranks have sent each other with the six numbers, up to `ROOM` bytes each."""

    rank: int
    size: int
    can_pipeline: bool
    """Whether there is the compiled kernel."""
    places: Sequence[Place]
    wire: Wire | None = None
    """None: before MPI-4, or without the compiled kernel."""


class Wire(NamedTuple):
    """What a compiled call needs to fill all slots itself; see `shm/native/hot_slots.c`."""

    start: Callable[[], None]
    test: Callable[[], bool]
    mine: Any
    all_slots: Any
    data_at: int = _NUMBERS


def gathered_exchange(comm: MPI.Intracomm) -> tuple[Exchange, Slots]:
    """Exchange by MPI, data, too; the address is not sent. Collective."""
    size = comm.size
    mine: Any = np.zeros(_SLOT, np.uint8)
    all_slots: Any = np.zeros(size * _SLOT, np.uint8)
    room = mine[_NUMBERS:]
    numbers = all_slots.reshape(size, _SLOT)[:, : _SIX.size].view(np.int64)

    def write(*args: Any) -> None:
        _SIX.pack_into(mine, 0, *args[:6])
        data = args[7]
        if data is not None:
            room[: data.nbytes] = data.reshape(-1).view(np.uint8)

    def read() -> Any:
        return tuple(numbers.min(0).tolist())

    buffers = [mine, _SLOT, MPI.BYTE], [all_slots, _SLOT, MPI.BYTE]
    ends = _repeatable(comm.Allgather_init, comm.Iallgather, buffers)
    base = all_slots.ctypes.data
    places = [Place(all_slots, base, rank * _SLOT + _NUMBERS) for rank in range(size)]
    begin, done, _ = ends
    wire = None
    if compiled is not None and isinstance(begin.what, MPI.Prequest):
        wire = Wire(begin.what.Start, done, mine, all_slots)
    slots = Slots(comm.rank, size, compiled is not None, places, wire)
    return _polled(write, read, *ends), slots


def reduced_exchange(comm: MPI.Intracomm) -> Exchange:
    """Exchange by MPI; address and data are not sent. Collective."""
    mine: Any = np.zeros(6, np.int64)
    least: Any = np.zeros(6, np.int64)
    read = partial(_SIX.unpack_from, least, 0)
    buffers = [mine, 6, MPI.INT64_T], [least, 6, MPI.INT64_T], MPI.MIN
    ends = _repeatable(comm.Allreduce_init, comm.Iallreduce, buffers)
    return _polled(lambda *args: _SIX.pack_into(mine, 0, *args[:6]), read, *ends)


def _polled(
    write: Callable[..., None],
    read: Callable[[], Any],
    begin: _Counted,
    done: Callable[[], bool],
    close: Callable[[], None],
) -> Exchange:
    """Return the exchange that writes what this rank says, and reads what all have said."""

    def post(*args: Any) -> Any:
        write(*args)
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

    def __init__(self, function: Callable[[], Any], what: Any = None) -> None:
        self.what = what
        self._calls = zip(iter(function, self), count(1), strict=False)
        self._last: list[tuple[Any, int]] = [(None, 0)]

    def __call__(self) -> None:
        self._last[:] = islice(self._calls, 1)

    def times(self) -> int:
        return self._last[0][1]

    def result(self) -> Any:
        return self._last[0][0]


def _repeatable(
    prepare: Callable[..., MPI.Prequest], start: Callable[..., MPI.Request], arguments: Any
) -> tuple[_Counted, Callable[[], bool], Callable[[], None]]:
    """Return what begins a collective, what tests it, and what frees it at last."""
    try:
        request = prepare(*arguments)
    except NotImplementedError:  # before MPI-4
        begin = _Counted(partial(start, *arguments))
        return begin, lambda: begin.result().Test(), _kept(begin, _nothing)
    return _Counted(request.Start, request), request.Test, _kept(request, request.Free)


def _kept(used: Any, free: Callable[[], None]) -> Callable[[], None]:
    """Return what frees an exchange, whose memory is kept until then."""
    _open[id(used)] = used

    def close() -> None:
        free()
        _open.pop(id(used), None)

    return close


_open: dict[int, Any] = {}
"""What holds the memory of exchanges that have not been closed: MPI may write to it at any time."""
