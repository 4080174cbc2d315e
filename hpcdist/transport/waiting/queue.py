"""`CollectiveQueue`: the collectives of one group, one after the other, in order of issue.

A blocking operation runs at once on the caller's thread when nothing is ahead of it. An
asynchronous one is queued and runs on the queue's own thread, so it makes progress while the
caller computes (a thread that blocks inside MPI hides nearly all of the communication, MPI's
own nonblocking collectives hide nothing). Every rank queues in the same order, so ranks may
mix both forms freely. One queue per group: groups never wait for each other.

[Note: nested] What Python runs in the middle of an operation (a signal handler, a destructor, what
an object does while it is unpickled) may not wait for another operation of the same group: it would
wait for itself. Whether a thread is in the middle of one is told by the `Turn`, which is asked only
where the thread would have to wait. A listener is told before and after the operation, so it may do
anything.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast, final

from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.transport.flight.call_site import call_site, issued
from hpcdist.transport.flight.recorder import end, fail
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.polling import AT_ONCE, Ending, drop_held, held, raise_held
from hpcdist.transport.waiting.turn import Turn
from hpcdist.transport.waiting.unheard import error_of, tell_dropped
from hpcdist.transport.waiting.work import Known, Work

Job = Callable[[], Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def ending(operation: _Function) -> _Function:
    """Make a function that runs in a turn mark its errors, and raise what is `held` at its end."""

    @wraps(operation)
    def ends(*args: Any, **kwargs: Any) -> Any:
        try:
            result = operation(*args, **kwargs)
        except BaseException as error:
            _mark_inside(error)
            drop_held()  # of this frame
            raise
        if held:
            raise_held()
        return result

    return cast("_Function", ends)


def _mark_inside(error: BaseException) -> None:
    """Note that an operation that had its turn is left by `error`; see `UsageError.inside`."""
    if isinstance(error, UsageError):
        error.inside = True


def refusal() -> UsageError:
    """Return what is raised in the middle of an operation; see [Note: nested]."""
    error = UsageError(
        f"an operation was called, or waited for, at {call_site()} in the middle of another one of "
        "the same group on the same thread, and would wait for that one for ever; in a signal "
        "handler, a destructor or code that unpickles an object only note the work, and call the "
        "operation after the one under way has ended"
    )
    error.nested = True
    return error


@final
class CollectiveQueue:
    """Runs jobs strictly one after the other; `name` is for the thread and messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.queued: deque[QueuedWork] = deque()
        """Operations queued and not ended; an inline one may run while there are none."""
        self._awaited = 0
        """How many threads wait for what they have queued."""
        self.turn = Turn()
        self._starting = threading.RLock()
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run `job` after everything issued before it and return its result.

        Raises:
            UsageError: this thread is in the middle of an operation; see [Note: nested].

        """
        taken: list[bool] = []
        try:
            if not self.queued and not self.turn.is_inside():
                taken.extend(map(self.turn.take, AT_ONCE))
            if taken and taken[0]:
                result = job(*args)
        except BaseException as error:
            if taken and taken[0]:
                _mark_inside(error)
                drop_held()  # of this frame
            raise
        finally:  # [Note: given back]
            if taken and taken[0]:
                self.turn.give_back()
        if taken and taken[0]:
            if held:
                raise_held()
            return result
        self.refuse_nested()
        if self.is_current():  # a callback of an operation: it goes before what is queued
            return self.turn.call(job, *args)
        work = self.start(lambda: self.turn.call(job, *args), "operation", detached=True)
        self._awaited += 1
        try:
            return work._value_at_end()
        finally:
            self._awaited -= 1

    def start(self, job: Job, label: str, *, detached: bool = False) -> QueuedWork:
        """Queue `job` and return its work; a callback of an operation runs it at once.

        See `Work.detach` for one that is `detached`.
        """
        work = QueuedWork(job, label, self, detached=detached)
        if self.is_current():
            self.refuse_nested()
            work.execute()
            work.end()
            return work
        if self._thread is None:
            self._start_thread()
        work.thread = self._thread.ident if self._thread else None
        self.queued.append(work)
        self._queue.put(work)
        return work

    def _start_thread(self) -> None:
        if self._starting._is_owned():  # type: ignore[attr-defined]
            raise refusal()
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def is_current(self) -> bool:
        """Return whether this is the queue's own thread: a callback of an operation."""
        return threading.current_thread() is self._thread

    def refuse_nested(self) -> None:
        """Raise `UsageError` where this thread is in the middle of an operation: [Note: nested].

        The operation under way goes on; see `poll`.
        """
        if self.turn.is_inside():
            raise refusal()

    def close(self, patience_s: float = 1.0) -> bool:
        """End the thread after what is queued; say whether it ended in time.

        Raises:
            UsageError: this is the thread; a listener cannot end what tells it.

        """
        if self._thread is None:
            return True
        if self.is_current():
            raise refusal()
        self._queue.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def linger(self, patience_s: float) -> None:
        """End the thread after what is queued: the program, at its end, waits so long at most.

        Ranks that come to these operations later find this one in them.
        """
        if self._thread is not None:
            self._queue.put(None)
            _lingering.append((self._thread, time.monotonic() + patience_s))

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self.turn.serve(work.execute)
            self.queued.popleft()
            # asked before it ends: whoever waits may drop it at once
            is_dropped = sys.getrefcount(work) <= _OWN_REFERENCES and not self._awaited
            work.end()
            if is_dropped:
                work.tell_dropped()
            del work  # its buffers are the caller's again

    def under_way(self) -> list[str]:
        """Return in words which operations have not ended; nothing of one that is detached."""
        return [work.left_over() for work in tuple(self.queued)]


