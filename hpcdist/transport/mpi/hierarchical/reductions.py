"""Reductions of a group that spans nodes: combined inside each node, then along the lanes.

Every rank that has a lane combines its slice of what the ranks of its node offer, and the lanes
combine the slices of all nodes. Numbers are added in the order of the ranks inside a node, and
then in the order of the nodes; those that are to be added in the order of all ranks go from node to
node, as scans do. Where each node has one rank, both orders are the same.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import UFUNCS
from hpcdist.transport.call.runs import contribution, cut
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.hierarchical.lanes import Fold, Lane, Steps as LaneSteps
from hpcdist.transport.mpi.hierarchical.nodes import Hierarchy
from hpcdist.transport.mpi.hierarchical.parts import Part, Shape, Steps, Window, under_way_in_turn
from hpcdist.transport.mpi.ordered import keeps_order
from hpcdist.transport.shm.collectives import share_of
from hpcdist.transport.shm.kernel import accumulate, write_out


class _Sliced(Steps):
    """What reductions have in common where each lane has a slice of the columns."""

    made = 0

    def __init__(self, context: MpiContext, nodes: Hierarchy, call: Reduction) -> None:
        self._context, self._nodes, self._call, self._rule = context, nodes, call, call.rule
        self._ufunc = UFUNCS[call.rule.combine]
        self._out = call.recv.reshape(-1)
        shape = self.shape(nodes, call)
        self._in_turn = self._goes_in_turn()
        if self._in_turn:
            shape = shape._replace(under_way=under_way_in_turn(len(nodes.members)))
        self.window = Window(nodes, call, call.recv, shape, call.recv.dtype)
        self._wires: deque[NumpyArray] = deque()

    @classmethod
    def shape(cls, nodes: Hierarchy, call: Reduction) -> Shape:
        """Return what the operation needs of the staging memory."""
        return Shape(1, cls.made, call.recv.size, call.recv.itemsize)

    def _goes_in_turn(self) -> bool:
        """Return whether one node after the other adds what it has to what comes."""
        ordered = keeps_order(self._context.site.config, self._rule)
        return ordered and not self._nodes.is_rank_each

    def begin(self, part: Part, lane: Lane) -> None:
        """Hand this lane's slice to the lane: what the node makes of it, or when its turn comes."""
        offered = self._offered(part)
        if self._in_turn:
            wire = np.empty_like(offered[0], self._rule.wire)
            steps = self._each_in_turn(lane, wire, partial(self._fold, wire, offered))
        else:
            wire = accumulate(self._rule, offered)
            steps = self._all_at_once(lane, wire)
        self._wires.append(wire)
        lane.start(steps)

    def _all_at_once(self, lane: Lane, wire: NumpyArray) -> LaneSteps:
        raise NotImplementedError

    def _each_in_turn(self, lane: Lane, wire: NumpyArray, fold: Fold) -> LaneSteps:
        raise NotImplementedError

    @np.errstate(over="ignore", invalid="ignore")
    def _fold(self, wire: NumpyArray, offered: list[NumpyArray]) -> None:
        """Go on with `wire` through the ranks of this node."""
        encode = self._rule.encode
        for rank, each in zip(self._nodes.members[self._nodes.home], offered, strict=True):
            own = each if encode is None else encode(each)
            if rank:
                self._ufunc(wire, own, out=wire)
            else:
                wire[...] = own

    def _slice(self, part: Part, lane: int) -> slice:
        first, count = share_of(part.items, self._nodes.lanes, lane)
        return slice(first, first + count)

    def _offered(self, part: Part) -> list[NumpyArray]:
        """Return this lane's slice of what the ranks of the node offer."""
        mine, window = self._slice(part, self._nodes.number), self.window
        return [window.given(rank, part)[0, mine] for rank in range(self._nodes.node.size)]


@final
class AllReduce(_Sliced):
    """The slices of all nodes are combined on all of them, in place."""

    def _all_at_once(self, lane: Lane, wire: NumpyArray) -> LaneSteps:
        return lane.all_reduce(wire, self._ufunc)

    def _each_in_turn(self, lane: Lane, wire: NumpyArray, fold: Fold) -> LaneSteps:
        return lane.all_reduce_in_turn(wire, fold)

    def end(self, part: Part) -> None:
        """Write the result where this rank has offered its slice."""
        out = self._offered(part)[self._nodes.number]
        write_out(self._rule, self._wires.popleft(), out, self._context.size)

    def take(self, part: Part) -> None:
        """Copy the slices of all lanes."""
        mine = self._out[part.columns]
        for lane in range(self._nodes.lanes):
            if lane != self._nodes.number or self.window.stages:
                chosen = self._slice(part, lane)
                mine[chosen] = self.window.given(lane, part)[0, chosen]


