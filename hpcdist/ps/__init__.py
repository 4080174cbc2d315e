"""Parameter server: rows that are found by ids, in tables larger than a node.

Read in this order: `ids` (who owns an id), `slots` (where its row is), `merging` (gradients of
equal ids), `initializers`, `accessors` (how a gradient changes a row), `entries` (which ids get a
row), `waiting` (those that have none yet), `slabs` (the memory), `given` (what callers pass),
`rows` (`RowStore`: all of it, on one rank). Then what makes a table of the rows of several ranks:
`modes` (when others see a push), `cluster` (who works, who serves), `server` (what one rank keeps),
`shared` (how others of the node read it), `route` (lock step), `calls` (RPC), `worker` (a worker in
each mode), `options` and `core` (what all ranks know of a table), `series` (how saves follow each
other), `save`, `load`, `rooms` (where pulled rows go), `table`, `dense`.
"""

from hpcdist.ps.accessors import Accessor as Accessor, accessor_of as accessor_of
from hpcdist.ps.dense import DenseTable as DenseTable
from hpcdist.ps.entries import (
    CountFilterEntry as CountFilterEntry,
    ProbabilityEntry as ProbabilityEntry,
    ShowClickEntry as ShowClickEntry,
)
from hpcdist.ps.modes import Async as Async, Geo as Geo, Ssp as Ssp, Sync as Sync
from hpcdist.ps.rows import RowStore as RowStore
from hpcdist.ps.table import SparseTable as SparseTable

__all__ = [
    "Accessor",
    "accessor_of",
    "RowStore",
    "ProbabilityEntry",
    "CountFilterEntry",
    "ShowClickEntry",
    "SparseTable",
    "DenseTable",
    "Sync",
    "Async",
    "Geo",
    "Ssp",
]