_lingering: list[tuple[threading.Thread, float]] = []
"""The threads of queues, and until when to wait for them."""


def await_lingering() -> None:
    """Wait for all queues that `linger`; at the end of the program, while MPI can be used."""
    while _lingering:
        thread, until = _lingering.pop()
        thread.join(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))


_OWN_REFERENCES = 2
"""Those to a work that nobody but the thread of its queue has: its variable and an argument."""


@final
class QueuedWork(Work):
    """An operation that runs on a queue's thread."""

    def __init__(
        self,
        job: Job,
        label: str,
        queue: CollectiveQueue | None = None,
        *,
        detached: bool = False,
    ) -> None:
        self.ended = Ending()
        self.thread: int | None = None
        """The thread that runs the operation."""
        self._queue = queue
        self._job: Job | None = job
        self._label = label
        self._site = call_site()
        if detached:
            self._is_detached = True
        self._value: Any = None
        self._mark = 0

    def recorded(self, mark: int) -> None:
        """See `Work.recorded`."""
        self._mark = mark
        if self.ended.is_set():  # perhaps before it had the mark
            self._record_end()

    def end(self) -> None:
        """Let those go on that wait for the operation, which has been executed."""
        self.ended.set()
        if self._mark:
            self._record_end()

    def _record_end(self) -> None:
        (end if self._failure is None else fail)(self._mark)

    def execute(self) -> None:
        """Run the job and keep its result or exception."""
        job, self._job = self._job, None
        outer, issued.at = issued.at, self._site
        try:
            self._value = job() if job else None
        except BaseException as error:
            _mark_inside(error)
            # without this frame, which has the work: the two would keep each other alive
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            self._fail(error)
        finally:
            issued.at = outer

    def tell_dropped(self) -> None:
        """Warn that nobody has waited for the operation, nor will; an error tells of itself."""
        if self._failure is None and not self._is_detached:
            tell_dropped(self._label, self._site)

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation has ended; raise what it raised."""
        self.refuse_nested()
        return self._await(timeout)

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        if self._queue is not None and not self.ended.is_set():
            self._queue.refuse_nested()
            if self._queue.is_current():
                raise UsageError(
                    f"{self._label} was waited for at {call_site()} by a listener, on the thread "
                    "that is to run it next: it would never end; wait for it elsewhere"
                )

    def _await(self, timeout: Any = None) -> bool:
        if not self._await_end(seconds(timeout)):
            raise CollectiveTimeout(
                f"{self._label} has not ended after {seconds(timeout):g} s of wait(); it goes on, "
                "and can be waited for again. A rank that never joins it is named when the "
                "timeout of the group is over"
            )
        if self._failure is not None:
            raise self._failure.hear()
        return True

    def _await_end(self, timeout_s: float | None) -> bool:
        if timeout_s is not None and timeout_s <= activity.NOTE_AFTER_S:
            return self.ended.wait(timeout_s)
        if self.ended.wait(activity.NOTE_AFTER_S):
            return True
        wait = activity.Wait(lambda: self._label, thread=self.thread)
        with activity.noted(wait, activity.NOTE_AFTER_S):
            return self.ended.wait(None if timeout_s is None else timeout_s - activity.NOTE_AFTER_S)

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return self.ended.is_set()

    def result(self) -> Any:
        """Wait, and return what the job returned."""
        self.wait()
        return self._value

    def _value_at_end(self) -> Any:
        self._await()
        return self._value

    def known(self) -> Known:
        """See `Work.known`."""
        return Known(self._label, self.ended.is_set(), error_of(self._failure))


def seconds(timeout: Any) -> float | None:
    """Turn seconds (infinity, too) or a `datetime.timedelta` into seconds; None stays None."""
    if timeout is None:
        return None
    given = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    return min(float(given), threading.TIMEOUT_MAX)
