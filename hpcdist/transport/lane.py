"""`Lane`: the collectives of one group, one after the other, in the order they were issued.

A blocking operation runs at once on the caller's thread when nothing is ahead of it. An
asynchronous one is queued and runs on the lane's own thread, so it makes progress while the
caller computes (a thread that blocks inside MPI hides nearly all of the communication, MPI's
own nonblocking collectives hide nothing). Every rank queues in the same order, so ranks may
mix both forms freely. One lane per group: groups never wait for each other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, final

from hpcdist.errors import CollectiveTimeout
from hpcdist.transport.base import Known, Work
from hpcdist.transport.call_site import call_site, issued

Job = Callable[[], Any]


@final
class Lane:
    """Runs jobs strictly one after the other; `name` is for the thread and messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.running = threading.Lock()
        """Held while an operation runs."""
        self.queued = 0
        """Operations queued and not ended; an inline one may run while it is 0."""
        self._counting = threading.Lock()
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run `job` after everything issued before it and return its result."""
        if not self.queued and self.running.acquire(blocking=False):
            try:
                return job(*args)
            finally:
                self.running.release()
        if threading.current_thread() is self._thread:
            return job(*args)  # a callback of an operation: it goes before what is queued
        return self.start(lambda: job(*args), "operation").result()

    def start(self, job: Job, label: str) -> QueuedWork:
        """Queue `job` and return its work; a callback of an operation runs it at once."""
        work = QueuedWork(job, label)
        if threading.current_thread() is self._thread:
            work.execute()
            work.ended.set()
            return work
        with self._counting:
            self.queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(work)
        return work

    def is_current(self) -> bool:
        """Say whether this is the lane's own thread: a callback of an operation."""
        return threading.current_thread() is self._thread

    def close(self, patience_s: float = 1.0) -> bool:
        """End the thread after what is queued; say whether it ended in time."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            with self.running:
                work.execute()
            with self._counting:
                self.queued -= 1
            work.ended.set()
            del work  # its buffers are the caller's again


@final
class QueuedWork(Work):
    """An operation that runs on a lane's thread."""

    def __init__(self, job: Job, label: str) -> None:
        self.ended = threading.Event()
        self._job: Job | None = job
        self._label = label
        self._site = call_site()
        self._value: Any = None
        self._error: BaseException | None = None

    def execute(self) -> None:
        """Run the job and keep its result or exception."""
        job, self._job = self._job, None
        issued.at = self._site
        try:
            self._value = job() if job else None
        except BaseException as error:
            self._error = error
        finally:
            issued.at = None

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation has ended; raise what it raised."""
        if not self.ended.wait(seconds(timeout)):
            raise CollectiveTimeout(
                f"{self._label} has not ended after {seconds(timeout):g} s of wait(); it goes on, "
                "and can be waited for again. A rank that never joins it is named when the "
                "timeout of the group is over"
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Say whether the operation has ended."""
        return self.ended.is_set()

    def result(self) -> Any:
        """Wait, and return what the job returned."""
        self.wait()
        return self._value

    def known(self) -> Known:
        """See `Work.known`."""
        return Known(self._label, self.ended.is_set(), self._error)


def seconds(timeout: Any) -> float | None:
    """Turn seconds (infinity, too) or a `datetime.timedelta` into seconds; None stays None."""
    if timeout is None:
        return None
    given = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    return min(float(given), threading.TIMEOUT_MAX)
