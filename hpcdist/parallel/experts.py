"""`global_scatter` and `global_gather`: rows go to the experts of all ranks, and back.

[Note: counts] A rank has rows for each expert of each rank: first those for the experts of the
first rank, one expert after the other, then those for the second rank. So its `local_count` has
numbers by rank and expert. What it receives comes in the same order, by the ranks that send, but is
kept by expert: first all rows for its first expert, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import row_of
from hpcdist.comm.collectives import alltoall_single
from hpcdist.comm.dispatch import decline, not_a_member
from hpcdist.comm.group import Group
from hpcdist.comm.members import Members
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.kinds import Kind


class Route(NamedTuple):
    """How many rows go to each expert of each rank, and come from each rank for each expert."""

    sent: Any
    received: Any

    def by_expert(self) -> Any:
        """Return where rows as they are received have to be taken from, to be kept by expert."""
        starts = np.cumsum(self.received).reshape(self.received.shape) - self.received
        rows = [
            np.arange(start, start + count)
            for start, count in zip(starts.T.flat, self.received.T.flat, strict=True)
        ]
        return np.concatenate(rows) if rows else np.empty(0, np.intp)


def global_scatter(
    x: Any,
    local_count: Any,
    global_count: Any,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Any:
    """Send each row to its expert. Collective.

    Each rank has equally many experts.

    Args:
        x: the rows, first those for the experts of the first rank; see `local_count`. Of torch,
            with gradients, which go back by `global_gather`.
        local_count: entry ``i`` is how many rows of `x` are for expert ``i % n`` of rank
            ``i // n``, where each rank has ``n`` experts.
        global_count: entry ``i`` is how many rows rank ``i // n`` sends for expert ``i % n`` of
            this rank; an ``alltoall`` of `local_count` tells.
        group: the ranks; None for all.
        use_calc_stream: accepted for Paddle's sake.

    Returns:
        The rows for the experts of this rank: those for its first expert, in the order of the
        ranks, then those for the second one.

    Raises:
        UsageError: the counts do not fit; `RemoteError` on the other ranks.
        MismatchError: a rank expects another number of rows than it is sent.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> counts = np.ones(2 * world.nranks, int)  # two experts on each rank, a row for each
        >>> x = np.arange(2.0 * world.nranks)[:, None]
        >>> at_experts = dist.utils.global_scatter(x, counts, counts)
        >>> back = dist.utils.global_gather(at_experts, counts, counts)
        >>> bool((back == x).all())
        True

    """
    return _moved("scatter", x, local_count, global_count, group)


def global_gather(
    x: Any,
    local_count: Any,
    global_count: Any,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Any:
    """Send rows back from the experts to their ranks: the inverse of `global_scatter`. Collective.

    Args:
        x: the rows of the experts of this rank, as `global_scatter` returns them.
        local_count: that of `global_scatter`.
        global_count: that of `global_scatter`.
        group: the ranks; None for all.
        use_calc_stream: accepted for Paddle's sake.

    Returns:
        The rows, in the order of the `x` that `global_scatter` was given.

    Raises:
        UsageError: the counts do not fit; `RemoteError` on the other ranks.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.arange(6.0).reshape(3, 2)
        >>> counts = np.array([3])  # one rank, one expert: all rows go to it
        >>> rows = dist.utils.global_scatter(x, counts, counts)
        >>> bool((dist.utils.global_gather(rows, counts, counts) == x).all())
        True

    """
    return _moved("gather", x, local_count, global_count, group)


def _moved(verb: str, x: Any, local_count: Any, global_count: Any, group: Group | None) -> Any:
    members: Any = resolve_group(group)
    if members.transport is None:
        not_a_member(members)
        return None
    try:
        route = _route(local_count, global_count, members)
        counts = route.sent if verb == "scatter" else route.received
        _check_rows(x, int(counts.sum()), "local_count" if verb == "scatter" else "global_count")
    except UsageError as error:
        decline(members, Kind.BARRIER, error)
        raise
    row = row_of(type(x), _TENSORS)
    return (moved if row is None else load(row))(verb, x, route, members)


_TENSORS = {("torch", "Tensor"): "hpcdist.torch.experts:moved"}


def _route(local_count: Any, global_count: Any, group: Members) -> Route:
    return Route(
        _counts(local_count, "local_count", group), _counts(global_count, "global_count", group)
    )


def _counts(given: Any, what: str, group: Members) -> Any:
    """Return counts by rank and expert."""
    counts = np.asarray(given)
    if counts.dtype.kind not in "iu" or counts.ndim != 1 or (counts < 0).any():
        raise UsageError(f"{what} must be a list of integers of at least 0, got {given!r}")
    if not counts.size or counts.size % group.nranks:
        raise UsageError(
            f"{what} must have a number for each expert of each of the {group.nranks} ranks, got "
            f"{counts.size} numbers"
        )
    return counts.astype(np.intp).reshape(group.nranks, -1)


def _check_rows(x: Any, wanted: int, what: str) -> None:
    shape: Sequence[int] = getattr(x, "shape", ())
    if not shape or shape[0] != wanted:
        raise UsageError(
            f"x must have the {wanted} rows that {what} adds up to, got the shape {tuple(shape)}"
        )


# ---- arrays


def exchanged(x: Any, out: Any, sent: Any, received: Any, group: Group) -> Any:
    """Fill `out` with the rows that all ranks send to this one, in the order of the ranks."""
    alltoall_single(
        out,
        x,
        group,
        in_split_sizes=sent.sum(1).tolist(),
        out_split_sizes=received.sum(1).tolist(),
    )
    return out


def moved(verb: str, x: Any, route: Route, group: Group) -> Any:
    """Return the rows that come to this rank, in their order. Collective."""
    order = route.by_expert()
    if verb == "gather":
        by_rank = np.empty_like(x)
        by_rank[order] = x
        room = np.empty_like(x, shape=(int(route.sent.sum()), *x.shape[1:]))
        return exchanged(by_rank, room, route.received, route.sent, group)
    room = np.empty_like(x, shape=(len(order), *x.shape[1:]))
    return exchanged(x, room, route.sent, route.received, group)[order]
