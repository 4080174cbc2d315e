"""Movements of a group that spans nodes: read where data lie in a node, between nodes by lanes."""

from __future__ import annotations

from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.call import Block, Distribution, Gathering, even_blocks
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.runs import cut
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import starts_of
from hpcdist.transport.mpi.hierarchical.lanes import Lane
from hpcdist.transport.mpi.hierarchical.nodes import Hierarchy
from hpcdist.transport.mpi.hierarchical.parts import Part, Shape, Steps, Window
from hpcdist.transport.shm.collectives import share_of

_BYTE = np.dtype(np.uint8)


def _bytes_of(array: NumpyArray) -> NumpyArray:
    return array.reshape(-1).view(_BYTE)


def _apart(send: NumpyArray, recv: NumpyArray | None) -> NumpyArray:
    """Return what is sent as memory that does not change while the result arrives."""
    return send.copy() if recv is not None and np.may_share_memory(send, recv) else send


@final
class Broadcast(Steps):
    """The lanes of the root's node carry a slice each."""

    def __init__(self, context: MpiContext, nodes: Hierarchy, call: Distribution) -> None:
        self._nodes, self._out = nodes, _bytes_of(call.recv)
        self._is_root = context.rank == call.root
        self._source = nodes.node_of[call.root]
        self._root = nodes.members[self._source].index(call.root)
        own = self._out if self._is_root else None
        self.window = Window(nodes, call, own, self.shape(nodes, call), _BYTE)

    @classmethod
    def shape(cls, nodes: Hierarchy, call: Distribution) -> Shape:
        """Return what the operation needs of the staging memory."""
        return Shape(1, 1, call.recv.nbytes, 1)

    def begin(self, part: Part, lane: Lane) -> None:
        """Send this lane's slice, or receive it."""
        mine, number = self._slice(part, self._nodes.number), self._nodes.number
        if self._nodes.home == self._source:
            data = self.window.given(self._root, part)[0, mine]
        else:
            data = self.window.made(number, part)[0, mine]
        lane.start(lane.broadcast(data, self._source))

    def take(self, part: Part) -> None:
        """Copy the part from the root, or the slices of all lanes."""
        out = self._out[part.columns]
        if self._nodes.home != self._source:
            for lane in range(self._nodes.lanes):
                chosen = self._slice(part, lane)
                out[chosen] = self.window.made(lane, part)[0, chosen]
        elif not self._is_root:
            out[...] = self.window.given(self._root, part)[0]

    def _slice(self, part: Part, lane: int) -> slice:
        first, count = share_of(part.items, self._nodes.lanes, lane)
        return slice(first, first + count)


@final
class Gather(Steps):
    """all_gather and gather: each lane collects the blocks of the ranks that it carries."""

    def __init__(self, context: MpiContext, nodes: Hierarchy, call: Gathering) -> None:
        self._nodes, self._call = nodes, call
        self._to = None if call.kind is Kind.ALL_GATHER else nodes.node_of[call.root]
        self._takes = self._to is None or context.rank == call.root
        recv = call.recv
        if recv is None and self._takes:
            recv = np.empty_like(call.send, shape=(context.size * call.send.size,))
        own = _bytes_of(_apart(call.send, recv))
        self.window = Window(nodes, call, own, self.shape(nodes, call), _BYTE)
        self._recv = recv
        self._out = None if recv is None else _bytes_of(recv).reshape(context.size, -1)

    @classmethod
    def shape(cls, nodes: Hierarchy, call: Gathering) -> Shape:
        """Return what the operation needs of the staging memory."""
        carried = [sum(map(len, nodes.carried_by(lane))) for lane in range(nodes.lanes)]
        return Shape(1, max(carried), call.send.nbytes, 1)

    def begin(self, part: Part, lane: Lane) -> None:
        """Hand to the lane what the ranks of this node offer that it carries."""
        nodes, window = self._nodes, self.window
        local = range(nodes.number, nodes.node.size, nodes.lanes)
        own = [window.given(rank, part)[0] for rank in local]
        given = own[0] if len(own) == 1 else np.concatenate(own)
        counts = [len(ranks) * part.items for ranks in nodes.carried_by(nodes.number)]
        wanted = [self._to in (None, node) for node in range(lane.size)]
        runs = [given if wants else given[:0] for wants in wanted]
        into = window.made(nodes.number, part).reshape(-1)
        lane.start(lane.exchange(runs, cut(into, [wanted[lane.rank] * each for each in counts])))

    def take(self, part: Part) -> None:
        """Copy what the lanes have collected, and what the ranks of this node offer."""
        if self._out is None or not self._takes:
            return
        nodes, columns = self._nodes, part.columns
        for number, rank in enumerate(nodes.members[nodes.home]):
            self._out[rank, columns] = self.window.given(number, part)[0]
        for lane in range(nodes.lanes):
            carried = [rank for ranks in nodes.carried_by(lane) for rank in ranks]
            for rank, block in zip(carried, self.window.made(lane, part), strict=False):
                if nodes.node_of[rank] != nodes.home:
                    self._out[rank, columns] = block

    def result(self) -> list[Block] | None:
        """Return the blocks that the caller has no memory for."""
        if self._recv is None or not self._takes:
            return None
        return even_blocks(self._recv, self._call, self._nodes.size)


