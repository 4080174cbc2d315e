"""`Executor`: a `concurrent.futures.Executor` whose tasks run on ranks of the job.

The ranks stay what they are: they run the program, and the tasks beside it, as all calls of other
ranks. One thread, the `_Dispatcher`, has the tasks and the load of each rank, so nothing is locked;
it also runs the callbacks of futures, which may therefore call other ranks and wait for them.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, final

from hpcdist.comm.group import Group
from hpcdist.comm.session import simulated_rank, standing_for
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc.agent import Agent, require_agent
from hpcdist.rpc.future import Future
from hpcdist.rpc.names import WorkerInfo
from hpcdist.rpc.outcome import is_gone

T = TypeVar("T")


@final
class Executor(futures.Executor):
    """Run functions on other ranks: a `concurrent.futures.Executor`. Local.

    For whatever takes an executor: `concurrent.futures.wait` and `as_completed`, asyncio's
    ``run_in_executor``, dask's ``scheduler=``. A task goes to the rank that has the fewest tasks of
    this executor; of several, to the one that has had none for longest. Until a rank is free it can
    be cancelled.

    Args:
        group: the ranks that run tasks; None for all that `init_rpc` has brought together.
        ranks: which of them, each by rank, name or `WorkerInfo`; None for the whole group.
        include_self: whether this rank runs tasks, too, beside its program. By default it does if
            `ranks` names it, or if there is no other one.
        tasks_per_rank: how many tasks a rank runs at once, in threads.

    Raises:
        UsageError: no rank is left, or one of `ranks` is unknown, given twice or not in `group`.

    What a task raises its future raises, with the traceback of the other rank. Tasks of a rank that
    dies fail with a `RemoteError` that names it, and the other ranks run what is left. Once all are
    dead, what waits and what is submitted fails with `concurrent.futures.BrokenExecutor`.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.rpc.init_rpc()
        >>> with dist.rpc.Executor() as executor:
        ...     list(executor.map(pow, range(4), [2] * 4))
        [0, 1, 4, 9]
        >>> dist.rpc.shutdown()

    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        ranks: Iterable[int | str | WorkerInfo] | None = None,
        include_self: bool | None = None,
        tasks_per_rank: int = 1,
    ) -> None:
        agent = require_agent()
        integer(tasks_per_rank, "tasks_per_rank", 1)
        members = _chosen(agent, group, ranks, include_self)
        self._max_workers = len(members) * tasks_per_rank  # dask asks for it
        self._dispatcher = _Dispatcher(agent, members, tasks_per_rank)
        self._dispatcher.start()
        # what was submitted is done, also where nobody has called shutdown
        weakref.finalize(self, self._dispatcher.close)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        """Run ``fn(*args, **kwargs)`` on one of the ranks; return its future at once.

        Args:
            fn: a function that can be pickled.
            args: its arguments by position.
            kwargs: its arguments by name.

        """
        future: futures.Future[T] = futures.Future()
        self._dispatcher.add(_Task(future, fn, args, kwargs))
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Run `fn` for each of the `iterables`' elements; return the results in their order.

        Args:
            fn: called with one element of each iterable, on one of the ranks.
            iterables: read at once, unless there is a `buffersize`.
            timeout: seconds, from now on, after which the iterator raises `TimeoutError`.
            chunksize: elements that one call takes; more than 1 where the calls are short.
            buffersize: calls that may be ahead of the results that were taken; None for all.
                The elements beyond them are not read, so the iterables may be without end.

        """
        if not isinstance(chunksize, int) or chunksize < 1:
            raise UsageError(f"chunksize must be >= 1, got {chunksize!r}")
        if buffersize is not None and (not isinstance(buffersize, int) or buffersize < 1):
            raise UsageError(f"buffersize must be None or > 0, got {buffersize!r}")
        end = None if timeout is None else time.monotonic() + timeout
        rows = zip(*iterables)  # noqa: B905 - the shortest ends it, as everywhere
        if chunksize == 1:
            return self._in_order((partial(self.submit, fn, *row) for row in rows), buffersize, end)
        chunks = iter(lambda: list(itertools.islice(rows, chunksize)), [])
        calls = (partial(self.submit, _run_chunk, fn, chunk) for chunk in chunks)
        results = self._in_order(calls, buffersize, end)
        return (result for chunk in results for result in chunk)

    def _in_order(
        self, calls: Iterator[Callable[[], Any]], ahead: int | None, end: float | None
    ) -> Iterator[Any]:
        """Issue the `calls` that may be ahead; return what yields the results."""
        pending = deque(call() for call in itertools.islice(calls, ahead))
        return _taken(pending, calls, end)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks.

        Args:
            wait: return when all tasks are done; else at once, and they are done all the same.
            cancel_futures: cancel the tasks that no rank has begun.

        """
        self._dispatcher.close(cancel_futures)
        if wait:
            self._dispatcher.join()


