"""`broadcast`: one call, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcdist.comm.group import Group
from hpcdist.errors import add_note
from hpcdist.rpc.agent import require_agent


def broadcast(
    fn: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Any = -1,
    *,
    group: Group | None = None,
) -> list[Any]:
    """Call a function on all ranks, this one too, at once. Local: the others need not call it.

    Args:
        fn: called as ``fn(*args, **kwargs)``.
        args: its arguments; None for none.
        kwargs: its keyword arguments; None for none.
        timeout: seconds that each call may take, as in `rpc_sync`.
        group: the ranks; None for all that `init_rpc` has brought together.

    Returns:
        The results, in the order of the ranks.

    Raises:
        RemoteError: the function raised on some ranks; as on the first of them, when the calls of
            all have ended. A note names the others (from Python 3.11 on).

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.rpc.init_rpc()
        >>> dist.rpc.broadcast(pow, (2, 5))
        [32]
        >>> dist.rpc.shutdown()

    """
    agent = require_agent()
    ranks = agent.ranks_of(group)
    calls = [agent.call(rank, fn, () if args is None else args, kwargs, timeout) for rank in ranks]
    errors = {
        rank: error
        for rank, call in zip(ranks, calls, strict=True)
        if (error := call.exception()) is not None
    }
    if errors:
        (first, error), *others = errors.items()
        if others:
            told = "; ".join(f"rank {rank}: {other!r}" for rank, other in others)
            add_note(error, f"besides rank {first} it failed on {told}")
        raise error
    return [call.wait() for call in calls]