@final
class Scatter(Steps):
    """Each lane of the root's node carries the blocks of its ranks on all nodes."""

    def __init__(self, context: MpiContext, nodes: Hierarchy, call: Distribution) -> None:
        self._nodes, self._rank, self._out = nodes, context.rank, _bytes_of(call.recv)
        self._source = nodes.node_of[call.root]
        self._root = nodes.members[self._source].index(call.root)
        own = None
        if call.send is not None and context.rank == call.root:
            own = _bytes_of(_apart(call.send, call.recv))
        self.window = Window(nodes, call, own, self.shape(nodes, call), _BYTE)

    @classmethod
    def shape(cls, nodes: Hierarchy, call: Distribution) -> Shape:
        """Return what the operation needs of the staging memory."""
        return Shape(nodes.size, nodes.most_carried, call.recv.nbytes, 1)

    def begin(self, part: Part, lane: Lane) -> None:
        """Send the blocks that this lane carries, or receive those for this node."""
        nodes, window = self._nodes, self.window
        if nodes.home != self._source:
            mine = window.made(nodes.number, part).reshape(-1)
            count = len(nodes.carried(nodes.home, nodes.number)) * part.items
            taken = [mine[: count * (node == self._source)] for node in range(lane.size)]
            lane.start(lane.exchange([mine[:0]] * lane.size, taken))
            return
        carried = nodes.carried_by(nodes.number)
        blocks = [rank for ranks in carried for rank in ranks]
        wire = np.ascontiguousarray(window.given(self._root, part)[blocks]).reshape(-1)
        counts = [len(ranks) * part.items for ranks in carried]
        lane.start(lane.exchange(cut(wire, counts), [wire[:0]] * lane.size))

    def take(self, part: Part) -> None:
        """Copy this rank's block from the root, or from the lane that carries it."""
        nodes = self._nodes
        if nodes.home == self._source:
            block = self.window.given(self._root, part)[self._rank]
        else:
            row, lane = divmod(nodes.number, nodes.lanes)
            block = self.window.made(lane, part)[row]
        self._out[part.columns] = block


@final
class AllToAll(Steps):
    """Each lane carries what the ranks of a node have for the ranks that it carries elsewhere."""

    def __init__(self, context: MpiContext, nodes: Hierarchy, call: Gathering) -> None:
        self._nodes, self._rank, self._call = nodes, context.rank, call
        recv = np.empty_like(call.send).reshape(-1) if call.recv is None else call.recv
        own = _bytes_of(_apart(call.send, call.recv))
        self.window = Window(nodes, call, own, self.shape(nodes, call), _BYTE)
        self._recv = recv
        self._out = _bytes_of(recv).reshape(context.size, -1)

    @classmethod
    def shape(cls, nodes: Hierarchy, call: Gathering) -> Shape:
        """Return what the operation needs of the staging memory."""
        made = nodes.most_carried * nodes.size
        return Shape(nodes.size, made, call.send.nbytes // nodes.size, 1)

    def begin(self, part: Part, lane: Lane) -> None:
        """Exchange with the other nodes what this lane carries."""
        nodes, window = self._nodes, self.window
        carried = [
            () if node == nodes.home else ranks
            for node, ranks in enumerate(nodes.carried_by(nodes.number))
        ]
        offered = [window.given(rank, part) for rank in range(nodes.node.size)]
        rows = [each[rank] for ranks in carried for rank in ranks for each in offered]
        wire = np.concatenate(rows) if rows else self._out[0, :0]
        given = [len(ranks) * len(offered) * part.items for ranks in carried]
        taken = [rows * part.items for rows in self._rows()]
        into = window.made(nodes.number, part).reshape(-1)
        lane.start(lane.exchange(cut(wire, given), cut(into, taken)))

    def take(self, part: Part) -> None:
        """Copy this rank's blocks from the lane that carries them, and from this node."""
        nodes, columns = self._nodes, part.columns
        for number, rank in enumerate(nodes.members[nodes.home]):
            self._out[rank, columns] = self.window.given(number, part)[self._rank]
        nth, lane = divmod(nodes.number, nodes.lanes)
        made = self.window.made(lane, part)
        starts = starts_of(self._rows(lane))
        for node, ranks in enumerate(nodes.members):
            if node != nodes.home:
                first = starts[node] + nth * len(ranks)
                self._out[ranks, columns] = made[first : first + len(ranks)]

    def result(self) -> list[Block]:
        """Return the blocks that the caller has no memory for."""
        return even_blocks(self._recv, self._call, self._nodes.size)

    def _rows(self, lane: int | None = None) -> list[int]:
        """Return how many blocks come to this node along a lane (its own), of each node."""
        nodes = self._nodes
        carried = len(nodes.carried(nodes.home, nodes.number if lane is None else lane))
        return [
            0 if node == nodes.home else carried * len(ranks)
            for node, ranks in enumerate(nodes.members)
        ]
