"""`Rendezvous`: the members of a new group find each other before MPI is asked to join them.

Creating a communicator blocks inside MPI until all members have called; a member that never
does would hang the others for ever. So every member first reports to the group's first member,
which answers all of them when all have come, with the group's id. Both waits are polled, so a
member that does not come becomes a `CollectiveTimeout`. Only the members talk.

As in an `Agreement`, a meeting that is complete only after a member's deadline is void: that
member may have given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple, NoReturn, final

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, RemoteError
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.control import Control
from hpcdist.transport.mpi.news import News
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import BEYOND_S, poll

Key = tuple[int, int, int]
"""A group's first rank, a hash of all its ranks (the same on each), and how often they met."""


class Refusal(NamedTuple):
    """In place of an id: a rank of the group cannot take part."""

    rank: int
    why: str


_Report = tuple[int | Refusal, float]
"""What a member tells: the next id it has, and its deadline."""


@final
class Rendezvous:
    """The meetings of one rank of a parent group; `world_ranks` name its ranks in messages.

    `news` are those of the parent group, None if it has one rank.
    """

    def __init__(self, comm: MPI.Intracomm, world_ranks: Sequence[int], news: News | None) -> None:
        self._comm = comm
        self._world_ranks = world_ranks
        self._news = news
        self._numbers: dict[tuple[int, int], Iterator[int]] = {}
        self._reports: dict[Key, dict[int, _Report]] = {}
        self._answers: dict[Key, int | Refusal | tuple[int, ...]] = {}
        self._report = Control(comm, Tag.REPORT)
        self._answer = Control(comm, Tag.ANSWER)

    def meet(self, ranks: tuple[int, ...], next_id: int, timeout_s: float) -> int:
        """Wait until all `ranks` have come here and return the largest `next_id` of theirs."""
        key, report = self._next(ranks), (next_id, time.time() + timeout_s)
        if self._comm.rank == ranks[0]:
            return self._receive(key, ranks, report, timeout_s)
        self._report.tell(ranks[0], (key, report))
        answered, wait = lambda: self._collect() or key in self._answers, self._as_wait(ranks)
        if not poll(answered, timeout_s + BEYOND_S, wait=wait):
            self._fail(ranks, timeout_s, ranks[:1])
        answer = self._answers.pop(key)
        if not isinstance(answer, int):
            self._fail(ranks, timeout_s, answer)
        return answer

    def call_off(self, ranks: tuple[int, ...], error: Exception, timeout_s: float) -> None:
        """Report to the others, when they come here, that this rank cannot take part."""
        key, report = self._next(ranks), (Refusal(self._comm.rank, str(error)), float("inf"))
        if self._comm.rank != ranks[0]:
            self._report.tell(ranks[0], (key, report))
            return
        with contextlib.suppress(CollectiveTimeout, RemoteError):
            self._receive(key, ranks, report, timeout_s)

    def _next(self, ranks: tuple[int, ...]) -> Key:
        group = ranks[0], hash(ranks)
        return (*group, next(self._numbers.setdefault(group, count(1))))

    def _receive(self, key: Key, ranks: tuple[int, ...], own: _Report, timeout_s: float) -> int:
        """Collect all reports and answer them; on the first member."""
        reports = self._reports.setdefault(key, {})
        reports[ranks[0]] = own
        met, wait = lambda: self._collect() or len(reports) == len(ranks), self._as_wait(ranks)
        complete = poll(met, timeout_s, wait=wait)
        in_time = time.time() <= min(deadline for _, deadline in reports.values())
        missing = tuple(rank for rank in ranks if rank not in reports) or ranks[:1]
        told = [each for each, _ in reports.values()]
        refusals = [each for each in told if isinstance(each, Refusal)]
        group_id = max((each for each in told if isinstance(each, int)), default=0)
        answer = (*refusals, group_id if complete and in_time else missing)[0]
        for rank in reports:
            if rank != ranks[0]:
                self._answer.tell(rank, (key, answer))
        del self._reports[key]
        if not isinstance(answer, int):
            self._fail(ranks, timeout_s, answer)
        return answer

    def _collect(self) -> bool:
        """Take in what has arrived, of this and other meetings; return False."""
        for rank, (key, report) in self._report.heard():
            self._reports.setdefault(key, {})[rank] = report
        for _, (key, answer) in self._answer.heard():
            self._answers[key] = answer
        return False

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
