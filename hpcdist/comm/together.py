"""`Together`: what fails on one rank of a group is raised on all of them.

`decide`, `share` and `lead` exchange what functions return. ``with together():`` is for a whole
block, in which ranks may communicate as well.

[Note: end of a block] At its end every rank gathers how deep its blocks are nested and what has
failed, and again until all are at the end of the same block. A rank that has failed first does this
with an `error`: whichever operation of the group the others are in, they leave it with a
`RemoteError` at once, and come to the end, too. An operation that ended on all ranks with an error
(`RemoteError.in_step`) leaves them in step, so the next one is a new try; any other error means
that a rank will not come. A rank whose block failed with a `CollectiveTimeout` has waited long
enough: who does not come to the end within a second is told there that it was given up.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, final

from hpcdist.comm import describe_objects
from hpcdist.comm.describe_objects import part_of
from hpcdist.comm.dispatch import described, dispatch
from hpcdist.comm.environment import get_world_size
from hpcdist.comm.group import Group
from hpcdist.comm.making import hurried
from hpcdist.comm.objects import tell_all
from hpcdist.comm.session import current_session, resolve_group
from hpcdist.errors import (
    HpcdistError,
    MismatchError,
    RemoteError,
    UsageError,
    add_note,
    is_secondary,
    notes_of,
)
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Objects, Refusal, refused
from hpcdist.transport.flight import recorder

T = TypeVar("T")
R = TypeVar("R")

Alike = Callable[[BaseException], Exception | None]
"""Returns what all ranks raise for an error of one of them; None: `RemoteError` on the others."""


def together(group: Group | None = None) -> Together:
    """Join the ranks of `group`, so that an error of one rank is raised on all of them. Local.

    As a context manager it is for a block, which every rank of the group has to enter and to
    leave. The rank that fails raises its own exception at the end of the block, the others a
    `RemoteError` that has its rank, its exception and its traceback; if several ranks fail, each
    raises its own, and the rest report the first of them. A rank that waits in a collective of this
    group when another one fails need not wait for its time limit: it gets a `RemoteError` there.

    Its method `lead` calls a function on the first rank and returns the result everywhere.

    Args:
        group: the ranks that take part; None for all. Without `init_parallel_env`, a process that
            is alone is the only one.

    Raises:
        UsageError: this rank is not in the group, or the ranks are not connected yet.

    Example:
        >>> import hpcdist as dist
        >>> with dist.together():
        ...     samples = [1, 2, 3]  # or read the file of this rank
        >>> dist.together().lead(sum, samples)
        6

    """
    if group is None and current_session() is None:
        if get_world_size() > 1:
            raise UsageError(
                f"this process is one of {get_world_size()} ranks, which do not know each other "
                "yet; call hpcdist.init_parallel_env() first"
            )
        return Together()
    group = resolve_group(group)
    if not group.is_member():
        raise UsageError(
            f"rank {group.world_rank} is not in group {group.name}, whose world ranks are "
            f"{group.ranks}; let only these call together"
        )
    return Together(group)


class _Failure(NamedTuple):
    """A rank's error, as it is sent to the others."""

    rank: int
    message: str
    details: str
    kind: type[Exception] | None
    """What all ranks raise; None: its own exception on the rank itself."""
    secondary: bool


class _Outcome(NamedTuple):
    result: Any = None
    failure: _Failure | None = None


class _End(NamedTuple):
    """A rank's message at the end of a block."""

    depth: int
    failure: _Failure | None


class _CallOff(HpcdistError):
    """Why this rank takes part in no operation before the end of its block."""


