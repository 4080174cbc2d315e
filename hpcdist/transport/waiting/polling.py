"""Waiting without starving anyone: spin, then yield the core, then sleep.

A rank that spins inside MPI on an oversubscribed core keeps the rank it waits for from
running. These waits poll MPI from Python instead, which also keeps Ctrl-C and time limits
alive. The sleep grows with the time already waited, so that it costs at most a few percent.

[Note: errands] Whoever waits also does what keeps other ranks going: it takes in what they have
sent to this process, and answers what they ask (`Matching._errand`, `News.listen`). One thread at a
time does this for all groups; nothing of it waits for anyone.

[Note: given back] Signal handlers run after any call, and what they raise may come between one that
takes a lock and the next line, or between the first line of a ``finally`` and its last. So a lock
that the main thread takes only if it is free is taken and noted in one call of compiled code, as
``taken.extend(map(lock.acquire, AT_ONCE))``, and the first call of the ``finally`` gives it back.

[Note: at once] For the same reason what has to happen together with being noted, such as to receive
a message, to count it, and to keep its request, is done by one call of compiled code, `at_once`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import chain
from types import FrameType
from typing import Any, TypeVar, cast, final

from hpcdist.errors import HpcdistError, UsageError
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.activity import Wait

AT_ONCE = (False,)
"""What a lock is asked with that is taken only if it is free."""


def step(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Return a step of `at_once`: a compiled function, and what it is called with."""
    return map(function, *((each,) for each in args))


def at_once(noted: list[Any], *steps: Iterator[Any]) -> None:
    """Do steps one after the other, and note what each returns; see [Note: at once]."""
    noted.extend(chain(*steps))


SPIN = 40
"""Polls before the first yield: a few microseconds, what a rank that is in step needs."""

BEYOND_S = 0.5
"""How much longer than the time limit a rank waits for the answers of others to it."""

LISTEN_AFTER_S = activity.NOTE_AFTER_S
"""From this long a wait on a rank listens to whether others have left."""

LEFT_GRACE_S = 0.2
"""How long what a rank sent before it left may still be on its way."""

ERRAND_AFTER_S = 1e-3
"""From this long a thread that waits does errands, and so often at most."""

held: list[tuple[int, BaseException]] = []
"""What left a signal handler in the middle of an operation; raised when that has ended.

An operation of a group was refused there, or all ranks are in the one under way. If it broke that
off, other ranks would wait for this one. Only the main thread runs signal handlers. A handler may
use another group meanwhile, so the depth of the stack tells whose it is: that of the operation
further out.
"""

_YIELD_S = 2e-3
_LONGEST_SLEEP_S = 1e-3
_SHARE = 0.05
_ERRANDS_SHARE = 0.1

_MOST_HELD = 8

_LOOK_S = 0.2

Errand = Callable[[float], None]
_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_errands: list[Errand] = []
_at_it = threading.RLock()


