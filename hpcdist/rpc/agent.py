"""`Agent`: one rank's part in RPC: it makes calls, and runs those of others.

It belongs to the `Session`, as groups do, and ends with it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from hpcdist.comm.session import (
    Slot,
    current_session,
    require_session,
    resolve_group,
    simulated_rank,
    standing_for,
)
from hpcdist.errors import CollectiveTimeout, RankFailure, RemoteError, UsageError
from hpcdist.events import listeners
from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc import frames, outcome, pickling
from hpcdist.rpc.clock import Clock
from hpcdist.rpc.frames import Frame, Parcel
from hpcdist.rpc.future import Future, Limit, refusing, thread
from hpcdist.rpc.links import LateError, Link, LinkError
from hpcdist.rpc.mail import Mail
from hpcdist.rpc.names import WorkerInfo
from hpcdist.rpc.serve import Pool, as_call
from hpcdist.rpc.switchboard import Setup, Switchboard
from hpcdist.rpc.telling import Telling
from hpcdist.transport.flight.layout import RPC
from hpcdist.transport.flight.recorder import STARTED, note
from hpcdist.transport.waiting.queue import seconds

_MANY = 32
"""From so many calls under way on, small ones are written together; see `links`."""

_HEARD_AFTER_S = 0.5
"""So long MPI may take to hear of a death that has ended a link."""


class _Pending(NamedTuple):
    """A call that waits for its answer."""

    future: Future[Any]
    link: Link
    name: str


class Counter:
    """What `stats` shows of one function, called or run here."""

    __slots__ = ("bytes_in", "bytes_out", "calls", "late", "queue_s", "run_s", "served")

    def __init__(self) -> None:
        self.calls = self.served = self.late = 0
        self.bytes_in = self.bytes_out = 0
        self.queue_s = self.run_s = 0.0


@final
class Agent:
    """Calls ranks, and is called, from `init_rpc` to `shutdown`."""

    def __init__(self, setup: Setup) -> None:
        self.directory = setup.directory
        self.infos: tuple[WorkerInfo, ...] = setup.directory.infos
        self.me = setup.directory[setup.me]
        self.group = setup.group
        self.closed = ""
        """Why it makes no more calls."""
        self.counters: dict[str, Counter] = {}
        self.done: Future[None] = Future(f"the shutdown of rank {setup.me}")
        """Ends when this rank has no more calls to make: with `serve` and `shutdown`."""
        self.actors: Any = None
        """The objects that `remote` has made; see `rpc.remote`."""
        self.reception = setup.reception
        own = setup.contacts[setup.me].node
        self._near = {rank for rank, each in setup.contacts.items() if each.node == own}
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._given_up: dict[int, _Pending] = {}
        self._counting = threading.Lock()
        rank = simulated_rank()
        self._pool = Pool(setup.threads, setup.max_threads, lambda: standing_for(rank))
        self._clock = Clock(self._pool.spawn)
        self._board = self._board_for(setup)
        _agents.add(self)

    def open(self) -> None:
        """Begin to take what others send; they wait until then."""
        self._board.open()

    def _board_for(self, setup: Setup) -> Any:
        """Return what carries calls: sockets, or messages of MPI."""
        if setup.comm is not None:
            ranks = setup.group.ranks
            return Mail(setup.comm, ranks, self._pool, self._take, self._lost)
        return Switchboard(setup, self._pool, self._take, self._lost, self._has_calls)

    # ---- calling

    def call(
        self,
        to: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: Any = -1,
    ) -> Future[Any]:
        """Call ``fn(*args, **kwargs)`` on a rank; return when its arguments have left this one.

        Raises:
            UsageError: an argument is wrong, or cannot be pickled; nothing was sent.

        """
        if self.closed:
            raise UsageError(f"{self.closed}; call init_rpc again before the next call")
        rank = self.directory.rank_of(to)
        limit_s = math.inf if timeout == -1 else limit_of(timeout)
        parcel = _packed(fn, args, kwargs)
        name = name_of(fn)
        self._count_call(name, parcel)
        number = next(self._numbers)
        future: Future[Any] = Future(f"{name} on {self._named(rank)}")
        future.bind(lambda: self._forget(number), self._pool.spawn)
        until = None
        if limit_s != math.inf:
            until = time.monotonic() + limit_s
            future.limit(Limit(until, lambda: self._give_up(number, limit_s), self._clock.at))
        if listeners:
            future.tell(Telling(f"rpc:{name}", self.group, parcel.nbytes, rank).begin())
        if self.group.flight:
            members = self.group.ranks
            place = rank if members[rank : rank + 1] == [rank] else -1
            future.recorded(note(RPC, self.group.flight, 0, parcel.nbytes, place, STARTED))
        kind = frames.INLINE if getattr(fn, "__hpcdist_inline__", False) else frames.CALL
        try:
            link = self._note(number, future, rank, name, until)
            batched = len(self._pending) > _MANY
            link.send(kind, number, parcel, until, self._pool.spawn, batched=batched)
            if link.ended:  # perhaps after the sweep over its pending calls
                raise LinkError(link.farewell or link.ended)
        except LateError as error:
            self._pending.pop(number, None)
            future.fail(
                CollectiveTimeout(
                    f"{future.what} could not be called within {limit_s:g} s, as no connection "
                    f"could be made ({error}); nothing was sent",
                    (rank,),
                )
            )
        except LinkError as error:
            self._pending.pop(number, None)
            future.fail(_unanswered(future, rank, str(error), self._who_died()))
        except BaseException as error:
            self._pending.pop(number, None)
            future.fail(error)
            raise
        return future

    def _note(
        self, number: int, future: Future[Any], rank: int, name: str, until: float | None
    ) -> Any:
        """Note a call that is about to be sent; return its link, which is not parting."""
        while True:
            link = self._board.link_to(rank, until)
            self._pending[number] = _Pending(future, link, name)
            if not (link.parting and self._board.has_parted(link)):
                return link

    def _has_calls(self, link: Link) -> bool:
        """Return whether a call of this rank is under way by a link, or was given up there."""
        waiting = [*self._pending.values(), *self._given_up.values()]
        return any(each.link is link for each in waiting)

    def ranks_of(self, group: Any) -> list[int]:
        """Return the world ranks of a group, all of which can be called; None for all that can."""
        if group is None:
            return [info.rank for info in self.infos]
        return [self.directory.rank_of(rank) for rank in resolve_group(group).ranks]

    def is_near(self, rank: int) -> bool:
        """Return whether a rank is on this node."""
        return rank in self._near

    def submit(self, call: Callable[[], Any]) -> None:
        """Run a call on one of the threads that run those of other ranks."""
        self._pool.submit(call)

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self.directory[rank].name})"

    def _forget(self, number: int) -> _Pending | None:
        """Wait no more for an answer; when it comes, it is dropped and counted."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._given_up[number] = pending
        return pending

    def _give_up(self, number: int, limit_s: float) -> None:
        pending = self._forget(number)
        if pending is not None:
            pending.future.fail(
                CollectiveTimeout(
                    f"{pending.future.what} did not answer within {limit_s:g} s; it may still run "
                    "there, and what it returns will be dropped",
                    (pending.link.peer,),
                )
            )

    # ---- what arrives

    def _take(self, link: Link, frame: Frame) -> bool:
        """Process a frame; return True if another thread reads the link now."""
        kind = frame.kind
        if kind == frames.CALL:
            link.used = arrived = time.perf_counter()
            if link.has_more or not self._pool.begin():
                self._pool.submit(lambda: self._serve(link, frame, arrived))
                return False
            self._board.read_on(link)
            self._pool.run(lambda: self._serve(link, frame, arrived))
            return True
        if kind == frames.INLINE:
            with refusing("an inline function"):
                self._serve(link, frame, time.perf_counter())
        elif kind == frames.FAREWELL:
            link.farewell = pickling.unpack(frame.parcel)
        elif kind == frames.PARTING:
            self._board.part(link)
        else:
            self._answered(frame)
        return False

    def _answered(self, frame: Frame) -> None:
        pending = self._pending.pop(frame.call, None)
        if pending is not None:
            pending.future.settle(
                lambda: _open(frame, pending.future), failed=frame.kind == frames.FAILURE
            )
        elif (late := self._given_up.pop(frame.call, None)) is not None:
            with self._counting:
                self._counter(late.name).late += 1

    def _lost(self, link: Link) -> None:
        """Fail what waits for an answer from a link that has ended."""
        if link.parting:  # what is noted there is about to be noted elsewhere
            return
        why = self.closed or link.ended
        found = [
            pending
            for calls in (self._pending, self._given_up)
            for number, pending in list(calls.items())
            if pending.link is link and calls.pop(number, None) is not None
        ]
        dead = self._who_died() if found and not self.closed else ()
        for pending in found:  # those that were given up have failed already
            pending.future.fail(_unanswered(pending.future, link.peer, why, dead))

    def _who_died(self) -> tuple[int, ...]:
        """Return which ranks have died, in a job that goes on then. Local."""
        transport = self.group.transport
        return () if transport is None else transport.who_died(_HEARD_AFTER_S)

    # ---- being called

    def _serve(self, link: Link, frame: Frame, arrived: float) -> None:
        """Run a call and answer it; one that returns a `Future` is answered when that ends."""
        begun = time.perf_counter()
        name = "a call"
        try:
            with as_call(self._pool):
                fn, args, kwargs = pickling.unpack(frame.parcel)
                name = name_of(fn)
                if listeners:
                    nbytes = frame.parcel.nbytes
                    with Telling(f"rpc_serve:{name}", self.group, nbytes, link.peer):
                        result = fn(*args, **kwargs)
                else:
                    result = fn(*args, **kwargs)
        except BaseException as error:
            self._reply(link, frame, name, self._failure(name, error), arrived, begun)
            return
        if isinstance(result, Future):
            result.add_done_callback(
                lambda ended: self._reply(
                    link, frame, name, self._outcome(name, ended), arrived, begun
                )
            )
        else:
            self._reply(link, frame, name, self._result(name, result), arrived, begun)

    def _result(self, name: str, result: Any) -> tuple[int, Parcel]:
        try:
            return frames.RESULT, _packed_result(name, result)
        except Exception as error:
            return self._failure(name, error)

    def _failure(self, name: str, error: BaseException) -> tuple[int, Parcel]:
        where = f"{name} on {self._named(self.me.rank)}"
        failed = outcome.describe(error, self.me.rank, where)
        return frames.FAILURE, pickling.pack(failed)

    def _outcome(self, name: str, ended: Future[Any]) -> tuple[int, Parcel]:
        error = ended.exception()
        return self._result(name, ended.result()) if error is None else self._failure(name, error)

    def _reply(
        self,
        link: Link,
        frame: Frame,
        name: str,
        answer: tuple[int, Parcel],
        arrived: float,
        begun: float,
    ) -> None:
        kind, parcel = answer
        self._count_run(name, frame.parcel, parcel, begun - arrived, begun)
        try:
            if not thread.refuses:
                link.send(kind, frame.call, parcel)
            elif not link.send(kind, frame.call, parcel, 0.0, self._pool.spawn):
                self._pool.spawn(lambda: self._send_later(link, kind, frame.call, parcel))
        except LinkError:  # the caller is gone, and has been told by that
            pass

    def _send_later(self, link: Link, kind: int, call: int, parcel: Parcel) -> None:
        """Answer from a thread that may wait, as the one that reads must not."""
        with contextlib.suppress(LinkError):
            link.send(kind, call, parcel)

    # ---- counting

    def _counter(self, name: str) -> Counter:
        counter = self.counters.get(name)
        if counter is None:
            counter = self.counters[name] = Counter()
        return counter

    def _count_call(self, name: str, parcel: Parcel) -> None:
        with self._counting:
            counter = self._counter(name)
            counter.calls += 1
            counter.bytes_out += parcel.nbytes

    def _count_run(
        self, name: str, came: Parcel, goes: Parcel, queue_s: float, begun: float
    ) -> None:
        with self._counting:
            counter = self._counter(name)
            counter.served += 1
            counter.bytes_in += came.nbytes
            counter.bytes_out += goes.nbytes
            counter.queue_s += queue_s
            counter.run_s += time.perf_counter() - begun

    # ---- ending

    def await_own_calls(self, deadline: float) -> None:
        """Wait until no call of this rank is under way, or the deadline."""
        for pending in list(self._pending.values()):
            with contextlib.suppress(Exception):  # its caller hears of it
                pending.future.exception(max(deadline - time.monotonic(), 0.0))

    def close(self, why: str) -> None:
        """Make and take no more calls; those under way fail, here and there. Local."""
        if self.closed:
            return
        self.closed = why
        _agents.discard(self)
        if self.actors is not None:
            self.actors.close()
        self.reception.close()
        self._clock.stop()
        self._board.close(why, pickling.pack(why))
        self._pool.close()

    def abandon(self) -> None:
        """Release, in a forked child, what belongs to its parent."""
        self.closed = (
            f"this process (pid {os.getpid()}) was forked from rank {self.me.rank} and is not a "
            "rank itself, so it cannot call"
        )
        self.reception.abandon()
        self._board.abandon()


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
"""All that are open in this process, for its forked children."""


