"""Works in numbers: wait for all of them, for any of them, or for one in a coroutine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final

from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.transport.activity import Wait
from hpcdist.transport.base import Work
from hpcdist.transport.call_site import call_site
from hpcdist.transport.polling import ERRAND_AFTER_S, do_errands, poll, raising_held
from hpcdist.transport.queue import seconds

W = TypeVar("W", bound=Any)

_LONGEST_PAUSE_S = 5e-3
_SHARE = 0.05
_ATTEND_EVERY_S = 0.05


@raising_held
def wait_all(works: Iterable[Work], timeout: Any = None) -> bool:
    """Block until all `works` have ended and return True; raise what the first of them raised.

    An operation that fails does not keep this from waiting for those after it.

    Args:
        works: of any operations: messages, collectives, plans, and works of torch.
        timeout: seconds (or a `datetime.timedelta`) for all of them together; None leaves each
            its own time limit.

    """
    waiting, limit = _listed(works, "wait_all"), seconds(timeout)
    if limit is not None and not _poll(lambda: not _under_way(waiting), limit, waiting, "wait_all"):
        raise _too_late(f"{_under_way(waiting)} of {len(waiting)}", limit, "wait_all()")
    errors: list[Exception] = []
    for work in waiting:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return True


def _listed(works: Any, verb: str) -> list[Any]:
    try:
        listed = list(works)
    except TypeError:
        listed = [None]
    if not all(hasattr(work, "wait") and hasattr(work, "is_completed") for work in listed):
        raise UsageError(f"{verb} takes a list of works, as irecv returns them, got {works!r}")
    return listed


def _under_way(works: Sequence[Work]) -> int:
    """Return how many of `works` have not ended; looks at each, which lets it proceed."""
    return sum(not work.is_completed() for work in works)


def _poll(done: Callable[[], bool], limit: float, works: Sequence[Work], verb: str) -> bool:
    wait = Wait(lambda: f"{verb} of {len(works)} operations")
    return poll(done, limit, lambda waited: _attend(works, waited), _ATTEND_EVERY_S, wait)


def _attend(works: Sequence[Work], waited: float) -> None:
    for work in works:
        if isinstance(work, Work) and not work.is_completed():
            work.attend(waited)


def _too_late(which: str, limit: float, wait: str) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"{which} operations have not ended within {limit:g} s of {wait}; they go on, and can be "
        f"waited for again. Called at {call_site()}"
    )


@raising_held
def wait_any(works: Iterable[W], timeout: Any = None) -> tuple[int, W]:
    """Block until one of `works` has ended; return its position and the work itself.

    Of several that have ended it is the first. Take it out of the list before you wait again.

    Args:
        works: at least one, of any operations.
        timeout: seconds (or a `datetime.timedelta`); None takes the longest of their time limits.

    Raises:
        CollectiveTimeout: none of them has ended in time; they all go on.
        HpcdistError: what went wrong in the operation that has ended.

    """
    waiting = _listed(works, "wait_any")
    if not waiting:
        raise UsageError("wait_any got no works, so none of them can end; ask for an empty list")
    limit = seconds(timeout)
    if limit is None:
        limit = max(getattr(work, "limit_s", float("inf")) for work in waiting)
    if not _poll(lambda: _first_ended(waiting) is not None, limit, waiting, "wait_any"):
        raise _too_late(f"all {len(waiting)}", limit, "wait_any()")
    at = _first_ended(waiting)
    assert at is not None
    waiting[at].wait()
    return at, waiting[at]


def _first_ended(works: Sequence[Work]) -> int | None:
    return next((at for at, work in enumerate(works) if work.is_completed()), None)


async def ended(work: W) -> W:
    """Return `work` when its operation has ended, or raise what it raised.

    Looks now and then, so that the event loop runs on and no core is kept busy; in between it
    does what every wait does for other ranks ([Note: errands] in `patience`).
    """
    import asyncio  # slow to import, and at hand where a coroutine runs

    began, attend_at = time.monotonic(), _ATTEND_EVERY_S
    while not work.is_completed():
        waited = time.monotonic() - began
        if waited >= work.limit_s:
            raise _too_late("awaited", work.limit_s, "await")
        if waited >= ERRAND_AFTER_S:
            do_errands(waited)
        if waited >= attend_at:
            attend_at = 2 * waited  # of many works that are awaited, each does this for itself
            work.attend(waited)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, waited * _SHARE))
    work.wait()
    return work


@final
class Together(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    @property
    def limit_s(self) -> float:
        """The longest time limit of its parts."""
        return max((work.limit_s for work in self._works), default=0.0)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all parts."""
        return wait_all(self._works, timeout)

    def is_completed(self) -> bool:
        """Return whether all parts have ended."""
        return not _under_way(self._works)

    def attend(self, waited: float) -> None:
        """Let its parts see what has become of them."""
        _attend(self._works, waited)
