"""`Rendezvous`: the members of a new group find each other before MPI is asked to join them.

Creating a communicator blocks inside MPI until all members have called; a member that never
does would hang the others for ever. So the members first report to the group's first member, up a
binomial tree: each of them when all below it have, for all of these. The first one answers when
all have come, with the group's id, down the same tree. All waits are polled, so a member that does
not come becomes a `CollectiveTimeout`. Only the members talk.

Who waits longer than members that are in step do reports to the first one itself, which answers
it itself, and hands on at once what others report to it: so nobody depends on a member that does
not come, and that one is named.

As in an `Agreement`, a meeting that is complete only after a member's deadline is void: that
member may have given up. Where all who are missing have left the parent group, it is called off.

Meetings of the same members are numbered, so that nothing of one that was given up counts in the
next. A member that has missed some, or the first one where it has, goes on to the number of the
others: `Late`.

A member that is interrupted while others are missing calls the meeting off: it tells the first
one, and waits a moment for an answer that may be on its way already, as all had come before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NoReturn, final

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, HpcdistError, RemoteError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.control import Control
from hpcdist.transport.mpi.news import News
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import BEYOND_S, LEFT_GRACE_S, LISTEN_AFTER_S, poll

Group = tuple[int, int]
"""The first rank of a group, and a hash of all its ranks (the same on each)."""
Key = tuple[Group, int]
"""A group, and how often it has met."""


class Refusal(NamedTuple):
    """In place of an id: a rank of the group cannot take part."""

    rank: int
    why: str


class Late(NamedTuple):
    """In place of an id: the others have given this meeting up, and are at another one."""

    number: int


Answer = int | Refusal | Late | tuple[int, ...]
"""The group's id, or why there is no group: the ranks that have not come."""

PATIENCE_S = 0.2
"""So long a member relies on the tree."""

INTERRUPTED = "it was interrupted"

_ON_ITS_WAY_S = 1.0
"""So long an answer may be, to a member that calls the meeting off."""


class Report(NamedTuple):
    """What a member tells of itself and those below it, which are the next ones in the group."""

    told: int | Refusal
    """The next id it has."""
    deadline: float
    places: range

    def joined(self, other: Report) -> Report:
        """Return what is to be told of the members of both."""
        both = self.told, other.told
        refusals = [each for each in both if isinstance(each, Refusal)]
        told = refusals[0] if refusals else max(both)
        start, stop = self.places.start, max(self.places.stop, other.places.stop)
        return Report(told, min(self.deadline, other.deadline), range(start, stop))


class _Part(NamedTuple):
    """What this rank does in a meeting."""

    ranks: tuple[int, ...]
    key: Key
    own: Report
    timeout_s: float
    interrupts: Collection[BaseException]


def below(place: int, size: int) -> range:
    """Return the places of a group that report by way of this one, itself among them.

    Example:
        >>> [list(below(place, 6)) for place in (0, 2, 4, 5)]
        [[0, 1, 2, 3, 4, 5], [2, 3], [4, 5], [5]]

    """
    return range(place, min(place + (place & -place), size) if place else size)


def above(place: int) -> int:
    """Return the place that this one reports to: without its lowest bit."""
    return place & place - 1


