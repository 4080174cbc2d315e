"""`Hierarchy`: the ranks of this node, and this rank's lane to the other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

from mpi4py import MPI

from hpcdist.runtime.mpi import told_by_all
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.share_node import open_node
from hpcdist.transport.shm.node import SharedNode


@final
class Hierarchy:
    """The nodes of a group; made by `open_hierarchy`.

    `members` are the ranks (of the group) of each node, and `home` is the number of this one.
    There are `lanes` lanes, as many as the smallest node has ranks. The rank with the local number
    i of each node is in lane i, if there is one, and carries what belongs to the ranks i,
    i + lanes, ... of its node. In a lane nodes come in the order of `members`.
    """

    def __init__(
        self,
        node: SharedNode,
        lane: MPI.Intracomm | None,
        members: Sequence[Sequence[int]],
        home: int,
    ) -> None:
        self.node = node
        self.lane = lane
        self.members = members
        self.home = home
        self.lanes = min(map(len, members))
        self.size = sum(map(len, members))
        self.node_of = {rank: number for number, ranks in enumerate(members) for rank in ranks}
        self.most_carried = max(-(-len(ranks) // self.lanes) for ranks in members)
        """The most ranks of a node that a lane carries."""
        self.in_order = [rank for ranks in members for rank in ranks] == list(range(self.size))
        """Whether the ranks of the group are numbered node by node."""
        self.is_rank_each = len(members) == self.size
        """Whether each node has one rank."""

    @property
    def number(self) -> int:
        """The number of this rank in its node, which is that of its lane, if it has one."""
        return self.node.rank

    def carried(self, node: int, lane: int) -> Sequence[int]:
        """Return the ranks of a node whose data a lane carries."""
        return self.members[node][lane :: self.lanes]

    def carried_by(self, lane: int) -> list[Sequence[int]]:
        """Return the same of every node."""
        return [self.carried(node, lane) for node in range(len(self.members))]

    def close(self) -> None:
        """Free the lane's communicator."""
        if self.lane is not None:
            self.lane.Free()


def open_hierarchy(context: MpiContext) -> Hierarchy | None:
    """Set up the hierarchy; None, on all ranks, if a node has no shared memory. Collective."""
    with context.site.communicators.making(context.comm, context.ranks):
        return _open(context)


def _open(context: MpiContext) -> Hierarchy | None:
    numbers = [context.site.nodes[world] for world in context.ranks]
    made = context.site.communicators
    on_node = made.add(cast(MPI.Intracomm, context.comm.Split(numbers[context.rank], context.rank)))
    worlds = told_by_all(on_node, context.ranks[context.rank])
    node = open_node(on_node, worlds, context.site, context.timeout_s, context.progress)
    on_node.Free()
    everywhere = context.comm.allreduce(int(node is not None)) == context.size
    if not everywhere or node is None:
        return None
    order = list(dict.fromkeys(numbers))
    members = [[rank for rank, at in enumerate(numbers) if at == each] for each in order]
    home = order.index(numbers[context.rank])
    has_lane = node.rank < min(map(len, members))
    color = node.rank if has_lane else MPI.UNDEFINED
    lane = made.add(cast(MPI.Intracomm, context.comm.Split(color, home)))
    return Hierarchy(node, lane if has_lane else None, members, home)