@final
class Ending:
    """Like a `threading.Event` that is set once.

    An event has a lock that its own code in Python gives back, which an interrupt of the one who
    waits, or sets, can keep it from. Here it costs the others a look at the clock.
    """

    def __init__(self) -> None:
        self._gate, self._is_set = threading.Lock(), False
        self._gate.acquire()

    def set(self) -> None:
        """Let everybody go on who waits; once."""
        self._is_set = True
        self._gate.release()

    def is_set(self) -> bool:
        """Return whether it is."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for that many seconds at most; return whether it is set."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set:
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self._gate.acquire(timeout=min(left, _LOOK_S)):
                self._gate.release()
        return True


def add_errand(errand: Errand) -> None:
    """Register `errand`, which whoever waits calls now and then, with the seconds waited so far.

    It must not wait for anything, nor call what may.
    """
    _errands.append(errand)


def remove_errand(errand: Errand) -> None:
    """End what `add_errand` began; afterwards `errand` is not under way on any other thread."""
    with _at_it:
        if errand in _errands:
            _errands.remove(errand)


def do_errands(waited: float) -> float:
    """Run all errands, unless some thread is at it; return how many seconds of a core it took.

    On a busy node they take longer, but are not to be run less often for it.
    """
    if is_at_errands():
        return 0.0
    taken: list[bool] = []
    try:  # [Note: given back]
        taken.extend(map(_at_it.acquire, AT_ONCE))
        if not taken[0]:
            return 0.0
        began = time.thread_time()
        for errand in tuple(_errands):
            if errand in _errands:  # a signal handler may have ended it meanwhile
                errand(waited)
        return time.thread_time() - began
    finally:
        if taken and taken[0]:
            _at_it.release()


def is_at_errands() -> bool:
    """Return whether this is called in the middle of `do_errands`: in a signal handler."""
    return _at_it._is_owned()  # type: ignore[attr-defined,no-any-return]


def poll(
    done: Callable[[], bool],
    timeout_s: float,
    attend: Callable[[float], None] | None = None,
    attend_every_s: float = 0.02,
    wait: Wait | None = None,
) -> bool:
    """Poll `done` until it is true or `timeout_s` is over; return its last answer.

    Args:
        done: cheap and non-blocking.
        timeout_s: seconds, may be infinite.
        attend: called now and then, with the seconds waited so far, once the wait is long.
        attend_every_s: seconds between two calls of `attend`.
        wait: what is waited for, for other ranks that ask.

    A refusal of a nested operation that comes out of a signal handler is `held`.

    """
    began = time.monotonic()
    while True:
        try:
            return _poll(done, timeout_s, attend, attend_every_s, wait, began)
        except UsageError as error:
            if not error.nested:
                raise
            error.held = True
            held.append((_depth(sys._getframe()), error))


def to_the_end(
    wait: Callable[[], _T],
    *,
    of_operation: bool = False,
    interrupts: list[BaseException] | None = None,
) -> _T:
    """Return what `wait` returns; what a signal handler raises meanwhile is raised at its end.

    That is for waits in which other ranks use the memory of this one at this moment, or wait for
    it. Errors of hpcdist end it, and so does an exception that comes again and again.

    Args:
        wait: is called again where it was interrupted.
        of_operation: it is a part of one, at whose end interrupts are to be raised.
        interrupts: takes what a signal handler raises, when it comes, but for refusals.

    """
    errors: list[BaseException] = []
    while True:
        try:
            result = wait()
            break
        except BaseException as error:
            if isinstance(error, HpcdistError):
                if not (isinstance(error, UsageError) and error.nested):
                    raise
                error.held = True  # a signal handler has called an operation
            elif interrupts is not None:
                interrupts.append(error)
            errors.append(error)
            if len(errors) > _MOST_HELD:
                raise
    if errors and of_operation and threading.current_thread() is threading.main_thread():
        hold(errors[0])
    elif errors:
        raise errors[0]
    return result


def hold(error: BaseException) -> None:
    """Have `error` raised at the end of the calling operation."""
    held.append((_depth(sys._getframe()), error))


def raise_held() -> None:
    """Raise what is `held` of the calling operation; at its end."""
    errors = _take_held(sys._getframe(1))
    if errors:
        raise errors[0]


def drop_held() -> None:
    """Forget the refusals that are `held` of the calling operation, which fails itself."""
    for error in _take_held(sys._getframe(1)):
        if not isinstance(error, UsageError):
            raise error


def raising_held(wait: _Function) -> _Function:
    """Make a function that polls outside of any operation raise what is `held` at its end."""

    @wraps(wait)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        try:
            result = wait(*args, **kwargs)
        except BaseException:
            drop_held()
            raise
        if held:
            raise_held()
        return result

    return cast("_Function", waiting)


def _take_held(frame: FrameType) -> list[BaseException]:
    """Take out what is held of the operation that `frame` belongs to."""
    if not held or threading.current_thread() is not threading.main_thread():
        return []
    depth = _depth(frame)
    errors = [error for at, error in held if at > depth]
    held[:] = [each for each in held if each[0] <= depth]
    return errors


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def _poll(
    done: Callable[[], bool],
    timeout_s: float,
    attend: Callable[[float], None] | None,
    attend_every_s: float,
    wait: Wait | None,
    began: float,
) -> bool:
    for _ in range(SPIN):
        if done():
            return True
    attended, errands_at, is_noted = 0.0, ERRAND_AFTER_S, False
    yield_s = _YIELD_S if threading.current_thread() is threading.main_thread() else 0.0
    try:
        while not done():
            waited = time.monotonic() - began
            if waited >= timeout_s:
                return done()
            if waited >= errands_at:
                if wait is not None and not is_noted and waited >= activity.NOTE_AFTER_S:
                    activity.note(wait, waited)
                    is_noted = True
                cost = do_errands(waited)
                errands_at = waited + max(ERRAND_AFTER_S, cost / _ERRANDS_SHARE)
            if attend is not None and waited - attended >= attend_every_s:
                attended = waited
                attend(waited)
            if waited < yield_s:
                os.sched_yield()
            else:
                time.sleep(min(_LONGEST_SLEEP_S, max(20e-6, waited * _SHARE)))
    finally:
        if is_noted:
            activity.forget()
    return True
