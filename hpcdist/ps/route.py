"""The collective route: all ranks of a cluster exchange ids and rows in lock step.

[Note: meetings] Every operation begins with a meeting: one all-to-all of three integers, in which
each rank tells what it is about to do, with which table, and how many ids it has for whom. So all
ranks see alike whether the workers agree, and a rank that only serves, or has stopped, and so tells
nothing but that, learns what it takes part in. Workers that have stopped go on like this until
all of them have: one that has fewer batches than the others holds nobody up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import alltoall_single
from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.comm.objects import all_gather_object
from hpcdist.errors import CheckpointError, MismatchError, RemoteError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.ids import owners
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.waiting.work import Known, Work


class Verb(IntEnum):
    """What a rank does in a meeting."""

    SERVES = 0
    STOPPED = 1
    PULL = 2
    PUSH = 3
    CREATE = 4
    STATS = 5
    SAVE = 6
    LOAD = 7
    SHRINK = 8
    BARRIER = 9
    BEGIN = 10
    SAVED = 11
    SET_LR = 12
    EXPORT = 13


_PASSIVE = (Verb.SERVES, Verb.STOPPED)


# ---- planning


class Requests(NamedTuple):
    """Ids in the order of their servers: which those are, and how many each server gets."""

    order: NumpyArray
    counts: NumpyArray


def requests_of(ids: NumpyArray, servers: int) -> Requests:
    """Return which ids go to which of the servers; those of one server keep their order. Pure."""
    owner = owners(ids, servers)
    return Requests(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=servers))


def agreed(told: NumpyArray, ranks: Sequence[int], names: Sequence[str]) -> tuple[Verb | None, int]:
    """Return what the ranks of a meeting do, and the number of the table; None: all have stopped.

    Args:
        told: by rank, its verb and the number of its table.
        ranks: for messages.
        names: of the tables.

    Raises:
        MismatchError: two of them do different things.

    """
    active = [(rank, tuple(each)) for rank, each in enumerate(told) if each[0] not in _PASSIVE]
    if not active:
        return None, -1
    first, what = active[0]
    for rank, other in active:
        if other != what:
            raise MismatchError(
                f"the workers do different things: rank {ranks[first]} is in "
                f"{_in_words(what, names)}, but rank {ranks[rank]} in {_in_words(other, names)}; "
                "let all of them make the same calls in the same order, with as many batches"
            )
    return Verb(what[0]), int(what[1])


def _in_words(what: tuple[int, ...], names: Sequence[str]) -> str:
    verb = Verb(what[0]).name.lower()
    return f"{verb} of table {names[what[1]]!r}" if 0 <= what[1] < len(names) else verb


# ---- meetings


class Meeting(NamedTuple):
    """What the ranks do together, and how many ids this rank gets from each."""

    verb: Verb | None
    table: Any
    received: list[int]


def meet(
    cluster: Cluster,
    verb: Verb,
    table: int = -1,
    counts: NumpyArray | None = None,
    error: Exception | None = None,
) -> Meeting:
    """Exchange with all ranks what each is about to do; see [Note: meetings].

    Raises:
        MismatchError: the workers do different things; on every rank.
        UsageError: this rank gave `error`, whose words it has.
        RemoteError: another one did.

    """
    group = cluster.group
    own = np.zeros((group.nranks, 3), np.int64)
    own[:, 0], own[:, 1] = verb, table
    if counts is not None:
        own[list(cluster.servers), 2] = counts
    told = np.empty_like(own)
    _alltoall(group, told, own, error=error)
    tables = list(cluster.tables)
    does, number = agreed(told[:, :2], group.ranks, tables)
    known = cluster.tables[tables[number]] if number >= 0 else None
    return Meeting(does, known, [int(each) for each in told[:, 2]])


def _alltoall(
    group: Group,
    out: NumpyArray,
    own: NumpyArray,
    gives: Sequence[int] | None = None,
    gets: Sequence[int] | None = None,
    *,
    error: Exception | None = None,
    sync_op: bool = True,
) -> Work:
    """Exchange, or tell the others why this rank cannot."""
    if error is not None:
        return decline(group, Kind.ALLTOALL, _as_usage(error), sync_op=sync_op)
    return alltoall_single(out, own, group, sync_op, in_split_sizes=gives, out_split_sizes=gets)


def _as_usage(error: Exception) -> UsageError:
    if isinstance(error, UsageError):
        return error
    usage = UsageError(f"{type(error).__name__}: {error}")
    usage.__cause__ = error
    return usage


# ---- pull and push


@final
class Pending(Work):
    """A pull under way: `finish` waits for what is under way and returns the rows."""

    def __init__(self, finish: Callable[[], Any], ready: Callable[[], bool]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._ready, self._value = ready, None

    def wait(self, timeout: Any = None) -> bool:
        """Block until the rows are there."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return whether the rows are there, without blocking."""
        return self._finish is None or self._ready()

    def result(self) -> Any:
        """Wait, and return the rows."""
        self.wait()
        return self._value

    def then(self, make: Callable[[Any], Any]) -> Pending:
        """Return a work whose result is made of that of this one."""
        return Pending(lambda: make(self.result()), self.is_completed)

    def known(self) -> Known:
        """See `Work.known`."""
        return Known("pull", self._finish is None)


