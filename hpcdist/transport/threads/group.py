"""`ThreadGroup`: what ranks that are threads share, and where they meet.

Operation k of a group is a `Meeting`: the last rank to arrive compares what all called and computes
the result for everyone. Whoever waits in vain knows who is missing.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, final

from hpcdist.errors import CollectiveTimeout, HpcdistError, MismatchError, RemoteError
from hpcdist.transport.call.call import AnyMessage, Call, Collective, Message, label
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.presence.membership import Membership
from hpcdist.transport.threads.collectives import VERBS, check_fit
from hpcdist.transport.waiting import activity


class Envelope:
    """A message that was sent and not yet received."""

    def __init__(self, source: int, call: AnyMessage) -> None:
        self.source, self.call = source, call
        self.content: Any
        if isinstance(call, Message):
            self.content = call.data.reshape(-1).copy()
        else:
            self.content = [pickled.copy() for pickled in call.pickles]


class Meeting:
    """One operation of a group."""

    def __init__(self) -> None:
        self.calls: dict[int, Collective] = {}
        self.sites: dict[int, str] = {}
        """The lines that called, by world rank."""
        self.results: list[Any] | None = None
        self.error: Exception | None = None


def _own(error: Exception) -> Exception:
    """Return the error that one rank raises for all: its traceback is of that rank alone."""
    if not isinstance(error, HpcdistError):
        return error
    own = copy.copy(error)
    own.__cause__, own.__suppress_context__ = error.__cause__, error.__suppress_context__
    return own


@final
class ThreadGroup:
    """What the ranks of one group share; `ranks` are their world ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.changed = threading.Condition()
        self.meetings: dict[int, Meeting] = {}
        self.membership = Membership(self.ranks)
        self.left: dict[int, tuple[str, str]] = {}
        self.envelopes: dict[tuple[int, int], list[Envelope]] = {}
        """Messages sent and not received, by receiver and tag."""
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
            self.membership.note(self.ranks[rank], why)
            for room in self.rooms.values():
                if self.ranks[rank] in room.ranks:
                    room.leave(room.ranks.index(self.ranks[rank]), why, details)
            self.changed.notify_all()

    def meet(self, rank: int, sequence: int, call: Collective, timeout_s: float) -> Any:
        """Take part in operation `sequence` and return this rank's result."""
        with self.changed:
            meeting = self.meetings.setdefault(sequence, Meeting())
            meeting.calls[rank] = call
            meeting.sites[self.ranks[rank]] = call_site()
            if meeting.error is None and len(meeting.calls) == len(self.ranks):
                self._hold(meeting)
                self.changed.notify_all()
            elif meeting.error is None:
                self._await(rank, meeting, call, sequence, timeout_s)
            if len(meeting.calls) == len(self.ranks):
                self.meetings.pop(sequence, None)
            if call.error is not None and not isinstance(meeting.error, CollectiveTimeout):
                raise call.error
            if meeting.error is not None:
                raise _own(meeting.error)
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
            self._agree(calls, meeting.sites)
            meeting.results = VERBS[calls[0].kind](calls)
        except Exception as error:  # whatever it is: everyone waits here
            meeting.error = error

    def _agree(self, calls: list[Collective], sites: dict[int, str]) -> None:
        for rank, call in enumerate(calls):
            if call.error is not None:
                raise RemoteError(
                    f"{label(call, self.ranks)} was called off on all ranks because rank "
                    f"{self.ranks[rank]} cannot take part: {call.error}",
                    self.ranks[rank],
                    "".join(traceback.format_exception(call.error)),
                    in_step=True,
                )
        if len({call.fingerprint() for call in calls}) > 1:
            error = MismatchError(
                "the ranks disagree; nothing was sent:\n"
                + "\n".join(
                    f"  rank {world}: {label(call, self.ranks)} at {sites[world]}"
                    for world, call in zip(self.ranks, calls, strict=True)
                )
                + "\nLet every rank call the same operations in the same order, with equal shape, "
                "dtype, op and root"
            )
            error.call_sites = sites
            raise error
        try:
            check_fit(calls, self.ranks)
        except MismatchError as error:
            error.call_sites = sites
            raise
