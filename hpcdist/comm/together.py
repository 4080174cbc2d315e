"""`Team`: the ranks that save or load together, or this process alone.

One rank, the first, looks at the disk and decides; all others obey it, since a file system may
show different things to different nodes. What fails on one rank is raised on all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, final

from hpcdist.comm.environment import get_world_size
from hpcdist.comm.group import Group
from hpcdist.comm.objects import gather_object, scatter_object_list
from hpcdist.comm.session import current_session, resolve_group
from hpcdist.errors import CheckpointError, MismatchError, RemoteError, UsageError

T = TypeVar("T")
R = TypeVar("R")

_SAME_EVERYWHERE: dict[str, type[Exception]] = {
    each.__name__: each for each in (UsageError, MismatchError, CheckpointError)
}
"""Errors that all ranks raise as they are."""


class _Failure(NamedTuple):
    """What a rank tells the others of its error."""

    rank: int
    kind: str
    message: str
    details: str


class _Outcome(NamedTuple):
    result: Any = None
    failure: _Failure | None = None


@final
class Team:
    """The members of `group`, led by world rank `first`; None for this process alone."""

    def __init__(self, group: Group | None = None, first: int | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.nranks
        self.ranks = [0] if group is None else group.ranks
        self.first = 0
        if group is not None and first is not None and group.is_member():
            self.first = group.root_of(first, "coordinator_rank")

    @property
    def first_world_rank(self) -> int:
        """World rank of the first rank."""
        return self.ranks[self.first]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first."""
        return self.rank == self.first

    def decide(
        self,
        own: Callable[[], T],
        do: Callable[[Sequence[T]], Sequence[R]],
        undo: Callable[[], Any] | None = None,
    ) -> R:
        """Call `own` on every rank and `do` on the first with all results; return this rank's own.

        Collective. `do` returns one entry per rank. If a rank has failed, the first calls `undo`.

        Raises:
            CheckpointError: a rank failed with it, or with an `OSError`; on every rank.
            UsageError, MismatchError: a rank failed with it; on every rank.
            RemoteError: another rank failed otherwise.

        """
        mine, error = self._attempt(own)
        outcomes = self._gather(mine)
        answers: list[_Outcome] = []
        if outcomes:
            failure = next((each.failure for each in outcomes if each.failure), None)
            if failure is None:
                led, led_error = self._attempt(lambda: do([each.result for each in outcomes]))
                error, failure = error or led_error, led.failure
                answers = [_Outcome(each) for each in led.result or ()]
            if failure is not None:
                if undo is not None:
                    undo()
                answers = [_Outcome(failure=failure)] * self.size
        answer = self._scatter(answers)
        if answer.failure is not None:
            raise _exception(answer.failure, self._world_rank, error)
        result: R = answer.result
        return result

    def share(self, own: Callable[[], T]) -> list[T]:
        """Call `own` on every rank and return all results on every rank. Collective."""
        return self.decide(own, lambda results: [list(results)] * self.size)

    def lead(self, do: Callable[[], T]) -> T:
        """Call `do` on the first rank and return its result on every rank. Collective."""
        return self.decide(lambda: None, lambda _: [do()] * self.size)

    @property
    def _world_rank(self) -> int:
        return 0 if self.group is None else self.group.world_rank

    def _attempt(self, do: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
        try:
            return _Outcome(do()), None
        except Exception as error:
            known = isinstance(error, tuple(_SAME_EVERYWHERE.values()))
            kind = "CheckpointError" if isinstance(error, OSError) else type(error).__name__
            message = str(error) if known else _in_words(error)
            where = f"rank {self._world_rank}: " if self.size > 1 else ""
            failure = _Failure(
                self._world_rank, kind, where + message, "" if known else traceback.format_exc()
            )
            return _Outcome(failure=failure), error

    def _gather(self, mine: _Outcome) -> list[_Outcome]:
        if self.group is None or self.size == 1:
            return [mine]
        outcomes: list[_Outcome] = []
        gather_object(mine, outcomes if self.leads else None, self.first_world_rank, self.group)
        return outcomes

    def _scatter(self, answers: list[_Outcome]) -> _Outcome:
        if self.group is None or self.size == 1:
            return answers[0]
        mine: list[_Outcome] = []
        scatter_object_list(
            mine, answers if self.leads else None, self.first_world_rank, self.group
        )
        return mine[0]


def team_of(group: Group | None, first: int | None = None) -> Team:
    """Return the team of `group`; without a session the one of this process, if it is alone.

    Raises:
        UsageError: the launcher started several ranks, but they are not connected yet.

    """
    if group is not None or current_session() is not None:
        return Team(resolve_group(group), first)
    if get_world_size() > 1:
        raise UsageError(
            f"this process is one of {get_world_size()} ranks, which do not know each other yet; "
            "call hpcdist.init_parallel_env() first"
        )
    return Team()


def reading_team(group: Group | None, first: int | None = None) -> Team:
    """Return the team of `group`; without a session this process alone, which does no harm."""
    return team_of(group, first) if group is not None or current_session() is not None else Team()


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return f"{type(error).__name__}: {error}"


def _exception(failure: _Failure, rank: int, own: Exception | None) -> Exception:
    """Return what this rank raises for the failure of a rank, maybe its own."""
    mine = own if failure.rank == rank else None
    kind = _SAME_EVERYWHERE.get(failure.kind)
    if kind is not None:
        error = kind(failure.message)
        error.__cause__ = mine
        return error
    return mine or RemoteError(failure.message, failure.rank, failure.details)
