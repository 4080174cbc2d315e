"""Which collectives take the nodes of a group into account: one row of `STEPS` per operation."""

from __future__ import annotations

from typing import Any

from hpcdist.transport.call.call import Collective, Reduction
from hpcdist.transport.call.kinds import ARRAYS, Kind, table_for
from hpcdist.transport.call.reduction import Combine
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.hierarchical.movements import AllToAll, Broadcast, Gather, Scatter
from hpcdist.transport.mpi.hierarchical.nodes import Hierarchy
from hpcdist.transport.mpi.hierarchical.parts import run_parts
from hpcdist.transport.mpi.hierarchical.reductions import AllReduce, Reduce, ReduceScatter, Scan

_ROWS: dict[Kind, Any] = {
    Kind.ALL_REDUCE: AllReduce,
    Kind.REDUCE: Reduce,
    Kind.REDUCE_SCATTER: ReduceScatter,
    Kind.SCAN: Scan,
    Kind.EXSCAN: Scan,
    Kind.BROADCAST: Broadcast,
    Kind.ALL_GATHER: Gather,
    Kind.GATHER: Gather,
    Kind.SCATTER: Scatter,
    Kind.ALLTOALL: AllToAll,
}
STEPS = table_for("STEPS", ARRAYS, _ROWS)


def goes_by_nodes(nodes: Hierarchy, call: Collective, *, ordered: bool) -> bool:
    """Return whether `call`, whose blocks are alike on all ranks, can go by the nodes.

    `ordered` says that it has to combine numbers in the order of the ranks.
    """
    if isinstance(call, Reduction) and (
        call.counts is not None or call.rule.combine is Combine.EXACT_SUM
    ):
        return False
    if ordered and call.kind is Kind.REDUCE_SCATTER and not nodes.is_rank_each:
        return False
    if (ordered or STEPS[call.kind] is Scan) and not nodes.in_order:
        return False
    return bool(STEPS[call.kind].shape(nodes, call).step)


def perform_by_nodes(context: MpiContext, nodes: Hierarchy, call: Collective) -> Any:
    """Run `call`, on which all ranks have agreed, and return its result."""
    nodes.node.check_usable()
    return run_parts(context, nodes, call, STEPS[call.kind](context, nodes, call))
