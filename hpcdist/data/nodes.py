"""`Nodes`: which ranks keep their rows together, in memory of their node; pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from hpcdist.data.shares import IndexArray
from hpcdist.named_tuple import NamedTuple


class Nodes(NamedTuple):
    """For each rank the ranks of its node, itself among them, in order."""

    members: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[Hashable]) -> Nodes:
        """Return the nodes of ranks that run on nodes of these names."""
        ranks: dict[Hashable, tuple[int, ...]] = {}
        for rank, name in enumerate(names):
            ranks[name] = (*ranks.get(name, ()), rank)
        return Nodes(tuple(ranks[name] for name in names))

    @staticmethod
    def apart(size: int) -> Nodes:
        """Return a node for each rank."""
        return Nodes.of(range(size))

    @property
    def most(self) -> int:
        """How many ranks the largest node has."""
        return max(map(len, self.members))

    @property
    def are_one(self) -> bool:
        """Whether all ranks run on one node."""
        return self.most == len(self.members)

    def receivers(self, rank: int) -> IndexArray:
        """Return for each rank who of its node takes what `rank` sends there.

        Ranks of a node that send, and those of another one that take, are paired, so that all of
        them have as much to do.
        """
        place = self.members[rank].index(rank)
        return np.array([node[place % len(node)] for node in self.members])