def _stand_apart() -> None:
    for agent in list(_agents):
        agent.abandon()
    _agents.clear()


os.register_at_fork(after_in_child=_stand_apart)


def _close(agent: Agent | None, why: str) -> None:
    if agent is not None:
        agent.close(why)


AGENT: Slot[Agent | None] = Slot(lambda: None, end=_close)
"""What `init_rpc` has made."""


def require_agent() -> Agent:
    """Return the agent of the current session, or raise `UsageError`."""
    session = current_session()
    agent = None if session is None else session[AGENT]
    if agent is None:
        require_session()
        raise UsageError("this rank takes part in no RPC; call hpcdist.rpc.init_rpc() first")
    return agent


def name_of(fn: Any) -> str:
    """Return the name of a function, for words and counters."""
    called = getattr(fn, "__hpcdist_name__", None)  # what stands for a method of another rank
    if called is not None:
        return str(called)
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if name is None:
        return type(fn).__qualname__
    return f"{module}.{name}" if module else str(name)


def limit_of(timeout: Any) -> float:
    """Return a time limit in seconds; infinity for None, 0 and what is negative.

    Raises:
        UsageError: it is not a number.

    """
    try:
        limit_s = seconds(None if isinstance(timeout, (str, bytes, bool)) else timeout)
    except (TypeError, ValueError):
        limit_s = math.nan
    if (limit_s is None and timeout is not None) or limit_s != limit_s:
        raise UsageError(
            "timeout must be a number of seconds or a timedelta (0, negative or None for no "
            f"limit), got {timeout!r}"
        )
    return math.inf if limit_s is None or limit_s <= 0 else limit_s