@final
class Together:
    """The members of a group, one of which leads.

    Args:
        group: None for this process alone.
        first: the world rank of the one that leads; None for the first of the group.
        alike: returns what all ranks raise for an error of one of them; None: a `RemoteError` on
            the others.
        words: what the ranks do, the same on all of them: ranks that do anything else get a
            `MismatchError`.

    Example:
        >>> import hpcdist as dist
        >>> def told():
        ...     together = dist.together()
        ...     return together.lead(lambda: "what rank 0 found out")
        >>> dist.simulate(2, told)
        ['what rank 0 found out', 'what rank 0 found out']

    """

    def __init__(
        self,
        group: Group | None = None,
        first: int | None = None,
        alike: Alike = lambda error: None,
        words: str = "hpcdist.together",
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.nranks
        self.ranks = [0] if group is None else group.ranks
        self.first = 0
        if group is not None and first is not None and group.is_member():
            self.first = group.root_of(first, "coordinator_rank")
        self.alike = alike
        self.words = words

    def __repr__(self) -> str:
        if self.group is None:
            return "<Together: one process alone>"
        return f"<Together: {self.group!r}; rank {self.first_world_rank} leads>"

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
        """Call `own` on every rank, and `do` on the first with all results; return this rank's.

        Collective.

        Args:
            own: what every rank does; its result can be pickled.
            do: takes all results in the order of the ranks, and returns one entry per rank.
            undo: is called on the first rank if `own` or `do` has failed anywhere.

        Raises:
            BaseException: what failed on this rank.
            RemoteError: another rank failed.

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
            raise self._exception(answer.failure, error)
        result: R = answer.result
        return result

    def share(self, own: Callable[[], T]) -> list[T]:
        """Call `own` on every rank and return all results on every rank. Collective.

        Args:
            own: what every rank does; its result can be pickled.

        Raises:
            BaseException: what failed on this rank.
            RemoteError: another rank failed.

        """
        mine, error = self._attempt(own)
        outcomes: list[_Outcome] = [mine]
        if self.group is not None and self._has_others:
            outcomes = tell_all(self.words, mine, self.group)
        failure = next((each.failure for each in outcomes if each.failure), None)
        if failure is not None:
            raise self._exception(failure, error)
        return [each.result for each in outcomes]

    def lead(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` on the first rank and return its result on every rank. Collective.

        Args:
            function: what the first rank does; its result can be pickled.
            args: its arguments by position.
            kwargs: its arguments by name.

        Raises:
            BaseException: on the first rank, what `function` raised.
            RemoteError: on the others, if it failed.

        """
        outcome, error = _Outcome(), None
        if self.leads:
            outcome, error = self._attempt(lambda: function(*args, **kwargs))
        if self._has_others:
            told = [outcome]
            self._dispatch(describe_objects.broadcast_object_list, told, self.first_world_rank)
            outcome = told[0]
        if outcome.failure is not None:
            raise self._exception(outcome.failure, error)
        result: T = outcome.result
        return result

    # ---- blocks

    def __enter__(self) -> Together:
        if self.group is not None:
            blocks = self.group.open_blocks  # one that is gone was interrupted before it began
            blocks[:] = [*(each for each in blocks if each() is not None), weakref.ref(self)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.group is None:
            return
        blocks = [each for each in self.group.open_blocks if each() is not None]
        depth, own = len(blocks), [place for place, each in enumerate(blocks) if each() is self]
        del blocks[own[-1]]
        self.group.open_blocks[:] = blocks
        if not self._has_others:
            return
        try:
            with hurried(self.group.transport, error):
                self._end_block(self.group, depth, error)
        except Exception as reason:
            if error is None:
                raise
            add_note(error, UNTOLD.format(reason))

    def _end_block(self, group: Group, depth: int, error: BaseException | None) -> None:
        """Return once all ranks are here, or raise what another one failed with.

        See [Note: end of a block].
        """
        heard: Exception | None = None
        failure = None if error is None else self._failure(error)
        call_off = (
            None if error is None else _CallOff(f"its block failed with {_describe_error(error)}")
        )
        if call_off is not None:
            call_off.__cause__ = error
        while True:
            ends: list[_End] = []
            end = described(group, _describe_end, ends, _End(depth, failure), call_off)
            transport = group.transport  # anew: the first use of one that was shut down restarts it
            assert transport is not None
            mark = recorder.begin(end, group.flight, None, 0)
            try:
                # not told to listeners: one that fails could call it off again and again
                transport.run(end)
            except (MismatchError, RemoteError, _CallOff) as reason:
                if isinstance(reason, RemoteError) and not reason.in_step:
                    raise
                heard = heard or reason
                failure = failure or self._failure(reason)
                call_off = None
                continue
            finally:
                recorder.end(mark)
            least = min(each.depth for each in ends)
            if depth > least or depth == max(each.depth for each in ends):
                break
        if error is None:
            _raise_first([each.failure for each in ends if each.failure], failure, heard)
            if depth > least:
                raise MismatchError(
                    "this rank ends a block in which not all ranks of the group are; let every "
                    "rank enter and leave the same blocks of hpcdist.together"
                )

    # ----

    @property
    def _has_others(self) -> bool:
        return self.group is not None and self.size > 1

    @property
    def _world_rank(self) -> int:
        return 0 if self.group is None else self.group.world_rank

    def _attempt(self, do: Callable[[], Any]) -> tuple[_Outcome, BaseException | None]:
        try:
            return _Outcome(do()), None
        except BaseException as error:  # an interrupt or exit, too: the others wait for this rank
            return _Outcome(failure=self._failure(error)), error

    def _failure(self, error: BaseException) -> _Failure:
        rank, alike = self._world_rank, self.alike(error)
        where = f"rank {rank}: " if self.size > 1 else ""
        if alike is not None:
            return _Failure(rank, f"{where}{alike}", "", type(alike), secondary=False)
        words = f"rank {rank} failed with {_describe_error(error)}"
        details = "".join(traceback.format_exception(error))
        return _Failure(rank, words, details, None, is_secondary(error))

    def _exception(self, failure: _Failure, own: BaseException | None) -> BaseException:
        """Return what this rank raises for the failure of a rank; its `own`, if it has one."""
        if failure.kind is None or (own is not None and not isinstance(own, Exception)):
            return own or RemoteError(failure.message, failure.rank, failure.details)
        error = failure.kind(failure.message)
        error.__cause__ = own if failure.rank == self._world_rank else None
        return error

    def _gather(self, mine: _Outcome) -> list[_Outcome]:
        if not self._has_others:
            return [mine]
        outcomes: list[_Outcome] = []
        into = outcomes if self.leads else None
        self._dispatch(describe_objects.gather_object, mine, into, self.first_world_rank)
        return outcomes

    def _scatter(self, answers: list[_Outcome]) -> _Outcome:
        if not self._has_others:
            return answers[0]
        mine: list[_Outcome] = []
        given = answers if self.leads else None
        self._dispatch(describe_objects.scatter_object_list, mine, given, self.first_world_rank)
        return mine[0]

    def _dispatch(self, describe: Callable[..., Objects | Refusal], *args: Any) -> None:
        dispatch(self.group, True, part_of(self.words, describe), *args)


UNTOLD = "the other ranks may not know of it: {}"
_END = part_of("end of a block of hpcdist.together", describe_objects.all_gather_object)


def _describe_end(
    group: Group, ends: list[_End], mine: _End, error: Exception | None
) -> Objects | Refusal:
    call = _END(group, ends, mine)
    return call if error is None or call.error is not None else refused(call, error)


def _raise_first(
    failures: Sequence[_Failure], mine: _Failure | None, heard: Exception | None
) -> None:
    """Raise the failure of the first rank that has one of its own; what this rank `heard` itself.

    That all ranks of a disagreement hear themselves.
    """
    first = min(failures, key=lambda each: each.secondary, default=None)
    if heard is not None and (first == mine or isinstance(heard, MismatchError)):
        raise heard
    if first is not None:
        raise RemoteError(first.message, first.rank, first.details)


def _describe_error(error: BaseException) -> str:
    told = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([told, *(each for each in notes_of(error) if each not in told)])
