"""`Site`: what the groups of a job have in common."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

from hpcdist.config import Config
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import LinkCost
from hpcdist.transport.mpi.communicators import Communicators
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.news import Circles
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.tuning import Copies, TuningRule, TuningTable, read_costs, read_rules

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
    deaths: Deaths
    communicators: Communicators
    tables: dict[tuple[int, bool, bool, Copies], TuningTable]

    def table(
        self, ranks: int, *, several_nodes: bool, attaches: bool, copies: Copies
    ) -> TuningTable:
        """Return the rules for a group; one object for all groups that are alike."""
        key = ranks, several_nodes, attaches, copies
        if key not in self.tables:
            self.tables[key] = TuningTable(
                self.rules, ranks, several_nodes=several_nodes, attaches=attaches, copies=copies
            )
        return self.tables[key]


def make_site(
    config: Config, nodes: Sequence[int], deaths: Deaths, communicators: Communicators
) -> Site:
    """Read the tuning file and prepare shared memory; local.

    Raises:
        UsageError: the tuning file is unusable; the shared memory is less than a page.

    """
    nodes = pretended_nodes(config, nodes)
    heap_bytes = int(config.shared_heap_mb * _MiB)
    if heap_bytes < mmap.PAGESIZE:
        raise UsageError(
            f"HPCDIST_SHARED_HEAP_MB={config.shared_heap_mb} is less than a page of memory "
            f"({mmap.PAGESIZE} bytes); set more or unset it"
        )
    heap = Heap(heap_bytes, use_compiled=config.kernel == "auto")
    allowance = Allowance(int(config.early_mb * _MiB))
    rules, costs = read_rules(config.tuning), read_costs(config.tuning)
    return Site(config, heap, nodes, rules, costs, allowance, Circles(), deaths, communicators, {})


def pretended_nodes(config: Config, nodes: Sequence[int]) -> Sequence[int]:
    """Return the node of each world rank: what it is, or what `ranks_per_node` makes of it."""
    pretended = config.ranks_per_node
    return nodes if pretended is None else [rank // pretended for rank in range(len(nodes))]
