"""`Sync`, `Async`, `Geo`, `Ssp`: when other workers see the pushes of a worker. Pure.

What a worker does in each mode is in `worker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple


class Sync(NamedTuple):
    """All workers pull and push in lock step; the bits are the same for any number of servers.

    Example:
        >>> from hpcdist import ps
        >>> mode = ps.Sync()  # of a table: SparseTable(..., mode=mode)

    """


class Async(NamedTuple):
    """A worker's thread merges what it has pushed and sends it; nobody waits for the others.

    Attributes:
        send_queue_size: pushes that may wait; one more waits until there is room.
        max_merge_var_num: so many of them at most travel as one.

    Example:
        >>> from hpcdist import ps
        >>> mode = ps.Async(send_queue_size=4)  # of a table: SparseTable(..., mode=mode)

    """

    send_queue_size: int = 16
    max_merge_var_num: int = 1


class Geo(NamedTuple):
    """A worker trains rows of its own, and every so many pushes tells how they have changed.

    Attributes:
        k_steps: pushes between two such exchanges.

    Example:
        >>> from hpcdist import ps
        >>> mode = ps.Geo(k_steps=10)  # of a table: SparseTable(..., mode=mode)

    """

    k_steps: int = 100


class Ssp(NamedTuple):
    """Workers go on by themselves, but the fastest waits for the slowest (stale synchronous).

    Attributes:
        staleness: pushes that a worker may be ahead of the slowest one when it pulls.
        timeout: seconds that it waits for the slowest; None: as long as operations of the group.

    Example:
        >>> from hpcdist import ps
        >>> mode = ps.Ssp(staleness=2)  # of a table: SparseTable(..., mode=mode)

    """

    staleness: int = 1
    timeout: float | None = None


Mode: TypeAlias = "Sync | Async | Geo | Ssp"

MODES: dict[str, type[Sync | Async | Geo | Ssp]] = {
    "sync": Sync,
    "async": Async,
    "geo": Geo,
    "ssp": Ssp,
}
_LEAST = {"send_queue_size": 1, "max_merge_var_num": 1, "k_steps": 1, "staleness": 0}


def mode_of(given: Any) -> Mode:
    """Return the mode that a name or a mode tells.

    Raises:
        UsageError: there is no such mode, or a number of it is out of its range.

    """
    if isinstance(given, str) and given in MODES:
        return MODES[given]()
    if not isinstance(given, (Sync, Async, Geo, Ssp)):
        raise UsageError(
            f"mode must be one of {', '.join(map(repr, MODES))}, or one with settings such as "
            f"hpcdist.ps.Ssp(staleness=2), got {given!r}"
        )
    fields: dict[str, Any] = given._asdict()
    for name, value in fields.items():
        least = _LEAST.get(name)
        if least is not None:
            integer(value, name, least)
    timeout = getattr(given, "timeout", None)
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"timeout must be a positive number of seconds, or None, got {timeout!r}")
    return given


def mode_told(a_sync: bool, configs: Mapping[str, Any]) -> Mode:
    """Return the mode that a strategy's ``a_sync`` and ``a_sync_configs`` tell."""
    if not a_sync:
        return Sync()
    if configs["k_steps"] > 0:
        return mode_of(Geo(configs["k_steps"]))
    return mode_of(Async(configs["send_queue_size"], configs["max_merge_var_num"]))
