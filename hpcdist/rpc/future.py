"""`Future`: what a call will return, or raise."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar, final

from hpcdist.errors import CollectiveTimeout, HpcdistError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.flight import recorder
from hpcdist.transport.waiting.activity import NOTE_AFTER_S, Wait, noted
from hpcdist.transport.waiting.queue import seconds

logger = logging.getLogger("hpcdist.rpc")

T = TypeVar("T")
U = TypeVar("U")

Load = Callable[[], Any]
"""Returns the result of a call, or raises what the call raised; see `Future.settle`."""


class Cancelled(HpcdistError, CancelledError):
    """The future was cancelled, so nobody will hear of its result."""


class _Thread(threading.local):
    """How this thread waits: workers say so, and the thread that reads must not."""

    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
    refuses: str = ""


thread = _Thread()


class Limit(NamedTuple):
    """When a call is given up (`time.monotonic`), what does it, and what does it by itself then."""

    at: float
    give_up: Callable[[], Any]
    arm: Callable[[float, Callable[[], Any]], Any]


class Teller(Protocol):
    """What tells the listeners that a call has ended; returns what one of them raised."""

    def end(self, error: BaseException | None) -> BaseException | None: ...  # noqa: D102


@final
class Future(Generic[T]):
    """The result of a call under way.

    Whoever makes one ends it by `set_result` or `set_exception`; those of `rpc_async` end when the
    answer is there, in time or not. What an answer contains is unpickled by the first who asks.

    Args:
        what: what errors call it.

    Example:
        >>> from hpcdist.rpc import Future
        >>> future = Future("an answer")
        >>> future.set_result(42)
        >>> future.wait()
        42

    """

    __slots__ = (
        "_callbacks",
        "_claimed",
        "_error",
        "_gate",
        "_limit",
        "_load",
        "_lock",
        "_mark",
        "_run",
        "_settled",
        "_teller",
        "_value",
        "_withdraw",
        "what",
    )

    def __init__(self, what: str = "a future") -> None:
        self.what = what
        self._gate = threading.Lock()
        self._gate.acquire()
        self._lock = threading.RLock()
        self._claimed = self._settled = False
        self._mark = 0
        self._load: Load | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], Any]] = []
        self._limit: Limit | None = None
        self._teller: Teller | None = None
        self._withdraw: Callable[[], Any] | None = None
        self._run: Callable[[Callable[[], Any]], Any] | None = None

    # ---- ending it

    def settle(self, load: Load, *, failed: bool = False) -> bool:
        """End it: `load` returns the result, or raises, when somebody asks.

        Args:
            load: is called once, when the result is first wanted.
            failed: whether `load` is known to raise.

        Returns:
            False if it has ended before: then nothing is done.

        """
        with self._lock:
            if self._claimed:
                return False
            self._claimed = True
            self._load = load
        if self._teller is not None:
            self._open()
            failure = self._teller.end(self._error)
            self._error = self._error or failure
        (recorder.fail if failed else recorder.end)(self._mark)
        with self._lock:
            self._settled = True
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        if callbacks:
            self._start(callbacks)
        return True

    def fail(self, error: BaseException) -> bool:
        """End it with an error; False if it has ended before.

        Args:
            error: what waiting raises.

        """
        return self.settle(lambda: _raise(error), failed=True)

    def set_result(self, result: T) -> None:
        """End it with a result.

        Args:
            result: what waiting returns.

        """
        if not self.settle(lambda: result):
            raise UsageError(f"{self.what} has ended before; a future ends once")

    def set_exception(self, error: BaseException) -> None:
        """End it with an error.

        Args:
            error: what waiting raises.

        """
        if not isinstance(error, BaseException):
            raise UsageError(f"set_exception takes an exception, got {error!r}")
        if not self.fail(error):
            raise UsageError(f"{self.what} has ended before; a future ends once") from error

    def cancel(self) -> bool:
        """End it with an error, if it has not ended: the answer will be dropped.

        A call that is under way goes on where it runs.

        Returns:
            Whether it was this that ended it.

        """
        cancelled = self.fail(Cancelled(f"{self.what} was cancelled"))
        if cancelled and self._withdraw is not None:
            self._withdraw()
        return cancelled

    # ---- asking

    def wait(self, timeout: Any = None) -> T:
        """Wait for the result and return it, or raise what the call raised.

        Args:
            timeout: seconds (or a `datetime.timedelta`) that this wait may take; None for no
                limit but that of the call itself, which goes on when this one is over.

        Raises:
            CollectiveTimeout: the wait, or the call, took too long.
            RemoteError: the call failed, or the rank that ran it has gone.

        """
        if not self._settled:
            self._await(timeout)
        self._open()
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def result(self, timeout: Any = None) -> T:
        """Alias of `wait`, named as in `concurrent.futures`."""
        return self.wait(timeout)

    def exception(self, timeout: Any = None) -> BaseException | None:
        """Wait, and return what the call raised; None if it returned.

        Args:
            timeout: seconds (or a `datetime.timedelta`); None for no limit but that of the call.

        """
        if not self._settled:
            self._await(timeout)
        self._open()
        return self._error

    def done(self) -> bool:
        """Return whether it has ended, without waiting."""
        if not self._settled and self._limit is not None and time.monotonic() >= self._limit.at:
            self._limit.give_up()
        return self._settled

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Call ``fn(future)`` when it has ended; at once if it has.

        It runs on a thread of the pool, so it may make calls of its own; what it raises is logged.

        Args:
            fn: takes the future.

        """
        with self._lock:
            if not self._settled:
                self._callbacks.append(fn)
                if self._limit is not None and len(self._callbacks) == 1:
                    self._limit.arm(self._limit.at, self._limit.give_up)
                return
        _call(fn, self)

    def then(self, fn: Callable[[Future[T]], U]) -> Future[U]:
        """Return a future of the result of ``fn(future)``, called when this one has ended.

        Args:
            fn: takes this future, which has ended; what it raises is the error of the one returned.

        """
        following: Future[U] = Future(f"what follows {self.what}")

        def follow(ended: Future[T]) -> None:
            try:
                result = fn(ended)
            except BaseException as error:
                following.fail(error)
            else:
                following.settle(lambda: result)

        self.add_done_callback(follow)
        return following

    def __repr__(self) -> str:
        return f"<Future: {self.what}, {'ended' if self._settled else 'under way'}>"

    # ---- how it waits

    def bind(self, withdraw: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> None:
        """Set the functions that drop its call and that run its callbacks.

        Args:
            withdraw: is called when the future is cancelled.
            run: runs a function of no arguments on a thread of the pool.

        """
        self._withdraw, self._run = withdraw, run

    def limit(self, limit: Limit) -> None:
        """Set the time limit at which the call is given up.

        Args:
            limit: when, and what ends the call then.

        """
        self._limit = limit

    def tell(self, teller: Teller) -> None:
        """Set the function that announces its end to listeners before the waiting threads go on.

        Args:
            teller: its ``end`` is called, once.

        """
        self._teller = teller

    def recorded(self, mark: int) -> None:
        """Have its end recorded.

        Args:
            mark: of the record of its call; see `transport.flight.recorder`.

        """
        self._mark = mark

    def _await(self, timeout: Any) -> None:
        check_may_wait(self.what)
        with thread.waiting():
            if not self._ended_within(_wait_s(timeout)):
                raise CollectiveTimeout(
                    f"{self.what} has not ended within the {timeout} s of this wait; it goes on"
                )

    def _ended_within(self, wait_s: float) -> bool:
        limit = self._limit
        if limit is not None and (left := limit.at - time.monotonic()) <= wait_s:
            if not self._pass(max(left, 0.0)):
                limit.give_up()  # which ends it, unless the answer comes at this moment
                self._pass(threading.TIMEOUT_MAX)
            return True
        return self._pass(wait_s)

    def _pass(self, wait_s: float) -> bool:
        """Go through the gate, and leave it open for the next one."""
        passed = self._gate.acquire(timeout=min(wait_s, NOTE_AFTER_S))
        if not passed and wait_s > NOTE_AFTER_S:
            with noted(Wait(lambda: self.what), NOTE_AFTER_S):
                passed = self._gate.acquire(timeout=wait_s - NOTE_AFTER_S)
        if passed:
            self._gate.release()
        return passed

    def _open(self) -> None:
        if self._load is None:
            return
        with self._lock:
            if self._load is not None:
                try:
                    self._value = self._load()
                except BaseException as error:
                    self._error = error
                self._load = None

    def _start(self, callbacks: list[Callable[[Future[T]], Any]]) -> None:
        def run() -> None:
            for each in callbacks:
                _call(each, self)

        if self._run is None:
            run()
        else:
            self._run(run)


def _call(fn: Callable[[Any], Any], future: Future[Any]) -> None:
    try:
        fn(future)
    except Exception:
        logger.exception("a callback of %s failed", future.what)


def _raise(error: BaseException) -> Any:
    raise error


def _wait_s(timeout: Any) -> float:
    try:
        wait_s = seconds(timeout)
    except (TypeError, ValueError):
        wait_s = -1.0
    if wait_s is None:
        return threading.TIMEOUT_MAX
    if not wait_s >= 0:
        raise UsageError(f"timeout must be a number of seconds, or None, got {timeout!r}")
    return wait_s


def check_may_wait(what: str) -> None:
    """Raise `UsageError` if this thread must not wait: it is in a block of `refusing`."""
    if thread.refuses:
        raise UsageError(f"{thread.refuses} waits for {what}, which nobody could then end")


@contextmanager
def refusing(why: str) -> Iterator[None]:
    """Refuse waits of this thread for futures in this block: it is the one that would end them."""
    before, thread.refuses = thread.refuses, why
    try:
        yield
    finally:
        thread.refuses = before
