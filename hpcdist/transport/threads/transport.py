"""Ranks as threads of one process: no MPI, for unit tests, notebooks and teaching.

All ranks of a group meet in a `ThreadGroup` (`group`); their messages wait there, too (`messages`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.pickled import Pickled
from hpcdist.errors import UsageError
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import node_name, snapshot
from hpcdist.transport.base import Plan, StartedWorld, Transport, WorldRequest, watched
from hpcdist.transport.call.call import MESSAGES, Call, Collective, Objects, Refusal, label
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.shm.kernel import address_of
from hpcdist.transport.threads.group import ThreadGroup
from hpcdist.transport.threads.messages import Mailbox
from hpcdist.transport.waiting.queue import CollectiveQueue
from hpcdist.transport.waiting.unheard import tell_unfinished
from hpcdist.transport.waiting.work import Work


def _on_host(call: Call) -> Call:
    """Call off what is in the memory of a device, on all ranks."""
    if call.device is None:
        return call
    error = UsageError(
        f"simulated ranks exchange arrays in host memory only, and this one is on "
        f"{call.device.name}; copy it to the host, or start ranks with mpiexec or srun"
    )
    if isinstance(call, MESSAGES):
        raise error
    return Refusal(call.kind, call.root, error, ended=call.ended)


@final
class ThreadTransport(Transport):
    """Rank `rank` of a room."""

    backend = "LOCAL"
    takes_exchanges = True
    one_node = True

    def __init__(
        self, room: ThreadGroup, rank: int, timeout_s: float, without_mpi: str | None = None
    ) -> None:
        self.ranks = room.ranks
        self.rank, self.size = rank, len(room.ranks)
        self.room, self.membership = room, room.membership
        self.without_mpi = without_mpi
        """Why there is no MPI, where a rank that is none of a simulated world is alone."""
        self.timeout_s = timeout_s
        self._sequence = 0
        self._made: dict[tuple[int, ...], int] = {}
        self.queue = CollectiveQueue(f"hpcdist-local-{rank}")
        self._box = Mailbox(rank, room, timeout_s)
        room.threads[rank] = threading.get_ident()

    @classmethod
    def start_world(cls, request: WorldRequest) -> StartedWorld:
        """Start a world of this process alone; `simulate` makes larger ones."""
        place = read_place(snapshot())
        if place.size > 1 and not request.config.allow_singleton:
            raise UsageError(
                f"backend='local' makes a world of one process, but {place.launcher} started "
                f"{place.size} of them, each of which would be alone; use 'mpi', or simulate for "
                "ranks that are threads"
            )
        if request.comm is not None:
            raise UsageError(f"backend='local' has no use for comm={request.comm!r}; use 'mpi'")
        return cls.alone(request.timeout_s, "it was started with backend='local'")

    @classmethod
    def alone(cls, timeout_s: float, without_mpi: str) -> StartedWorld:
        """Return a world of this process alone, and why it has no MPI."""
        place = read_place({})
        connect = partial(cls, ThreadGroup([0]), 0, timeout_s, without_mpi)
        return StartedWorld(place, (node_name(),), (0,), connect)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time limit of operations from now on; local."""
        self.timeout_s = self._box.timeout_s = timeout_s

    def run(self, call: Call) -> Any:
        """Finish `call` before returning."""
        call = _on_host(call)
        if isinstance(call, MESSAGES):
            work = self._box.start(call)
            work.wait()
            return work
        if call.ended is not None:  # told when the group is free again: it may use it
            return watched(self.run, call)
        return self.queue.run(self._perform, call)

    def start(self, call: Call) -> Work:
        """Begin `call`."""
        call = _on_host(call)
        if isinstance(call, MESSAGES):
            return self._box.start(call)
        perform = partial(self.queue.turn.call, self._perform)
        if call.ended is not None:
            perform = partial(watched, perform)
        return self.queue.start(lambda: perform(call), label(call, self.ranks))

    def plan(self, call: Collective) -> Plan | None:
        """Return None: nothing is faster than starting `call` anew."""
        return None

    def place_of(self, array: NumpyArray) -> int | None:
        """Return the address: all ranks are in one process."""
        return address_of(array)

    def seen(self, rank: int, place: int, nbytes: int) -> NumpyArray:
        """Return what lies at an address."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(place))

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[ThreadTransport, int]:
        """Meet the other members in a room of their own."""
        self.groups_begun += 1
        key = tuple(self.ranks[rank] for rank in ranks)
        nth = self._made[key] = self._made.get(key, 0) + 1
        room = self.room.subroom(key, nth)
        place = key.index(self.ranks[self.rank])
        group = ThreadTransport(room, place, timeout, self.without_mpi)
        kind, own = Kind.ALL_GATHER_OBJECT, Pickled(str(next_id).encode())
        ids = Objects(kind, (own,)) if error is None else Refusal(kind, 0, error)
        return group, max(int(pickled.meta) for pickled in group.run(ids))

    def synchronize(self, *, on_device: bool = False) -> None:
        """Wait for the queue."""
        self.queue.run(lambda: None)

    def reopen(self) -> ThreadTransport:
        """Meet in the same room again."""
        again = ThreadTransport(self.room, self.rank, self.timeout_s, self.without_mpi)
        again._sequence, again._made = self._sequence, self._made
        return again

    def together_at_end(self) -> bool:
        """Return True: simulated ranks end together."""
        return True

    def leave(self, why: str) -> None:
        """Report to the other ranks that this one no longer takes part."""
        self.room.leave(self.rank, why)

    def close(self) -> None:
        """End what is queued."""
        self.queue.refuse_nested()
        self.queue.close()
        left = [work.left_over() for work in self._box.posted if not work.is_completed()]
        tell_unfinished(self.ranks, [*self.queue.under_way(), *left])

    def _perform(self, call: Collective) -> Any:
        if call.begin is not None:
            call.begin()
        self._sequence += 1
        result = self.room.meet(self.rank, self._sequence, call, self.timeout_s)
        return call.finish(result) if call.finish is not None else result
