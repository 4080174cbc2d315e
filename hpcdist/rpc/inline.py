"""`inline`: the mark of functions that run on the thread that reads, ahead of all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def inline(fn: F) -> F:
    """Mark a function to run on the thread that reads calls. A decorator.

    For what takes microseconds: counters, queues, flags. It waits for no worker, and calls of one
    rank run in the order in which they were made; but while it runs, nothing else of that rank is
    read. It must not wait for calls of its own. A method of an actor can be marked, too.

    Args:
        fn: the function, which is returned.

    Example:
        >>> import hpcdist as dist
        >>> @dist.rpc.inline
        ... def heartbeat():
        ...     return "alive"

    """
    fn.__hpcdist_inline__ = True  # type: ignore[attr-defined]
    return fn


def is_inline(fn: Any) -> bool:
    """Return whether a function is marked by `inline`."""
    return getattr(fn, "__hpcdist_inline__", False) is True