def pull(cluster: Cluster, table: Any, ids: NumpyArray) -> Pending:
    """Begin to get the rows of `ids`, each of which occurs once. Collective."""
    plan = requests_of(ids, len(cluster.servers))
    meeting = meet(cluster, Verb.PULL, table.number, plan.counts)
    arriving = _exchange_rows(cluster, table, ids[plan.order], plan.counts, meeting.received)

    def in_order() -> NumpyArray:
        sorted_rows = arriving.result()
        rows: NumpyArray = np.empty_like(sorted_rows)
        rows[plan.order] = sorted_rows
        return rows

    return Pending(in_order, arriving.is_completed)


def push(cluster: Cluster, table: Any, *arrays: NumpyArray) -> None:
    """Hand ids, gradients and marks to the servers, in the order of the ranks. Collective."""
    plan = requests_of(arrays[0], len(cluster.servers))
    meeting = meet(cluster, Verb.PUSH, table.number, plan.counts)
    given = [each[plan.order] for each in arrays]
    _exchange_gradients(cluster, table, given, plan.counts, meeting.received)


def _exchange_rows(
    cluster: Cluster, table: Any, ids: NumpyArray, counts: NumpyArray, received: list[int]
) -> Pending:
    gives = _by_rank(cluster, counts)
    asked = _exchange(cluster, ids, gives, received)
    error, found = None, np.empty((len(asked), table.options.dim), table.options.dtype)
    if table.shard is not None:
        try:
            found = np.ascontiguousarray(table.shard.pull(asked))
        except Exception as reason:  # the others wait for these rows
            error = reason
    rows = np.empty((len(ids), table.options.dim), table.options.dtype)
    work = _alltoall(cluster.group, rows, found, received, gives, error=error, sync_op=False)

    def finish() -> NumpyArray:
        work.wait()
        return rows

    return Pending(finish, work.is_completed)


def _exchange_gradients(
    cluster: Cluster,
    table: Any,
    arrays: Sequence[NumpyArray],
    counts: NumpyArray,
    received: list[int],
) -> None:
    gives = _by_rank(cluster, counts)
    got = [_exchange(cluster, each, gives, received) for each in arrays]
    error = None
    if table.shard is not None:
        try:
            table.shard.push(*got)
        except Exception as reason:  # the others would go on without knowing
            error = reason
    done = np.empty(cluster.group.nranks, np.int64)
    _alltoall(cluster.group, done, np.zeros_like(done), error=error)