class _Meeting:
    """What has been heard in a meeting."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, Report]] = []
        self.answer: Answer | None = None


@final
class Rendezvous:
    """The meetings of one rank of a parent group; `world_ranks` name its ranks in messages.

    `news` are those of the parent group, None if it has one rank.
    """

    def __init__(self, comm: MPI.Intracomm, world_ranks: Sequence[int], news: News | None) -> None:
        self._comm = comm
        self._world_ranks = world_ranks
        self._news = news
        self._numbers: dict[Group, int] = {}
        self._ended: dict[Group, int] = {}
        self._meetings: dict[Key, _Meeting] = {}
        self._late: list[tuple[int, Key]] = []
        """Who has reported, of groups whose first member this is, to meetings that had ended."""
        self._report = Control(comm, Tag.REPORT)
        self._answer = Control(comm, Tag.ANSWER)

    def meet(
        self,
        ranks: tuple[int, ...],
        next_id: int,
        timeout_s: float,
        interrupts: Collection[BaseException] = (),
    ) -> int:
        """Wait until all `ranks` have come here and return the largest `next_id` of theirs.

        Once there are `interrupts`, the meeting is called off, unless all have come.
        """
        answer: Answer = Late(0)
        place = ranks.index(self._comm.rank)
        while isinstance(answer, Late):
            key = self._next(ranks, answer.number)
            own = Report(next_id, time.time() + timeout_s, range(place, place + 1))
            answer = self._take_part(_Part(ranks, key, own, timeout_s, interrupts))
        if not isinstance(answer, int):
            self._fail(ranks, timeout_s, answer)
        return answer

    def call_off(self, ranks: tuple[int, ...], why: str = INTERRUPTED) -> None:
        """Let the others hear, when they come here, that this rank cannot take part."""
        key, place = self._next(ranks), ranks.index(self._comm.rank)
        refusal = Refusal(self._comm.rank, why)
        if place:
            self._report.tell(ranks[0], (key, Report(refusal, math.inf, range(place, place + 1))))
        else:
            self._tell(ranks[1:], key, refusal)
        self._end(key)

    def _next(self, ranks: tuple[int, ...], at_least: int = 0) -> Key:
        group = ranks[0], hash(ranks)
        number = self._numbers[group] = max(self._numbers.get(group, 0) + 1, at_least)
        return group, number

    def _take_part(self, part: _Part) -> Answer:
        """Report, and hand on the answer."""
        ranks, key, place = part.ranks, part.key, part.own.places.start
        meeting = self._meetings.setdefault(key, _Meeting())
        answer: Answer | None = None
        try:
            answer = self._ask(meeting, part) if place else self._decide(meeting, part)
        except HpcdistError:  # those below hear of it as this one did
            raise
        except BaseException:
            answer = (self._comm.rank,)
            raise
        finally:
            if answer is not None:
                here = {rank for rank, _ in meeting.reports}
                self._tell(ranks[1:] if part.interrupts and place == 0 else here, key, answer)
            self._end(key)
        return answer

    def _tell(self, ranks: Iterable[int], key: Key, answer: Answer) -> None:
        for rank in ranks:
            self._answer.tell(rank, (key, answer))

    def _end(self, key: Key) -> None:
        self._meetings.pop(key, None)
        group, number = key
        self._ended[group] = max(number, self._ended.get(group, 0))

    def _decide(self, meeting: _Meeting, part: _Part) -> Answer:
        """Wait for all members; on the first one."""
        missing, report = self._hear(meeting, part, part.timeout_s)
        if meeting.answer is not None:  # nobody comes any more
            return meeting.answer
        if not isinstance(report.told, Refusal) and (newer := self._newer(part.key)):
            return Late(newer)
        if missing and part.interrupts:
            return self._withdrawal()
        if isinstance(report.told, Refusal):
            return report.told
        in_time = time.time() <= report.deadline
        if not missing and in_time:
            return report.told
        return tuple(part.ranks[place] for place in sorted(missing)) or part.ranks[:1]

    def _ask(self, meeting: _Meeting, part: _Part) -> Answer:
        """Report for all below this member, or else for itself alone; return the answer."""
        ranks, key, own, timeout_s, interrupts = part
        patience, first = min(PATIENCE_S, timeout_s / 4), ranks[0]
        end, place = time.monotonic() + timeout_s + BEYOND_S, own.places.start
        missing, report = self._hear(meeting, part, patience)
        handed_on = 0 if missing else len(meeting.reports)

        def is_answered() -> bool:
            nonlocal handed_on
            self._collect()
            for _, other in meeting.reports[handed_on:]:
                self._report.tell(first, (key, other))
                handed_on += 1
            return meeting.answer is not None

        def is_over() -> bool:
            return is_answered() or bool(interrupts)

        if not missing:
            self._report.tell(ranks[above(place)], (key, report))
            poll(is_over, patience, wait=self._as_wait(ranks))
        if meeting.answer is None and (missing or above(place)):
            self._report.tell(first, (key, own))
        look = self._looking(meeting, ranks, {0}, is_answered)
        poll(is_over, end - time.monotonic(), look, wait=self._as_wait(ranks))
        if meeting.answer is None and interrupts:
            withdrawal = self._withdrawal()
            self._report.tell(first, (key, own._replace(told=withdrawal, deadline=math.inf)))
            if not poll(is_answered, _ON_ITS_WAY_S):
                return withdrawal
        if meeting.answer is None:
            self._fail(ranks, timeout_s, ranks[:1])
        return meeting.answer

    def _withdrawal(self) -> Refusal:
        return Refusal(self._comm.rank, INTERRUPTED)

    def _hear(self, meeting: _Meeting, part: _Part, limit_s: float) -> tuple[set[int], Report]:
        """Wait for the reports of those below; return who is missing, and what is to be told."""
        ranks, key, own, _, interrupts = part
        place = own.places.start
        missing, report, heard = {*below(place, len(ranks))} - {place}, own, 0

        def is_complete() -> bool:
            nonlocal report, heard
            self._collect()
            while heard < len(meeting.reports):
                told = meeting.reports[heard][1]
                heard += 1
                missing.difference_update(told.places)
                report = report.joined(told)
            if meeting.answer is not None or interrupts:
                return True
            if place:
                return not missing
            self._answer_late(key)
            if isinstance(report.told, Refusal):
                return not missing
            return self._newer(key) > 0 or (not missing and time.time() <= report.deadline)

        look = None if place else self._looking(meeting, ranks, missing, is_complete)
        poll(is_complete, limit_s, look, wait=self._as_wait(ranks))
        return missing, report

    def _looking(
        self,
        meeting: _Meeting,
        ranks: tuple[int, ...],
        missing: set[int],
        done: Callable[[], bool],
    ) -> Callable[[float], None]:
        """Return what ends a long wait for `missing` places if all of them have left."""

        def look(waited: float) -> None:
            if self._news is None or waited < LISTEN_AFTER_S:
                return
            self._news.listen()
            left = {ranks[place] for place in missing} & self._news.left.keys()
            if left and len(left) == len(missing) and not poll(done, LEFT_GRACE_S):
                rank = min(left)
                meeting.answer = Refusal(rank, f"it {self._news.left[rank]}")

        return look

    def _collect(self) -> bool:
        """Take in what has arrived, of this and other meetings; return False."""
        for rank, (key, report) in self._report.heard():
            if (meeting := self._meeting(key)) is not None:
                meeting.reports.append((rank, report))
            elif key[0][0] == self._comm.rank and not isinstance(report.told, Refusal):
                self._late.append((rank, key))
        for _, (key, answer) in self._answer.heard():
            meeting = self._meeting(key)
            if meeting is not None and meeting.answer is None:
                meeting.answer = answer  # before this rank comes, if the first one is interrupted
        return False

    def _answer_late(self, key: Key) -> None:
        """Let those who are behind, or have been answered before, know which meeting this is."""
        group, number = key
        late, self._late = self._late, [each for each in self._late if each[1][0] != group]
        for rank, other in late:
            if other[0] == group:
                self._answer.tell(rank, (other, Late(number)))

    def _newer(self, key: Key) -> int:
        """Return the number of a later meeting of this group that a member is at; 0 if none is."""
        group, number = key
        later = [
            other
            for (each, other), meeting in self._meetings.items()
            if each == group and other > number
            if any(not isinstance(report.told, Refusal) for _, report in meeting.reports)
        ]
        return max(later, default=0)

    def _meeting(self, key: Key) -> _Meeting | None:
        """Return the meeting that something is told of; None: it has ended, that comes late."""
        group, number = key
        if key not in self._meetings and number <= self._ended.get(group, 0):
            return None
        return self._meetings.setdefault(key, _Meeting())

    def _what(self, ranks: Sequence[int]) -> str:
        return f"new_group({[self._world_ranks[rank] for rank in ranks]})"

    def _as_wait(self, ranks: Sequence[int]) -> Wait:
        return Wait(lambda: self._what(ranks))

    def _fail(
        self, ranks: Sequence[int], timeout_s: float, absent: Refusal | Sequence[int]
    ) -> NoReturn:
        if isinstance(absent, Refusal):
            rank = self._world_ranks[absent.rank]
            raise RemoteError(
                f"{self._what(ranks)} was called off on all its members because rank {rank} cannot "
                f"take part: {absent.why}",
                rank,
            )
        missing, account = tuple(self._world_ranks[rank] for rank in absent), ""
        if self._news is not None:
            others = [rank for rank in absent if rank != self._comm.rank]
            answers = self._news.ask(others, self._as_wait(ranks), timeout_s)
            account = self._news.account(others, answers, timeout_s)
        raise CollectiveTimeout(
            f"{self._what(ranks)} was not called by all its "
            f"members within {timeout_s:g} s; missing ranks: {', '.join(map(str, missing))}. "
            f"Called at {call_site()}. Let every member make the same groups in the same order"
            f"{account}",
            missing,
        )