class _Task(NamedTuple):
    future: futures.Future[Any]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@final
class _Dispatcher:
    """The thread that hands out tasks. Other threads put into `_inbox` what it shall do."""

    def __init__(self, agent: Agent, ranks: Iterable[int], tasks_per_rank: int) -> None:
        self._agent = agent
        self._most = tasks_per_rank
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._door = threading.RLock()
        """Held while a task is put in, so that none comes after the end."""
        self._closed = False
        self._broken: futures.BrokenExecutor | None = None
        self._waiting: deque[_Task] = deque()
        self._running = 0
        self._load = dict.fromkeys(ranks, 0)
        """Tasks of each rank that is alive; the one that has had none for longest comes first."""
        self._ending = False
        self._thread = threading.Thread(
            target=self._run, args=(simulated_rank(),), name="rpc-executor", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def add(self, task: _Task) -> None:
        with self._door:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._broken is not None:
                raise self._broken
            self._inbox.put(partial(self._waiting.append, task))

    def close(self, cancel: bool = False) -> None:
        with self._door:
            self._closed = True
            self._inbox.put(partial(self._end, cancel))

    def join(self) -> None:
        if threading.current_thread() is not self._thread:  # or a callback would wait for itself
            self._thread.join()

    # ---- what the thread does

    def _run(self, rank: dict[str, Any]) -> None:
        with standing_for(rank):
            while not self._ending or self._waiting or self._running:
                self._inbox.get()()
                self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and (rank := self._least_loaded()) is not None:
            task = self._waiting.popleft()
            if task.future.set_running_or_notify_cancel():
                self._send(rank, task)

    def _least_loaded(self) -> int | None:
        rank = min(self._load, key=self._load.__getitem__, default=None)
        return None if rank is None or self._load[rank] >= self._most else rank

    def _send(self, rank: int, task: _Task) -> None:
        try:
            reply = self._agent.call(rank, task.fn, task.args, task.kwargs)
        except BaseException as error:  # it cannot be pickled, or the agent is gone
            task.future.set_exception(error)
            return
        self._load[rank] += 1
        self._running += 1
        done = partial(self._finish, rank, task.future)
        reply.add_done_callback(lambda reply: self._inbox.put(partial(done, reply)))

    def _finish(self, rank: int, future: futures.Future[Any], reply: Future[Any]) -> None:
        self._running -= 1
        load = self._load.pop(rank, 0)
        error = reply.exception()
        if not is_gone(error):
            self._load[rank] = load - 1  # behind the others
        elif not self._load:
            self._give_up(error)
        if error is None:
            future.set_result(reply.result())
        else:
            future.set_exception(error)

    def _give_up(self, error: BaseException | None) -> None:
        """Fail what waits, and what comes: no rank is left."""
        broken = futures.BrokenExecutor(f"all ranks of this executor are gone; the last: {error}")
        broken.__cause__ = error
        with self._door:
            self._broken = broken
            self._inbox.put(partial(self._drop, broken))
        self._drop(broken)

    def _drop(self, error: BaseException | None) -> None:
        """Fail what waits, or cancel it where there is no `error`."""
        while self._waiting:
            future = self._waiting.popleft().future
            if error is None:
                future.cancel()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _end(self, cancel: bool) -> None:
        self._ending = True
        if cancel:
            self._drop(None)


def _run_chunk(fn: Callable[..., T], rows: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*row) for row in rows]


def _taken(
    pending: deque[futures.Future[Any]], calls: Iterator[Callable[[], Any]], end: float | None
) -> Iterator[Any]:
    """Yield the results of `pending`; issue another of the `calls` for each that is taken."""
    try:
        while pending:
            try:
                result = pending[0].result(None if end is None else end - time.monotonic())
            finally:
                first = pending.popleft()
                first.cancel()  # nobody waits for it any more
                del first
            pending.extend(call() for call in itertools.islice(calls, 1))
            yield result
            del result
    finally:
        for future in pending:
            future.cancel()


def _chosen(
    agent: Agent,
    group: Group | None,
    ranks: Iterable[int | str | WorkerInfo] | None,
    include_self: bool | None,
) -> list[int]:
    """Return the ranks that run tasks."""
    members, me = agent.ranks_of(group), agent.me.rank
    if ranks is None:
        found = [*members]
        if include_self is None:
            include_self = found == [me]
    else:
        found = [agent.directory.rank_of(each) for each in ranks]
        include_self = include_self is not False
    for rank in found:
        if rank not in members:
            raise UsageError(f"rank {rank} is not in the group, which has ranks {members}")
    if len(set(found)) < len(found):
        raise UsageError(f"ranks {found} contain a rank twice; name each rank once")
    found = [rank for rank in found if rank != me or include_self]
    if not found:
        raise UsageError(
            f"no rank is left to run tasks: give ranks other than this one, {me}, or "
            "include_self=True"
        )
    return found
