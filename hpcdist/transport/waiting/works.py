"""Works in numbers: wait for all of them, or for any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final

from hpcdist.errors import UsageError
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.coroutines import ATTEND_EVERY_S, too_late
from hpcdist.transport.waiting.polling import poll, raising_held
from hpcdist.transport.waiting.queue import seconds
from hpcdist.transport.waiting.work import Work

W = TypeVar("W", bound=Any)


@raising_held
def wait_all(works: Iterable[Work], timeout: Any = None) -> bool:
    """Block until all `works` have ended and return True; raise what the first of them raised.

    An operation that fails does not keep this from waiting for those after it.

    Args:
        works: of any operations: messages, collectives, plans, and works of torch.
        timeout: seconds (or a `datetime.timedelta`) for all of them together; None leaves each
            its own time limit.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x, y = np.ones(3), np.ones(3)
        >>> works = [dist.all_reduce(each, sync_op=False) for each in (x, y)]
        >>> dist.wait_all(works)
        True

    """
    waiting, limit = _listed(works, "wait_all"), seconds(timeout)
    if limit is not None and not _poll(lambda: not _under_way(waiting), limit, waiting, "wait_all"):
        raise too_late(f"{_under_way(waiting)} of {len(waiting)}", limit, "wait_all()")
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
    if not done():
        _refuse_nested(works)
    wait = Wait(lambda: f"{verb} of {len(works)} operations")
    return poll(done, limit, lambda waited: _attend(works, waited), ATTEND_EVERY_S, wait)


def _refuse_nested(works: Sequence[Work]) -> None:
    for work in works:
        if isinstance(work, Work) and not work.is_completed():
            work.refuse_nested()


def _attend(works: Sequence[Work], waited: float) -> None:
    for work in works:
        if isinstance(work, Work) and not work.is_completed():
            work.attend(waited)


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

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> works = [dist.all_reduce(np.ones(3), sync_op=False)]
        >>> position, work = dist.wait_any(works)
        >>> position
        0

    """
    waiting = _listed(works, "wait_any")
    if not waiting:
        raise UsageError("wait_any got no works, so none of them can end; ask for an empty list")
    limit = seconds(timeout)
    if limit is None:
        limit = max(getattr(work, "limit_s", float("inf")) for work in waiting)
    if not _poll(lambda: _first_ended(waiting) is not None, limit, waiting, "wait_any"):
        raise too_late(f"all {len(waiting)}", limit, "wait_any()")
    at = _first_ended(waiting)
    assert at is not None
    waiting[at].wait()
    return at, waiting[at]


def _first_ended(works: Sequence[Work]) -> int | None:
    return next((at for at, work in enumerate(works) if work.is_completed()), None)


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

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        _refuse_nested(self._works)

    def attend(self, waited: float) -> None:
        """Make its parts see what has become of them."""
        _attend(self._works, waited)

    def detach(self) -> None:
        """Leave all parts to themselves."""
        for work in self._works:
            work.detach()
