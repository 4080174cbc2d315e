"""`Site`: what the groups of a job have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcdist.config import Config
from hpcdist.transport.base import LinkCost
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.news import Circles
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.tuning import TuningRule, read_costs, read_rules

_MiB = 1 << 20


class Site(NamedTuple):
    """What the groups of a job have in common.

    `nodes` tells for each world rank the first rank of its node.
    """

    config: Config
    heap: Heap
    nodes: Sequence[int]
    rules: Sequence[TuningRule]
    costs: Mapping[str, LinkCost]
    allowance: Allowance
    circles: Circles


def make_site(config: Config, nodes: Sequence[int]) -> Site:
    """Read the tuning file and prepare shared memory; local.

    Raises:
        UsageError: the tuning file is unusable.

    """
    pretended = config.ranks_per_node
    if pretended is not None:
        nodes = [rank // pretended for rank in range(len(nodes))]
    heap = Heap(int(config.shared_heap_mb * _MiB))
    allowance = Allowance(int(config.early_mb * _MiB))
    rules, costs = read_rules(config.tuning), read_costs(config.tuning)
    return Site(config, heap, nodes, rules, costs, allowance, Circles())
