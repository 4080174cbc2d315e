"""`Communicators`: those that hpcdist has made in a world, so that all can be revoked together.

[Note: no Dup] Where a rank may die meanwhile, communicators are made by Split: Open MPI 5.0 can
crash when that happens in ``MPI_Comm_dup``.

[Note: in the making] While a communicator is made, all its ranks wait for each other inside MPI.
If one dies meanwhile, Open MPI 5.0 crashes where it hears of the death before the others have left,
and a rank that has got further may wait for ever for those that have not. So a thread beside it
looks at the processes of the node, and at whether others have begun to recover, and then
revokes everything, which ends the waits; `HEAR_EVERY_US` in `runtime.mpi` gives it time for that.
A communicator that others may still be making is not revoked before it is `_OF_AGE_S` old, for
that crashes them, too. Only MPI_Comm_create_group, for some of the ranks, goes on waiting. A
process that is stuck there ends, so that the ranks that are not can go on.

[Note: one at a time] Open MPI 5.0 can hang where a program's thread makes a communicator while the
thread of another group makes one, too. So one waits for the other, but not for long: ranks need not
make them in one order.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn, TypeVar, cast, final

from mpi4py import MPI

from hpcdist.runtime.ending import end_alone
from hpcdist.runtime.mpi import told_by_all
from hpcdist.runtime.process import node_name
from hpcdist.runtime.survival import can_recover
from hpcdist.transport.waiting.polling import Ending

_LOOK_MS = 5
_TURN_S = 1.0
_OF_AGE_S = 0.03
_STUCK_S = 20.0
"""How long the making of a communicator may take to end after a death."""
_C = TypeVar("_C", bound=MPI.Comm)


@final
class Communicators:
    """Those of one world; what comes when they are revoked is revoked at once."""

    def __init__(self) -> None:
        self._made: list[tuple[MPI.Comm, float]] = []
        self._lock = threading.Lock()
        self._are_revoked = False
        self._one_at_a_time = threading.RLock()
        self.neighbours: dict[int, int] = {}
        """The processes of ranks of this node, by world rank."""
        self._splits = can_recover()

    def __repr__(self) -> str:
        return f"<Communicators: {len(self._made)}>"

    def add(self, comm: _C) -> _C:
        """Keep a communicator, and return it."""
        if self._splits:
            with self._lock:
                self._made = [each for each in self._made if each[0] != MPI.COMM_NULL]
                self._made.append((comm, time.monotonic()))
                is_late = self._are_revoked
            if is_late:
                revoke(comm, time.monotonic())
        return comm

    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return a communicator of the same ranks. Collective."""
        if not self._splits:
            return comm.Dup()
        return self.add(cast(MPI.Intracomm, comm.Split(0, comm.rank)))  # [Note: no Dup]

    def of_ranks(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
        """Return a communicator of some ranks of `comm`. Collective over these."""
        if self._splits and [*ranks] == [*range(comm.size)]:
            return self.duplicate(comm)  # a death ends this, see [Note: in the making]
        everybody = comm.Get_group()
        some = everybody.Incl(ranks)
        try:
            return self.add(comm.Create_group(some, hash(tuple(ranks)) % 32000))
        finally:
            some.Free()
            everybody.Free()

    @contextmanager
    def making(self, parent: MPI.Intracomm, ranks: Iterable[int]) -> Iterator[None]:
        """End what is made of `parent` meanwhile if one of `ranks` dies.

        See [Note: in the making] and [Note: one at a time]. The ranks are those of the world.
        """
        taken: list[bool] = []
        try:
            taken.extend(map(self._one_at_a_time.acquire, (True,), (_TURN_S,)))
            with self._guarded(parent, ranks):
                yield
        finally:
            if any(taken):
                self._one_at_a_time.release()

    @contextmanager
    def _guarded(self, parent: MPI.Intracomm, ranks: Iterable[int]) -> Iterator[None]:
        if not self._splits:
            yield
            return
        over = Ending()
        processes = [self.neighbours[rank] for rank in ranks if rank in self.neighbours]
        woken, wake = os.pipe()
        args = parent, processes, over, woken
        thread = threading.Thread(target=self._guard, args=args, name="hpcdist-making", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            os.close(wake)
            thread.join()
            os.close(woken)

    def _guard(
        self,
        parent: MPI.Intracomm,
        processes: Sequence[int],
        over: Ending,
        woken: int,
    ) -> None:
        with sight_of(processes, woken) as died:
            while not over.is_set():
                if (died(_LOOK_MS) or self._is_broken(parent)) and not over.is_set():
                    parent.Revoke()
                    self.revoke()
                    if not over.wait(_STUCK_S):
                        _end_stuck()
                    return

    def _is_broken(self, parent: MPI.Intracomm) -> bool:
        """Return whether another rank has revoked what is in use."""
        with self._lock:
            looked_at = (parent, *(comm for comm, _ in self._made[:1]))
        return any(comm != MPI.COMM_NULL and comm.Is_revoked() for comm in looked_at)

    def revoke(self) -> None:
        """End whatever is under way, on all ranks, and whatever comes. Local; on any thread."""
        with self._lock:
            self._are_revoked = True
            made = tuple(self._made)
        for comm, since in made:
            with suppress(MPI.Exception):
                revoke(comm, since)

    def free(self) -> None:
        """Give all back to MPI, which nobody uses any more. Local after `revoke`."""
        with self._lock:
            made, self._made = self._made, []
        for comm, _ in made:
            with suppress(MPI.Exception):
                if comm != MPI.COMM_NULL:
                    comm.Free()


def revoke(comm: MPI.Comm, since: float) -> None:
    """Revoke a communicator, which was made at `since`, when it is of age. Local.

    See [Note: in the making].
    """
    time.sleep(max(0.0, since + _OF_AGE_S - time.monotonic()))
    if comm != MPI.COMM_NULL:
        comm.Revoke()


def _end_stuck() -> NoReturn:
    sys.stderr.write(
        "hpcdist: a rank died while MPI made a communicator with it, which MPI cannot end on the "
        "other ranks of that group: this process ends, as if it had died, too\n"
    )
    sys.stderr.flush()
    end_alone(1)


def processes_here(comm: MPI.Intracomm) -> list[int]:
    """Return the processes of `comm` on this node, this one among them. Collective over it."""
    here = node_name(), os.stat("/proc/self/ns/pid").st_ino
    return [process for where, process in told_by_all(comm, (here, os.getpid())) if where == here]


@contextmanager
def sight_of(processes: Iterable[int], woken: int | None = None) -> Iterator[Callable[[int], bool]]:
    """Give what returns, after so many milliseconds at most, whether one of them has ended.

    It returns before when the other end of `woken`, a pipe, is closed.
    """
    import select

    ends, missing = select.poll(), False
    if woken is not None:
        ends.register(woken, select.POLLIN)
    with ExitStack() as stack:
        for each in processes:
            try:
                descriptor = os.pidfd_open(each)
            except ProcessLookupError:
                missing = True
            except (OSError, AttributeError):  # not on this system, or there are too many
                continue
            else:
                stack.callback(os.close, descriptor)
                ends.register(descriptor, select.POLLIN)
        yield lambda limit_ms: missing or any(which != woken for which, _ in ends.poll(limit_ms))
