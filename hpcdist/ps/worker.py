"""What a worker does with what it pulls and pushes, in each of the modes."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import CollectiveTimeout, RemoteError
from hpcdist.ps import route
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.merging import merge, spread, unique
from hpcdist.ps.modes import Async, Geo, Mode, Ssp, Sync
from hpcdist.ps.rows import RowStore
from hpcdist.ps.server import STOPPED
from hpcdist.ps.slots import Slots

if TYPE_CHECKING:
    from hpcdist.ps.calls import Calls
    from hpcdist.rpc.future import Future


class Worker(ABC):
    """The worker's side of a table."""

    @abstractmethod
    def pull(self, ids: NumpyArray, rows: NumpyArray) -> route.Pending:
        """Begin to get rows into an array, which is the result; some ids may be there twice."""

    @abstractmethod
    def push(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        """Hand over gradients, and how often each id was shown and clicked, if that counts.

        Ids are there once each, in ascending order.
        """

    def flush(self) -> None:  # noqa: B027 (most have nothing under way)
        """Wait until the servers have all that was pushed."""

    def stop(self) -> None:
        """Flush, and tell the servers that nothing more comes."""
        self.flush()

    def forget(self) -> None:  # noqa: B027 (most keep nothing)
        """Drop rows of this worker's own: the servers have others now."""

    def set_lr(self, value: float) -> None:  # noqa: B027 (most learn on the servers)
        """Set the learning rate of rows of this worker's own."""


@final
class LockStep(Worker):
    """SYNC: by the collective route."""

    def __init__(self, cluster: Cluster, table: Any) -> None:
        self._cluster, self._table = cluster, table

    def pull(self, ids: NumpyArray, rows: NumpyArray) -> route.Pending:
        """See `route.pull`."""
        once, inverse = unique(ids)
        return route.pull(self._cluster, self._table, once).then(spread(inverse, rows))

    def push(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        """See `route.push`."""
        route.push(self._cluster, self._table, ids, grads, marks)


@final
class Queued(Worker):
    """ASYNC: a thread sends what waits in a bounded queue, merged."""

    def __init__(self, calls: Calls, mode: Async) -> None:
        self._calls, self._most = calls, mode.max_merge_var_num
        self._waiting: queue.Queue[Any] = queue.Queue(mode.send_queue_size)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def pull(self, ids: NumpyArray, rows: NumpyArray) -> route.Pending:
        """Get rows as the servers have them now; what waits in the queue is not in them."""
        return self._calls.pull(ids, rows)

    def push(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        """Queue gradients; wait where the queue is full."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="hpcdist-push", daemon=True)
            self._thread.start()
        self._waiting.put((ids, grads, marks))

    def flush(self) -> None:
        """Wait until the servers have applied all that was pushed; raise what went wrong."""
        self._waiting.join()
        self._raise()

    def stop(self) -> None:
        """Flush, and end the thread."""
        try:
            self.flush()
        finally:
            if self._thread is not None:
                self._waiting.put(None)
                self._thread.join()
                self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _hand_over(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        merged = merge(ids, grads)
        sums = merge(ids, marks).grads if marks.shape[1] else marks[: len(merged.ids)]
        self._calls.by_owner("push", merged.ids, merged.grads, sums).wait()

    def _send(self) -> None:
        while (first := self._waiting.get()) is not None:
            taken = [first]
            while len(taken) < self._most and not self._waiting.empty():
                more = self._waiting.get()
                if more is None:
                    self._waiting.put(None)  # there is room: it was just taken
                    self._waiting.task_done()
                    break
                taken.append(more)
            try:
                self._hand_over(*map(np.concatenate, zip(*taken, strict=True)))
            except BaseException as error:  # told by the next push, or by flush
                self._error = error
            for _ in taken:
                self._waiting.task_done()


_ASK_S = 0.5
"""How often those that are behind are asked whether they are still there."""


@final
class Clocked(Worker):
    """SSP: a clock per worker, which every server knows."""

    def __init__(self, calls: Calls, mode: Ssp) -> None:
        self._calls, self._mode = calls, mode
        self._limit_s = calls.timeout_s if mode.timeout is None else mode.timeout
        self.clock = 0

    def pull(self, ids: NumpyArray, rows: NumpyArray) -> route.Pending:
        """Get rows when nobody is more than `staleness` pushes behind; who asks for them waits."""
        clock, until = self.clock - self._mode.staleness, time.monotonic() + self._limit_s
        if clock <= 0:
            return self._calls.pull(ids, rows)
        begun: list[route.Pending] = []
        asked = ids.copy()  # they may be looked up later

        def begin() -> bool:
            if not (begun or self._slow(clock)):
                begun.append(self._calls.pull(asked, rows))
            return bool(begun)

        def finish() -> Any:
            if not begin():
                self._wait_for(clock, until)
                begin()
            return begun[0].result()

        begin()
        return route.Pending(finish, lambda: begin() and begun[0].is_completed())

    def push(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        """Apply gradients on their servers, then set this worker's clock on all servers."""
        self._calls.by_owner("push", ids, grads, marks).wait()
        self.clock += 1
        self._calls.on_all("tick", self._calls.worker, self.clock)

    def stop(self) -> None:
        """Report to the servers that nobody has to wait for this worker."""
        self._calls.on_all("tick", self._calls.worker, STOPPED)

    def _slow(self, clock: int) -> list[int]:
        """Return which workers have pushed less often than `clock` says."""
        return sorted({*chain(*self._calls.on_all("behind", clock))})

    def _wait_for(self, clock: int, until: float) -> None:
        """Ask until all servers have heard enough of all workers: no thread of theirs waits."""
        pause, ask_at = 1e-4, time.monotonic() + _ASK_S
        asked: dict[int, Future[bool]] = {}
        while True:
            answered = {each for each, answer in asked.items() if answer.done()}
            gone = [each for each in answered if _has_gone(asked[each])]
            slow = self._slow(clock)
            if not slow:
                return
            for each in gone:
                if each in slow:  # it has not stopped in good order meanwhile
                    self._miss(each, asked[each])
            if time.monotonic() > ask_at:
                ask_at = time.monotonic() + _ASK_S
                anew = [i for i in slow if i not in asked or i in answered]
                asked |= {i: self._calls.is_there(i) for i in anew}
            if time.monotonic() > until:
                names = tuple(self._calls.names[each] for each in slow)
                raise CollectiveTimeout(
                    f"pull waited {self._limit_s:g} s for "
                    f"{', '.join(f'rank {each}' for each in names)}, more than "
                    f"{self._mode.staleness} pushes behind this rank's {self.clock}; let all "
                    "workers push as often, stop those that have ended (stop_worker), or give "
                    "hpcdist.ps.Ssp a larger staleness or timeout",
                    names,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _miss(self, worker: int, asked: Future[bool]) -> None:
        """Note that a worker that is behind will not push again."""
        rank, why = self._calls.names[worker], asked.exception() or "it makes no more calls"
        raise RemoteError(
            f"pull waits for rank {rank}, which is more than {self._mode.staleness} pushes behind "
            f"this rank's {self.clock} and has ended without stop_worker: {why}",
            rank,
        )


def _has_gone(asked: Future[bool]) -> bool:
    """Return whether an answer of a worker is that it makes no more calls, or that none comes."""
    return asked.exception() is not None or not asked.wait()


@final
class Replica(Worker):
    """GEO: rows of this worker's own, and what they were when it last heard of the servers.

    It has a row where the servers have one: what is pushed to other ids changes nothing, but the
    servers hear how often they were shown and clicked, and may give them a row.
    """

    def __init__(self, calls: Calls, mode: Geo, new_store: Callable[..., RowStore]) -> None:
        self._calls, self._every, self._new_store = calls, mode.k_steps, new_store
        self.forget()

    def forget(self) -> None:
        """See `Worker.forget`."""
        # which ids have rows, and how many, is up to the servers
        self._own = self._new_store(entry=None, max_rows=None)
        self._base = self._new_store(entry=None, max_rows=None, optimizer="sgd")
        self._known = Slots()
        self._touched: list[tuple[NumpyArray, NumpyArray]] = []

    def set_lr(self, value: float) -> None:
        """See `Worker.set_lr`."""
        self._own.learning_rate = value

    def pull(self, ids: NumpyArray, rows: NumpyArray) -> route.Pending:
        """Return this worker's rows; those that it has not had yet come from the servers."""
        once, inverse = unique(ids)
        self._fetch(once)
        spread(inverse, rows)(self._own.pull(once, create=False))
        return route.Pending(lambda: rows, lambda: True)

    def push(self, ids: NumpyArray, grads: NumpyArray, marks: NumpyArray) -> None:
        """Change this worker's rows; every k steps tell the servers how, and hear of the others."""
        self._fetch(ids)
        held = self._holds(ids)
        self._own.push(ids[held], grads[held])
        self._touched.append((ids, marks))
        if len(self._touched) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Add a share of how the rows have changed to those of the servers, and take these."""
        if not self._touched:
            return
        touched, self._touched = self._touched, []
        every, shown = map(np.concatenate, zip(*touched, strict=True))
        ids, marks, _ = merge(every, shown)
        held = self._holds(ids)
        changes = np.zeros((ids.size, self._own.dim), self._own.dtype)
        changes[held] = (self._own.pull(ids[held]) - self._base.pull(ids[held])) / (
            self._calls.workers
        )
        if ids.size:
            self._take(ids, self._calls.by_owner("add", ids, changes, marks).result())

    def _holds(self, ids: NumpyArray) -> NumpyArray:
        """Return which ids have a row here."""
        held: NumpyArray = self._own.slots.find(ids) >= 0
        return held

    def _fetch(self, ids: NumpyArray) -> None:
        new = ids[self._known.find(ids) < 0]
        if len(new):
            self._take(new, self._calls.by_owner("fetch", new).result())
            self._known.insert(new)

    def _take(self, ids: NumpyArray, found: NumpyArray) -> None:
        """Take rows over, of those ids that have one: where the last column is 1."""
        held = found[:, -1] == 1
        for each in (self._own, self._base):
            each.assign(ids[held], found[held, :-1])


def worker_of(mode: Mode, cluster: Cluster, table: Any) -> Worker:
    """Return a worker's side of a table in a mode."""
    if isinstance(mode, Sync):
        return LockStep(cluster, table)
    from hpcdist.ps.calls import Calls  # RPC is for those who call

    calls = Calls(cluster, table)
    if isinstance(mode, Async):
        return Queued(calls, mode)
    if isinstance(mode, Ssp):
        return Clocked(calls, mode)
    return Replica(calls, mode, table.new_store)
