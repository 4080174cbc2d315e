"""`simulate`: a world whose ranks are threads of this process."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from hpcdist.comm.announcement import end_all
from hpcdist.comm.group import world_group
from hpcdist.comm.session import (
    Session,
    Whereabouts,
    current_session,
    enter_simulation,
    leave_simulation,
)
from hpcdist.errors import UsageError, add_note, is_secondary
from hpcdist.transport.threads.group import ThreadGroup
from hpcdist.transport.threads.transport import ThreadTransport

T = TypeVar("T")


def simulate(
    n: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on `n` in-process ranks and return their results in rank order.

    Everything in hpcdist works inside `fn`, without MPI: for unit tests, notebooks, teaching.
    The ranks are threads, so they share modules and global variables, unlike real ranks.

    Args:
        n: number of ranks.
        fn: called once per rank; asks `get_rank` who it is.
        args: arguments of `fn`.
        timeout: seconds an operation may wait for a rank.
        kwargs: keyword arguments of `fn`.

    Raises:
        UsageError: `n` is no number of at least 1, or `fn` no function.
        BaseException: what a rank raised; of several, the first that was not caused by another
            rank. A note names the rank (from Python 3.11 on).

    Example:
        >>> import hpcdist as dist
        >>> dist.simulate(3, dist.get_rank)
        [0, 1, 2]

    """
    if not isinstance(n, int) or n < 1:
        order = "; the number of ranks comes first: simulate(n, fn)" if callable(n) else ""
        raise UsageError(f"simulate needs at least one rank, got {n!r}{order}")
    if not callable(fn):
        raise UsageError(f"simulate calls a function on every rank, got {fn!r}; pass f, not f()")
    room = ThreadGroup(range(n))
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def one_rank(rank: int) -> None:
        where = Whereabouts(rank, n, 0, 1, tuple(f"localhost:{rank}" for rank in range(n)))
        transport = ThreadTransport(room, rank, timeout)

        def new_session() -> Session:
            nonlocal transport
            transport = transport.reopen()
            return Session(world_group(transport), where, timeout)

        enter_simulation(new_session)
        why, details = "has ended", ""
        try:
            results[rank] = fn(*args, **kwargs)
        except BaseException as error:
            errors[rank] = error
            why, details = f"failed with {type(error).__name__}: {error}", traceback.format_exc()
        finally:
            _end_session(f"rank {rank} {why}")
            room.leave(rank, why, details)
            leave_simulation()

    threads = [
        threading.Thread(target=one_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # in the order in which they were raised
        own = [rank for rank, error in errors.items() if not is_secondary(error)]
        rank = (own or [*errors])[0]
        error = errors[rank]
        add_note(error, f"raised on rank {rank} of the {n} that simulate runs")
        own_frames = error.__traceback__ and error.__traceback__.tb_next
        raise error.with_traceback(own_frames)
    return results


def _end_session(why: str) -> None:
    session = current_session()
    if session is not None:
        session.end(why)
    for group in session.groups.values() if session is not None else ():
        if group.transport is not None:
            group.transport.close()
            end_all(group)
