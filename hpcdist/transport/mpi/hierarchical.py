"""`HierarchicalAllReduce`: all_reduce of a group that spans nodes, in three steps.

Inside each node the ranks reduce-scatter through shared memory; then every rank all-reduces its
slice with its peers on the other nodes, all at once, so that all network adapters of a node are
busy; then the slices are shared inside the node. Between nodes each number travels once per node
instead of once per rank. Nodes may hold different numbers of ranks: there are as many parts as
the smallest has ranks, and the others only contribute and receive.

This is the hierarchical all_reduce of multi-leader designs (Bayatpour et al., "Scalable reduction
collectives with data partitioning-based multi-leader design", SC 2017).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.runtime.mpi import told_by_all
from hpcdist.transport.call import Reduction
from hpcdist.transport.kernel import accumulate, copy_bytes, write_out
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import OPS, numbers
from hpcdist.transport.mpi.share_node import open_node
from hpcdist.transport.shm.collectives import share_of
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.tuning import STAGED_UP_TO


class _Part(NamedTuple):
    """Elements from `first` on, `items` of them; parts take turns in the staging memory."""

    turn: int
    first: int
    items: int


@final
class HierarchicalAllReduce:
    """The ranks of this node, and this rank's peers on the other nodes; see `open_hierarchical`."""

    def __init__(self, node: SharedNode, peers: MPI.Intracomm | None, count: int) -> None:
        self._node = node
        self._peers = peers
        self._count = count

    @property
    def node(self) -> SharedNode:
        """The ranks of this node."""
        return self._node

    def all_reduce(self, host: MpiContext, call: Reduction) -> None:
        """Reduce `call.recv` over the whole group, which has agreed on `call`."""
        data = call.recv
        self._node.check_usable()
        flat = data.reshape(-1)
        for part in _parts(flat.size, STAGED_UP_TO // flat.itemsize):
            mine = flat[part.first : part.first + part.items]
            copy_bytes(self._staged(self._node.rank, part, flat.dtype), mine)
            self._node.step(call)
            self._reduce_slice(host, call, part, flat.dtype)
            self._node.step(call)
            for queue in range(self._count):
                first, count = share_of(part.items, self._count, queue)
                chosen = slice(first, first + count)
                copy_bytes(mine[chosen], self._staged(queue, part, flat.dtype)[chosen])
        self._node.step(call)

    def _reduce_slice(self, host: MpiContext, call: Reduction, part: _Part, unit: np.dtype) -> None:
        """Combine this rank's slice inside the node, then with its peers; leave it in place."""
        if self._peers is None:
            return
        rule = call.rule
        first, count = share_of(part.items, self._count, self._node.rank)
        chosen = slice(first, first + count)
        staged = [self._staged(rank, part, unit)[chosen] for rank in range(self._node.size)]
        wire = accumulate(rule, staged)
        self._peers.Allreduce(MPI.IN_PLACE, numbers(wire), OPS[rule.combine])
        write_out(rule, wire, staged[self._node.rank], host.size)

    def _staged(self, rank: int, part: _Part, unit: np.dtype) -> NumpyArray:
        return self._node.staged(rank, part.turn, part.items * unit.itemsize).view(unit)

    def close(self) -> None:
        """Free the peers' communicator."""
        if self._peers is not None:
            self._peers.Free()


def _parts(items: int, step: int) -> Iterator[_Part]:
    for number, first in enumerate(range(0, items, step)):
        yield _Part(number & 1, first, min(step, items - first))


def open_hierarchical(host: MpiContext) -> HierarchicalAllReduce | None:
    """Set up the hierarchy; None, on all ranks, if a node has no shared memory. Collective."""
    with host.site.communicators.making(host.comm, host.ranks):
        return _open(host)


def _open(host: MpiContext) -> HierarchicalAllReduce | None:
    node_number = host.site.nodes[host.ranks[host.rank]]
    made = host.site.communicators
    on_node = made.add(cast(MPI.Intracomm, host.comm.Split(node_number, host.rank)))
    ranks = told_by_all(on_node, host.ranks[host.rank])
    node = open_node(on_node, ranks, host.site, host.timeout_s, host.progress)
    on_node_size, on_node_rank = on_node.size, on_node.rank
    on_node.Free()
    everywhere = host.comm.allreduce(int(node is not None)) == host.size
    if not everywhere or node is None:
        return None
    count = host.comm.allreduce(on_node_size, MPI.MIN)
    has_lane = on_node_rank < count
    color = on_node_rank if has_lane else MPI.UNDEFINED
    peers = made.add(cast(MPI.Intracomm, host.comm.Split(color, host.rank)))
    return HierarchicalAllReduce(node, peers if has_lane else None, count)
