"""`Lane`: what travels between nodes, each byte as often as it must and by every node alike.

Every node owns a share. What is reduced goes to the owners of its shares, which combine the nodes'
in their order; what all want the owners send to all. So 2 S (N - 1) / N bytes of S leave each of N
nodes in an all-reduce, half of it in a reduce-scatter or an all-gather, and S the root's node in a
broadcast, which are the least there can be (Rabenseifner, "Optimization of collective reduction
operations", 2004; Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory,
practice, and experience", 2007). MPI libraries choose among algorithms that send up to four times
as much, for sizes and numbers of ranks that they know and we do not.

What is combined in the order of the ranks goes from node to node: each adds what its ranks have to
what comes, and the last one has the result. A node in the middle takes S twice then, as what comes
to it is no part of the result: N / (N - 1) times the least, which is nothing more on two nodes. To
send what single ranks have would be more wherever a node has three of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.runs import cut, pieces
from hpcdist.transport.mpi.datatypes import block
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.shm.collectives import share_of

Runs = Sequence[NumpyArray]
"""A run of memory for each node of the lane; empty where nothing goes there."""
ByNode = Sequence[tuple[int, NumpyArray]]
"""Nodes, and a run for each."""
Steps = Iterator[list[MPI.Request]]
"""What is to be waited for, and what is done between two waits."""
Fold = Callable[[], None]
"""Combines what the nodes before this one have come to with what this one has, in place."""


PIECE_BYTES = 60 << 10
"""So much is sent at a time. Of more than 64 KiB over TCP, Open MPI asks the receiver first, whose
answer comes behind what it sends itself: the two send in turn then, where they could both at once.
"""


class _UnderWay:
    """A collective of a lane: what it waits for, and the number of that step."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self.requests = steps, next(steps)
        self.number: float = 0

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to do."""
        return self.number == math.inf

    def advance(self, ahead: float) -> None:
        """Go on as far as possible without a wait, but not beyond step `ahead`."""
        while self.number < ahead and MPI.Request.Testall(self.requests):
            requests = next(self._steps, None)
            self.number = math.inf if requests is None else self.number + 1
            self.requests = requests or []


@final
class Lane:
    """One rank of each node; its collectives go on while the nodes do something else.

    Several may be under way. None passes another one: messages of a step come in the order in
    which the collectives began. Where two nodes send each other something in two steps, these have
    two tags: the next collective may begin on one of them before the second step, and on the other
    after it. `finish` waits until a function returns True, and is given the requests, too.
    """

    def __init__(self, comm: MPI.Intracomm, finish: Callable[[Callable[[], bool], Any], None]):
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._finish = finish
        self._under_way: deque[_UnderWay] = deque()

    def start(self, steps: Steps) -> None:
        """Begin one of the collectives below."""
        self._under_way.append(_UnderWay(steps))

    def wait(self) -> None:
        """Wait until the one that began first has ended; the others go on meanwhile."""
        self._finish(self._has_ended, self._under_way)
        self._under_way.popleft()

    def _has_ended(self) -> bool:
        ahead = math.inf
        for each in self._under_way:
            each.advance(ahead)
            ahead = each.number
        return self._under_way[0].has_ended

    # ---- reductions

    def all_reduce(self, wire: NumpyArray, ufunc: Any) -> Steps:
        """Combine `wire`, a flat array, of all nodes, in place."""
        shares = self._shares(wire)
        yield from self._reduced(shares, ufunc)
        yield self._exchanged([shares[self.rank]] * self.size, shares, Tag.TOTAL)

    def reduce(self, wire: NumpyArray, ufunc: Any, root: int) -> Steps:
        """Combine `wire` of all nodes into that of `root`; the others' is changed, too."""
        shares = self._shares(wire)
        yield from self._reduced(shares, ufunc)
        totals = self._at(root, shares[self.rank]), self._only(root, shares)
        yield self._exchanged(*totals, Tag.TOTAL)

    def reduce_scatter(self, blocks: Runs, ufunc: Any) -> Steps:
        """Combine the blocks that all nodes have for this one into its own."""
        yield from self._reduced(blocks, ufunc)

    def all_reduce_in_turn(self, wire: NumpyArray, fold: Fold) -> Steps:
        """Have one node after the other go on with `wire`, and give all what the last one has."""
        yield from self.in_turn(wire, fold)
        yield from self.broadcast(wire, self.size - 1)

    def reduce_in_turn(self, wire: NumpyArray, fold: Fold, root: int) -> Steps:
        """Have one node after the other go on with `wire`, and give `root` the result."""
        yield from self.in_turn(wire, fold)
        shares = self._only(root, [wire[:0]] * (self.size - 1) + [wire])
        last = self.rank == self.size - 1
        yield self._exchanged(self._at(root, wire if last else wire[:0]), shares)

    def in_turn(self, wire: NumpyArray, fold: Fold) -> Steps:
        """Have one node after the other go on with `wire`: `fold` adds to it what this node has."""
        if self.rank:
            yield self._receive([(self.rank - 1, wire)], Tag.IN_TURN)
        fold()
        if self.rank < self.size - 1:
            yield self._send([(self.rank + 1, wire)], Tag.IN_TURN)

    def _reduced(self, shares: Runs, ufunc: Any) -> Iterator[list[MPI.Request]]:
        own = shares[self.rank]
        given = yield from self._gathered(shares)
        total = given[0]
        with np.errstate(over="ignore", invalid="ignore"):
            for each in given[1:]:
                ufunc(total, each, out=total)
        own[...] = total

    def _gathered(self, shares: Runs) -> Any:
        """Return what all nodes have of this one's share, in memory of its own."""
        own = shares[self.rank]
        room = np.empty_like(own, shape=(self.size, own.size))
        yield self._exchanged(shares, list(room))
        room[self.rank] = own
        return room

    # ---- movements

    def broadcast(self, data: NumpyArray, root: int) -> Steps:
        """Send `data`, a flat array, from `root` to all: a share to each, which they exchange."""
        others = [node for node in range(self.size) if node != root]
        shares: list[NumpyArray] = [data[:0]] * self.size
        for node, share in zip(others, _equal_shares(data, len(others)), strict=True):
            shares[node] = share
        own = shares[self.rank]
        if self.rank == root:
            yield self._exchanged(shares, self._only(-1, shares))
            return
        yield self._exchanged(self._only(-1, shares), self._at(root, own))
        yield self._exchanged(self._but(root, [own] * self.size), shares)

    def exchange(self, given: Runs, taken: Runs) -> Steps:
        """Send each node its run, and take one of each; this node's own stays here."""
        yield self._exchanged(given, taken)

    def _exchanged(self, given: Runs, taken: Runs, tag: Tag = Tag.PART) -> list[MPI.Request]:
        """Begin to send each other node its run, beginning with the next one."""
        after = [(self.rank + step) % self.size for step in range(1, self.size)]
        receives = self._receive([(node, taken[node]) for node in reversed(after)], tag)
        answering = {node for node in after if taken[node].size}
        return receives + self._send([(node, given[node]) for node in after], tag, answering)

    def _receive(self, runs: ByNode, tag: Tag) -> list[MPI.Request]:
        return [
            self._comm.Irecv(block(piece, piece.nbytes), node, tag)
            for node, piece, _ in in_turn(runs)
        ]

    def _send(self, runs: ByNode, tag: Tag, answering: Container[int] = ()) -> list[MPI.Request]:
        """Begin to send a run to each node, and wait for those that send nothing themselves.

        They may be late, and what comes to a rank before it is wanted takes memory there.
        """
        verbs = self._comm.Isend, self._comm.Issend
        return [
            verbs[is_last and node not in answering](block(piece, piece.nbytes), node, tag)
            for node, piece, is_last in in_turn(runs)
        ]

    def _shares(self, data: NumpyArray) -> list[NumpyArray]:
        return _equal_shares(data, self.size)

    def _at(self, root: int, run: NumpyArray) -> list[NumpyArray]:
        """Return `run` for one node, and nothing for others."""
        return [run if node == root else run[:0] for node in range(self.size)]

    def _only(self, root: int, runs: Runs) -> list[NumpyArray]:
        """Return what `root` takes of all others, which take nothing."""
        return [run if self.rank == root else run[:0] for run in runs]

    def _but(self, root: int, runs: Runs) -> list[NumpyArray]:
        return [run[:0] if node == root else run for node, run in enumerate(runs)]


def in_turn(runs: ByNode) -> Iterator[tuple[int, NumpyArray, bool]]:
    """Cut runs, and return a piece of each in turn: its node, it, and whether it is the last."""
    cuts = [(node, [*pieces(run, PIECE_BYTES)]) for node, run in runs if run.size]
    for number in range(max((len(each) for _, each in cuts), default=0)):
        for node, each in cuts:
            if number < len(each):
                yield node, each[number], number == len(each) - 1


def _equal_shares(data: NumpyArray, nodes: int) -> list[NumpyArray]:
    items = data.size
    return cut(data, [share_of(items, nodes, node, 1)[1] for node in range(nodes)])
