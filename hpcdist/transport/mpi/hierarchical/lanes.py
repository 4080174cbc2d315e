"""`Lane`: what travels between nodes, each byte as often as it must and by every node alike.

Every node owns a share. What is reduced goes to the owners of its shares, which combine the nodes'
in their order; what all want the owners send to all. So 2 S (N - 1) / N bytes of S leave each of N
nodes in an all-reduce, half of it in a reduce-scatter or an all-gather, and S the root's node in a
broadcast, which are the least there can be (Rabenseifner, "Optimization of collective reduction
operations", 2004; Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory,
practice, and experience", 2007). MPI libraries choose among algorithms that send up to four times
as much, for sizes and numbers of ranks that they know and we do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.runs import cut
from hpcdist.transport.mpi.datatypes import block
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.shm.collectives import share_of

Runs = Sequence[NumpyArray]
"""A run of memory for each node of the lane; empty where nothing goes there."""
Steps = Iterator[list[MPI.Request]]
"""What is to be waited for, and what is done between two waits."""


@final
class Lane:
    """One rank of each node; its collectives go on while the nodes do something else.

    `finish` waits for requests.
    """

    def __init__(self, comm: MPI.Intracomm, finish: Callable[[list[MPI.Request]], None]) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._finish = finish
        self._steps: Steps = iter(())
        self._requests: list[MPI.Request] = []

    def start(self, steps: Steps) -> None:
        """Begin one of the collectives below."""
        self._steps, self._requests = steps, next(steps)

    def wait(self) -> None:
        """Wait until it has ended."""
        steps, self._steps = self._steps, iter(())
        self._finish(self._requests)
        for self._requests in steps:
            self._finish(self._requests)
        self._requests = []

    # ---- reductions

    def all_reduce(self, wire: NumpyArray, ufunc: Any) -> Steps:
        """Combine `wire`, a flat array, of all nodes, in place."""
        shares = self._shares(wire)
        yield from self._reduced(shares, ufunc)
        yield self._exchanged([shares[self.rank]] * self.size, shares)

    def reduce(self, wire: NumpyArray, ufunc: Any, root: int) -> Steps:
        """Combine `wire` of all nodes into that of `root`; the others' is changed, too."""
        shares = self._shares(wire)
        yield from self._reduced(shares, ufunc)
        yield self._exchanged(self._at(root, shares[self.rank]), self._only(root, shares))

    def reduce_scatter(self, blocks: Runs, ufunc: Any) -> Steps:
        """Combine the blocks that all nodes have for this one into its own."""
        yield from self._reduced(blocks, ufunc)

    def exscan(self, wire: NumpyArray, before: NumpyArray, ufunc: Any) -> Steps:
        """Combine `wire` of the nodes before this one into `before`; the first node's stays."""
        shares = self._shares(wire)
        given = yield from self._gathered(shares)
        with np.errstate(over="ignore", invalid="ignore"):
            for last, each in pairwise(given):
                ufunc(last, each, out=each)
        found = self._shares(before)
        after = [given[node - 1] if node else given[0][:0] for node in range(self.size)]
        yield self._exchanged(after, found if self.rank else self._only(-1, found))
        if self.rank:
            found[self.rank][...] = after[self.rank]

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

    def _exchanged(self, given: Runs, taken: Runs) -> list[MPI.Request]:
        """Begin to send each other node its run, beginning with the next one."""
        requests = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if taken[source].size:
                requests.append(self._begin(self._comm.Irecv, taken[source], source))
            if given[to].size:
                requests.append(self._begin(self._comm.Isend, given[to], to))
        return requests

    def _begin(self, verb: Any, run: NumpyArray, node: int) -> MPI.Request:
        request: MPI.Request = verb(block(run, run.nbytes), node, Tag.PART)
        return request

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


def _equal_shares(data: NumpyArray, nodes: int) -> list[NumpyArray]:
    items = data.size
    return cut(data, [share_of(items, nodes, node, 1)[1] for node in range(nodes)])
