"""`Lane`: over which groups compressed averages travel, and in which order.

What crosses nodes is compressed, and only that: the ranks of a node add up their gradients in
their common memory, one rank of each node does the rest with those of the other nodes, and gives
the mean to its node. Where all ranks are on one node, each counts as a node.

[Note: own groups] Several operations make one average, on a thread beside the backward pass. So
they have groups and a queue of their own, and agree with nobody's order of operations; models of
one group share them, because their buckets are issued in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hpcdist.comm.group import Group
from hpcdist.comm.making import group_of
from hpcdist.comm.session import Slot, require_session
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.waiting.queue import CollectiveQueue


class Lane(NamedTuple):
    """`node` is None where each rank counts as one, `across` on ranks that leave it to another."""

    node: Group | None
    across: Group | None
    ranks: int
    queue: CollectiveQueue

    @property
    def is_open(self) -> bool:
        """Whether the groups have not been closed."""
        return not any(group.is_closed for group in (self.node, self.across) if group is not None)


def _end(lanes: dict[Group, Lane], _: str) -> None:
    for lane in lanes.values():
        lane.queue.close(0)


_LANES: Slot[dict[Group, Lane]] = Slot(dict, end=_end)


def lane_of(group: Group) -> Lane:
    """Return the lane of `group`, made by the first call. Collective over `group`."""
    lanes = require_session()[_LANES]
    lane = lanes.get(group)
    if lane is None or not lane.is_open:
        lane = lanes[group] = _make(group)
    return lane


def _make(group: Group) -> Lane:
    assert group.transport is not None
    by_node = neighbours(group.ranks, group.transport.nodes)
    mine = next(ranks for ranks in by_node if group.world_rank in ranks)
    name = f"compressed averages of {group.name}"
    node = _group(mine, f"{name}, one node") if len(by_node) < group.nranks else None
    first = [ranks[0] for ranks in by_node]
    across = _group(first, name) if group.world_rank in first else None
    return Lane(node, across, group.nranks, CollectiveQueue(f"hpcdist-{name}"))


def neighbours(ranks: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, given the node of each; see `Lane`.

    Example:
        >>> neighbours([0, 1, 4, 5], [7, 8, 7, 8])
        [[0, 4], [1, 5]]
        >>> neighbours([0, 1], [7, 7])
        [[0], [1]]

    """
    if len({*nodes}) <= 1:
        return [[rank] for rank in ranks]
    found: dict[int, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        found.setdefault(node, []).append(rank)
    return [*found.values()]


def _group(ranks: list[int], name: str) -> Group:
    return cast(Group, group_of(ranks, None, name))