def _unanswered(
    future: Future[Any], rank: int, why: str, dead: tuple[int, ...] = ()
) -> RemoteError:
    """Return why a call of `rank` has no answer; of ranks that are `dead`, a `RankFailure`."""
    what = f"{future.what} has not answered: {why}; nobody knows whether it has run"
    if not dead:
        return RemoteError(what, rank)
    who = ", ".join(map(str, dead))
    return RankFailure(f"rank {who} died: {what}. Call dist.recover() on all that are left", dead)


def _packed(fn: Any, args: Any, kwargs: Any) -> Parcel:
    if not callable(fn):
        raise UsageError(f"the callee must be a function, got {fn!r}")
    if not isinstance(args, (tuple, list)) and args is not None:
        raise UsageError(f"args must be a tuple or a list of arguments, got {args!r}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"kwargs must be a dict of arguments by name, got {kwargs!r}")
    for each in kwargs or ():
        if not isinstance(each, str):
            raise UsageError(f"kwargs must have names of arguments as keys, got {each!r}")
    try:
        return pickling.pack((fn, tuple(args or ()), kwargs or {}))
    except Exception as error:
        raise UsageError(
            f"{name_of(fn)} and its arguments cannot be sent ({type(error).__name__}: {error})"
        ) from error


def _packed_result(name: str, result: Any) -> Parcel:
    try:
        return pickling.pack(result)
    except Exception as error:
        raise TypeError(
            f"what {name} returned, a {type(result).__qualname__}, cannot be sent back "
            f"({type(error).__name__}: {error}); return plain data"
        ) from error


def _open(frame: Frame, future: Future[Any]) -> Any:
    try:
        value = pickling.unpack(frame.parcel)
    except Exception as error:
        raise RemoteError(
            f"{future.what} has answered, but what came cannot be unpickled here "
            f"({type(error).__name__}: {error})"
        ) from error
    if frame.kind == frames.FAILURE:
        raise outcome.rebuild(value)
    return value
