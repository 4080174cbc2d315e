"""Whose copies a rank keeps: on another node, where there is one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def plan_buddies(nodes: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """Return for each rank its buddies, which keep a copy of its part.

    Every rank keeps as many copies as any other, where the nodes are alike. No two copies are at
    one rank, and no two on one node as long as there are nodes for that.

    Args:
        nodes: for each rank the node on which it is.
        copies: how many copies of each part there are beside the first; fewer where there are
            fewer ranks.

    """
    size = len(nodes)
    copies = min(copies, size - 1)
    largest = max(Counter(nodes).values())
    # Ranks in the order of their nodes: as many places on as the largest node has ranks is always
    # another node, if all of the steps together do not lead around.
    order = sorted(range(size), key=lambda rank: (nodes[rank], rank))
    if (copies + 1) * largest <= size:
        return _by_steps(order, [largest * copy for copy in range(1, copies + 1)])
    if largest == size:
        return _by_steps(order, range(1, copies + 1))
    return _one_by_one(nodes, order, copies)


def _by_steps(order: Sequence[int], steps: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each rank those that are so many places behind it in the order."""
    size = len(order)
    place = {rank: index for index, rank in enumerate(order)}
    return [tuple(order[(place[rank] + step) % size] for step in steps) for rank in range(size)]


def _one_by_one(nodes: Sequence[int], order: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """Give each rank in turn the least loaded ones, first on nodes that it has not yet."""
    size, loads = len(nodes), [0] * len(nodes)
    buddies: list[tuple[int, ...]] = [()] * size
    for rank in order:
        for _ in range(copies):
            known = (rank, *buddies[rank])
            used = {nodes[each] for each in known}
            best = min(
                (each for each in range(size) if each not in known),
                key=lambda each: (nodes[each] in used, loads[each], (each - rank) % size),
            )
            buddies[rank] += (best,)
            loads[best] += 1
    return buddies
