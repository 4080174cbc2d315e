"""Ranks as threads of one process: no MPI, for unit tests, notebooks and teaching.

All ranks of a group meet in a `ThreadGroup`. Operation k of a group is a `Meeting`: the last
rank to arrive compares what all called and computes the result for everyone. Whoever waits in vain
knows who is missing.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, final

from hpcdist.arrays.pickled import Pickled
from hpcdist.errors import CollectiveTimeout, MismatchError, RemoteError, UsageError
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot
from hpcdist.transport import activity
from hpcdist.transport.base import Plan, StartedWorld, Transport, Work, WorldRequest, watched
from hpcdist.transport.call import MESSAGES, Call, Kind, fingerprint, label
from hpcdist.transport.call_site import call_site
from hpcdist.transport.queue import CollectiveQueue, inside
from hpcdist.transport.threads.collectives import VERBS, check_fit
from hpcdist.transport.threads.messages import Envelope, Mailbox


class Meeting:
    """One operation of a group."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.results: list[Any] | None = None
        self.error: Exception | None = None


@final
class ThreadGroup:
    """What the ranks of one group share; `ranks` are their world ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.changed = threading.Condition()
        self.meetings: dict[int, Meeting] = {}
        self.left: dict[int, tuple[str, str]] = {}
        self.letters: list[Envelope] = []
        self.rooms: dict[tuple[tuple[int, ...], int], ThreadGroup] = {}
        self.threads: dict[int, int] = {}
        """The thread that each rank runs on."""
        self.given_up: dict[int, activity.GivenUp] = {}
        """What each rank waited for when its time was over."""

    def subroom(self, ranks: tuple[int, ...], nth: int) -> ThreadGroup:
        """Return the room of the nth group made of `ranks` (world ranks), made by the first."""
        with self.changed:
            return self.rooms.setdefault((ranks, nth), ThreadGroup(ranks))

    def leave(self, rank: int, why: str, details: str = "") -> None:
        """Note that a rank will not come any more."""
        with self.changed:
            self.left[rank] = (why, details)
            for room in self.rooms.values():
                if self.ranks[rank] in room.ranks:
                    room.leave(room.ranks.index(self.ranks[rank]), why, details)
            self.changed.notify_all()

    def meet(self, rank: int, sequence: int, call: Call, timeout_s: float) -> Any:
        """Take part in operation `sequence` and return this rank's result."""
        with self.changed:
            meeting = self.meetings.setdefault(sequence, Meeting())
            meeting.calls[rank] = call
            if meeting.error is None and len(meeting.calls) == len(self.ranks):
                self._hold(meeting)
                self.changed.notify_all()
            elif meeting.error is None:
                self._await(rank, meeting, call, sequence, timeout_s)
            if len(meeting.calls) == len(self.ranks):
                self.meetings.pop(sequence, None)
            if call.error is not None:
                raise call.error
            if meeting.error is not None:
                raise meeting.error
            assert meeting.results is not None
            return meeting.results[rank]

    # ---- what other ranks are doing

    def awaits(self, rank: int, thread: int, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether `rank` can do nothing before the rank on `thread` does.

        It waits for it, or for a rank that does.
        """
        own = self.threads.get(rank, 0)
        if own == thread:
            return True
        return own not in seen and any(
            room.awaits(each, thread, seen | {own}) for room, each in activity.blockers_of(own)
        )

    def _note_giving_up(self, rank: int) -> None:
        words = activity.told(self.threads.get(rank))
        self.given_up[rank] = activity.GivenUp(words, time.monotonic())

    def account(self, ranks: Sequence[int], own: int, waited_s: float) -> str:
        """Return sentences on what `ranks` are doing, to be put behind an error message."""
        now = time.monotonic()
        self._note_giving_up(own)
        return "".join(
            "\n"
            + activity.account_of(
                self.ranks[rank],
                self.left.get(rank, (None, ""))[0],
                self.given_up.get(rank, activity.NOTHING).since(now - waited_s),
                activity.told(self.threads.get(rank)) or None,
            )
            for rank in ranks
            if rank != own
        )

    def _await(
        self, rank: int, meeting: Meeting, call: Call, sequence: int, timeout_s: float
    ) -> None:
        what = (
            f"{label(call, self.ranks)}, operation #{sequence} of the group of ranks "
            f"{list(self.ranks)}"
        )

        def absent() -> list[int]:
            is_over = meeting.results is not None or meeting.error is not None
            return [] if is_over else [each for each in range(len(self.ranks)) if each not in calls]

        calls = meeting.calls
        wait = activity.Wait(lambda: what, lambda: [(self, each) for each in absent()])
        with activity.noted(wait):
            self._await_others(rank, meeting, what, timeout_s)

    def _await_others(self, rank: int, meeting: Meeting, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while meeting.results is None and meeting.error is None:
            gone = [rank for rank in self.left if rank not in meeting.calls]
            if gone:
                why, details = self.left[gone[0]]
                meeting.error = RemoteError(
                    f"rank {self.ranks[gone[0]]} {why} and did not join "
                    f"{label(meeting.calls[rank], self.ranks)}; let every rank of a group take "
                    "part in each of its operations",
                    self.ranks[gone[0]],
                    details,
                )
            elif not self.changed.wait(min(1.0, deadline - time.monotonic())) and (
                time.monotonic() >= deadline
            ):
                absent = [each for each in range(len(self.ranks)) if each not in meeting.calls]
                missing = tuple(self.ranks[each] for each in absent)
                meeting.error = CollectiveTimeout(
                    f"{what} was not joined by all ranks within {timeout_s:g} s; missing ranks: "
                    f"{', '.join(map(str, missing))}. Called at {call_site()}"
                    f"{self.account(absent, rank, timeout_s)}",
                    missing,
                )
        if isinstance(meeting.error, CollectiveTimeout):
            self._note_giving_up(rank)
        self.changed.notify_all()

    def _hold(self, meeting: Meeting) -> None:
        """Compute all results; on the last rank to arrive."""
        calls = [meeting.calls[rank] for rank in range(len(self.ranks))]
        try:
            self._agree(calls)
            meeting.results = VERBS[calls[0].kind](calls)
        except Exception as error:  # whatever it is: everyone waits here
            meeting.error = error

    def _agree(self, calls: list[Call]) -> None:
        for rank, call in enumerate(calls):
            if call.error is not None:
                raise RemoteError(
                    f"{label(call, self.ranks)} was called off on all ranks because rank "
                    f"{self.ranks[rank]} cannot take part: {call.error}",
                    self.ranks[rank],
                    "".join(traceback.format_exception(call.error)),
                )
        if len({fingerprint(call) for call in calls}) > 1:
            raise MismatchError(
                "the ranks disagree; nothing was sent:\n"
                + "\n".join(
                    f"  rank {world}: {label(call, self.ranks)}"
                    for world, call in zip(self.ranks, calls, strict=True)
                )
                + "\nLet every rank call the same operations in the same order, with equal shape, "
                "dtype, op and root"
            )
        check_fit(calls, self.ranks)


def _on_host(call: Call) -> Call:
    """Call off what is in the memory of a device, on all ranks."""
    if call.device is None:
        return call
    error = UsageError(
        f"simulated ranks exchange arrays in host memory only, and this one is on "
        f"{call.device.name}; copy it to the host, or start ranks with mpiexec or srun"
    )
    if call.kind >= MESSAGES:
        raise error
    return Call(call.kind, root=call.root, error=error)


@final
class ThreadTransport(Transport):
    """Rank `rank` of a room."""

    backend = "LOCAL"
    one_node = True

    def __init__(
        self, room: ThreadGroup, rank: int, timeout_s: float, without_mpi: str | None = None
    ) -> None:
        self.ranks = room.ranks
        self.rank, self.size = rank, len(room.ranks)
        self.room = room
        self.user_comm = None
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
        return StartedWorld(place, (socket.gethostname(),), (0,), connect)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time limit of operations from now on; local."""
        self.timeout_s = self._box.timeout_s = timeout_s

    def run(self, call: Call) -> Any:
        """Finish `call` before returning."""
        call = _on_host(call)
        if call.kind >= MESSAGES:
            work = self._box.start(call)
            work.wait()
            return work
        if call.ended is not None:  # told when the group is free again: it may use it
            return watched(self.run, call)
        return self.queue.run(self._perform, call)

    def start(self, call: Call) -> Work:
        """Begin `call`."""
        call = _on_host(call)
        if call.kind >= MESSAGES:
            return self._box.start(call)
        perform = self._perform if call.ended is None else partial(watched, self._perform)
        return self.queue.start(lambda: perform(call), label(call, self.ranks))

    def plan(self, call: Call) -> Plan | None:
        """Have nothing faster than starting `call` anew."""
        return None

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[ThreadTransport, int]:
        """Meet the other members in a room of their own."""
        key = tuple(self.ranks[rank] for rank in ranks)
        nth = self._made[key] = self._made.get(key, 0) + 1
        room = self.room.subroom(key, nth)
        place = key.index(self.ranks[self.rank])
        group = ThreadTransport(room, place, timeout, self.without_mpi)
        ids = Call(Kind.ALL_GATHER_OBJECT, pickles=(Pickled(str(next_id).encode()),), error=error)
        return group, max(int(pickled.meta) for pickled in group.run(ids))

    def synchronize(self, *, on_device: bool = False) -> None:
        """Wait for the queue."""
        self.queue.run(lambda: None)

    def reopen(self) -> ThreadTransport:
        """Meet in the same room again."""
        again = ThreadTransport(self.room, self.rank, self.timeout_s, self.without_mpi)
        again._sequence = self._sequence
        return again

    def together_at_end(self) -> bool:
        """Say yes: simulated ranks end together."""
        return True

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one takes part no longer."""
        self.room.leave(self.rank, why)

    def close(self) -> None:
        """End what is queued."""
        self.queue.refuse_nested()
        self.queue.close()

    @inside(lambda local: local["self"].queue)
    def _perform(self, call: Call) -> Any:
        if call.begin is not None:
            call.begin()
        self._sequence += 1
        result = self.room.meet(self.rank, self._sequence, call, self.timeout_s)
        return call.finish(result) if call.finish is not None else result