def _by_rank(cluster: Cluster, counts: NumpyArray) -> list[int]:
    found = [0] * cluster.group.nranks
    for rank, count in zip(cluster.servers, counts, strict=True):
        found[rank] = int(count)
    return found


def _exchange(cluster: Cluster, own: NumpyArray, gives: list[int], gets: list[int]) -> NumpyArray:
    out = np.empty((sum(gets), *own.shape[1:]), own.dtype)
    if 0 in own.shape[1:]:  # rows of no elements
        return out
    _alltoall(cluster.group, out, np.ascontiguousarray(own), gives, gets)
    return out


def hand_over(
    cluster: Cluster, arrays: Sequence[NumpyArray], gives: NumpyArray
) -> list[NumpyArray]:
    """Send rows of arrays to other ranks; return what has come, in the order of ranks. Collective.

    Args:
        cluster: whose ranks.
        arrays: with as many rows each, those for the first rank first.
        gives: how many of them each rank of the group gets.

    """
    gets = np.empty_like(gives)
    _alltoall(cluster.group, gets, gives)
    return [_exchange(cluster, each, gives.tolist(), gets.tolist()) for each in arrays]


# ---- what is done seldom


class Told(NamedTuple):
    """What a worker says of an operation: words that must be alike, and what a server needs."""

    words: tuple[Any, ...]
    needed: Any = None


def perform(
    cluster: Cluster,
    verb: Verb,
    told: Told,
    table: Any = None,
    error: Exception | None = None,
    own: Any = None,
) -> Any:
    """Run on all ranks what all workers ask for alike; return its result. Collective.

    `own` is what this rank needs itself, and tells nobody. `error` is why it cannot take part.
    """
    number = -1 if table is None else table.number
    return _perform(cluster, meet(cluster, verb, number, None, error), told, own)


def _perform(cluster: Cluster, meeting: Meeting, told: Told | None, own: Any = None) -> Any:
    everyone: list[Told | None] = []
    all_gather_object(everyone, told, cluster.group)
    asked = [(rank, each) for rank, each in enumerate(everyone) if each is not None]
    first, what = asked[0]
    verb = meeting.verb
    assert verb is not None
    for rank, other in asked:
        if other.words != what.words:
            differ = next(
                (pair for pair in zip(what.words, other.words, strict=False) if pair[0] != pair[1]),
                (what.words, other.words),
            )
            raise MismatchError(
                f"the ranks differ in {verb.name.lower()}: rank {cluster.world_rank(first)} has "
                f"{differ[0]}, but rank {cluster.world_rank(rank)} has {differ[1]}; give the same "
                "on all of them"
            )
    needed = next((each.needed for _, each in asked if each.needed is not None), None)
    return HANDLERS[verb](cluster, meeting.table, Told(what.words, needed if own is None else own))


HANDLERS: dict[Verb, Callable[[Cluster, Any, Told], Any]] = {
    Verb.BARRIER: lambda cluster, table, told: None,
}
"""What each operation does that is done seldom; `table` and `save` add theirs."""


def follow(cluster: Cluster, verb: Verb) -> None:
    """Take part in what the workers do until all of them have stopped. Collective.

    What a worker is refused, or where workers disagree, they hear themselves, and may go on.
    """
    nothing = np.zeros(len(cluster.servers), np.int64)
    none = np.empty(0, np.int64)
    while True:
        try:
            meeting = meet(cluster, verb)
            if meeting.verb is None:
                break
            table = meeting.table
            if meeting.verb is Verb.PULL:
                _exchange_rows(cluster, table, none, nothing, meeting.received).wait()
            elif meeting.verb is Verb.PUSH:
                arrays = table.options.nothing()
                _exchange_gradients(cluster, table, arrays, nothing, meeting.received)
            else:
                _perform(cluster, meeting, None)
        except (MismatchError, CheckpointError, UsageError):  # on all ranks
            continue
        except RemoteError as error:
            if not error.in_step:
                raise
    cluster.over = True
