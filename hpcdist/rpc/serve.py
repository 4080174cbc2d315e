"""`Pool`: the threads of a rank that read its connections and run what others call.

[Note: who reads] Each connection is read by one thread. When a call has arrived and nothing waits
behind it, this thread lets another one read on, and runs the call itself: so the call changes no
thread on its way. Of several calls all but the last go to other threads, or queue.

[Note: one more thread] Threads that take turns at Python's lock are slower than one that does all.
So when `_EAGER` calls run, further ones queue for these. Another thread stands by meanwhile, and
takes one when for `_STAND_BY_S` none has ended.

[Note: never stuck] At most `most` calls run at a time, and further ones queue. A call that waits
for a call of its own does not count, so calls that call back, however deep, find a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from hpcdist.rpc.future import thread

logger = logging.getLogger("hpcdist.rpc")

Task = Callable[[], Any]


_EAGER = 4
_STAND_BY_S = 0.0005


class _Worker:
    """A thread of the pool: what it does next, and the gate at which it waits for that."""

    __slots__ = ("gate", "task")

    def __init__(self, task: Task) -> None:
        self.task: Task | None = task
        self.gate = threading.Lock()
        self.gate.acquire()


@final
class Pool:
    """Threads that are made when there is none free; `keep` of them stay when they are.

    `around` is entered by each thread for its life.
    """

    def __init__(
        self, keep: int, most: int, around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.keep, self.most = keep, most
        self._around = around
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._queue: deque[Task] = deque()
        self._running = 0
        self._ended = 0
        self._growing = False
        self._closed = False

    @property
    def running(self) -> int:
        """Calls that run, without those that wait for others."""
        return self._running

    def spawn(self, task: Task) -> None:
        """Run `task` on a thread of its own, however many there are; what never ends, or soon."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            self._start(task)
        else:
            worker.task = task
            worker.gate.release()

    def submit(self, call: Task) -> None:
        """Run a call, when it is its turn."""
        with self._lock:
            self._queue.append(call)
            grows = self._must_grow()
        if grows:
            self.spawn(self._grow)

    def begin(self) -> bool:
        """Return whether this thread may run a call now; it then must `run` it."""
        with self._lock:
            if self._running >= min(self.most, _EAGER):
                return False
            self._running += 1
            return True

    def run(self, call: Task) -> None:
        """Run a call that has begun, and those that have queued meanwhile."""
        following: Task | None = call
        while following is not None:
            _run(following)
            following = self._next()

    def close(self) -> None:
        """Start no more calls, and let the threads end that have nothing to do."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.gate.release()

    def _must_grow(self) -> bool:
        """Return whether to have one more thread look at the queue; asked with the lock held."""
        if self._growing or not self._queue or self._running >= self.most:
            return False
        self._growing = True
        return True

    def _grow(self) -> None:
        """Run what has queued, if those that run do not; see [Note: one more thread]."""
        while True:
            ended = self._ended
            if self._running >= _EAGER:
                time.sleep(_STAND_BY_S)
            with self._lock:
                if not self._queue or self._running >= self.most:
                    self._growing = False
                    return
                if self._running < _EAGER or self._ended == ended:
                    self._growing = False
                    self._running += 1
                    call = self._queue.popleft()
                    grows = self._must_grow()
                    break
        if grows:
            self.spawn(self._grow)
        self.run(call)

    def _next(self) -> Task | None:
        """End a call; return one that has queued and takes its place."""
        with self._lock:
            self._ended += 1
            if self._queue and self._running <= self.most:
                return self._queue.popleft()
            self._running -= 1
            return None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow another call to run while this one waits; see [Note: never stuck]."""
        with self._lock:
            self._running -= 1
            grows = self._must_grow()
        if grows:
            self.spawn(self._grow)
        try:
            yield
        finally:
            with self._lock:
                self._running += 1

    def _start(self, task: Task) -> None:
        worker = _Worker(task)
        threading.Thread(target=self._work, args=(worker,), name="hpcdist-rpc", daemon=True).start()

    def _work(self, worker: _Worker) -> None:
        with self._around():
            while (task := worker.task) is not None:
                worker.task = None
                _run(task)
                del task
                with self._lock:
                    if self._closed or len(self._idle) >= self.keep:
                        return
                    self._idle.append(worker)
                worker.gate.acquire()


def _run(task: Task) -> None:
    try:
        task()
    except BaseException:
        logger.exception("a thread of hpcdist.rpc failed")


@final
class as_call:  # noqa: N801 (a block)
    """Mark this thread as running a call: where it waits, another one may run."""

    __slots__ = ("_before", "_pool")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        """Begin."""
        self._before, thread.waiting = thread.waiting, self._pool.waiting

    def __exit__(self, *_: object) -> None:
        """End."""
        thread.waiting = self._before