@final
class Reduce(_Sliced):
    """The slices of all nodes are combined on the root's node."""

    made = 1

    def _all_at_once(self, lane: Lane, wire: NumpyArray) -> LaneSteps:
        return lane.reduce(wire, self._ufunc, self._root)

    def _each_in_turn(self, lane: Lane, wire: NumpyArray, fold: Fold) -> LaneSteps:
        return lane.reduce_in_turn(wire, fold, self._root)

    @property
    def _root(self) -> int:
        return self._nodes.node_of[self._call.root]

    def end(self, part: Part) -> None:
        """Write the result where the root can read it."""
        wire = self._wires.popleft()
        if self._root == self._nodes.home:
            mine = self._slice(part, self._nodes.number)
            out = self.window.made(self._nodes.number, part)[0, mine]
            write_out(self._rule, wire, out, self._context.size)

    def take(self, part: Part) -> None:
        """Copy the slices of all lanes; on the root."""
        if self._context.rank != self._call.root:
            return
        mine = self._out[part.columns]
        for lane in range(self._nodes.lanes):
            chosen = self._slice(part, lane)
            mine[chosen] = self.window.made(lane, part)[0, chosen]


@final
class Scan(_Sliced):
    """scan and exscan of ranks that are numbered node by node, one node after the other.

    Each rank's result is left where it has offered its numbers.
    """

    def _goes_in_turn(self) -> bool:
        return True

    def _each_in_turn(self, lane: Lane, wire: NumpyArray, fold: Fold) -> LaneSteps:
        return lane.in_turn(wire, fold)

    @np.errstate(over="ignore", invalid="ignore")
    def _fold(self, wire: NumpyArray, offered: list[NumpyArray]) -> None:
        rule, is_exclusive = self._rule, self._call.kind is Kind.EXSCAN
        for rank, each in zip(self._nodes.members[self._nodes.home], offered, strict=True):
            own = accumulate(rule, [each])
            if is_exclusive and rank:  # the first rank of an exscan keeps what it has
                write_out(rule, wire.copy(), each, rank)  # a mean is divided in place
            if rank:
                self._ufunc(wire, own, out=wire)
            else:
                wire[...] = own
            if not is_exclusive:
                write_out(rule, wire.copy(), each, rank + 1)

    def end(self, part: Part) -> None:
        """Nothing is left to do."""
        self._wires.popleft()

    def take(self, part: Part) -> None:
        """Copy what the lanes have left."""
        if self.window.stages:
            self._out[part.columns] = self.window.given(self._nodes.number, part)[0]


@final
class ReduceScatter(Steps):
    """Each lane combines the blocks of the ranks that it carries, and each node keeps its own."""

    def __init__(self, context: MpiContext, nodes: Hierarchy, call: Reduction) -> None:
        self._context, self._nodes, self._rule = context, nodes, call.rule
        self._ufunc = UFUNCS[call.rule.combine]
        given = contribution(call)
        if np.may_share_memory(given, call.recv):
            given = given.copy()
        self._out = call.recv.reshape(-1)
        self.window = Window(nodes, call, given, self.shape(nodes, call), call.recv.dtype)
        self._wires: deque[NumpyArray] = deque()

    @classmethod
    def shape(cls, nodes: Hierarchy, call: Reduction) -> Shape:
        """Return what the operation needs of the staging memory."""
        return Shape(nodes.size, nodes.most_carried, call.recv.size, call.recv.itemsize)

    def begin(self, part: Part, lane: Lane) -> None:
        """Combine inside the node what this lane carries, and hand it to the lane."""
        nodes, rule = self._nodes, self._rule
        offered = [self.window.given(rank, part) for rank in range(nodes.node.size)]
        carried = nodes.carried_by(nodes.number)
        counts = [len(ranks) * part.items for ranks in carried]
        rows = [
            accumulate(rule, [rank[block] for rank in offered])
            for ranks in carried
            for block in ranks
        ]
        blocks = cut(np.concatenate(rows), counts)
        self._wires.append(blocks[nodes.home])
        lane.start(lane.reduce_scatter(blocks, self._ufunc))

    def end(self, part: Part) -> None:
        """Write the results where the ranks of the node can read them."""
        nodes = self._nodes
        made = self.window.made(nodes.number, part)
        for row, wire in enumerate(self._wires.popleft().reshape(-1, part.items)):
            write_out(self._rule, wire, made[row], self._context.size)

    def take(self, part: Part) -> None:
        """Copy this rank's block from the lane that carries it."""
        row, lane = divmod(self._nodes.number, self._nodes.lanes)
        self._out[part.columns] = self.window.made(lane, part)[row]
