"""`Table`: a table as one rank has it; how all ranks make one, count, shrink and hand out rows."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import barrier
from hpcdist.comm.objects import all_gather_object
from hpcdist.comm.session import require_session
from hpcdist.comm.together import together
from hpcdist.errors import MismatchError, UsageError
from hpcdist.ps.accessors import accessor_of
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.given import check_shrink
from hpcdist.ps.hot import Hot, hottest
from hpcdist.ps.load import fill
from hpcdist.ps.modes import Sync
from hpcdist.ps.options import Options
from hpcdist.ps.route import HANDLERS, Told, Verb, hand_over
from hpcdist.ps.rows import RowStore
from hpcdist.ps.server import Shard
from hpcdist.ps.worker import Worker, worker_of
from hpcdist.rpc.agent import AGENT


def check_running(cluster: Cluster) -> None:
    """Raise where this worker has stopped."""
    if cluster.stopped or cluster.over:
        raise UsageError(
            "this worker has stopped (fleet.stop_worker); nothing is pulled or pushed afterwards"
        )


@final
class Table:
    """A table of one cluster, as one rank has it.

    Attributes:
        name: what it is found by.
        number: of the tables of the cluster, in the order in which they were made.
        options: what it was made of.
        shard: the rows that this rank keeps; None where it does not serve.
        worker: what this rank does with what it pulls and pushes; None where it only serves.
        dense: whether it is that of a `DenseTable`.
        day: what `fleet.set_date` has said.
        layer: the `sparse_embedding` that it has here.
        hot: which ids this rank reads most often without asking their server.
        accessor: how gradients change its rows now.
        period: how often it has been shrunk.

    """

    def __init__(self, cluster: Cluster, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.number = len(cluster.tables)
        self.accessor, self.period = accessor_of(options.optimizer, options.dtype), 0
        serves = cluster.server >= 0
        self.shard = Shard(self.new_store(shared=True), len(cluster.workers)) if serves else None
        self.worker: Worker | None = None
        self.dense, self.day = False, ""
        self.layer: Any = None
        self.hot = Hot()

    def new_store(self, *, shared: bool = False, **changes: Any) -> RowStore:
        """Return an empty store of such rows, which learn at the rate of now.

        Args:
            shared: that others of the node can read.
            changes: options that it has instead of the table's.

        """
        store = self.options._replace(**changes).new_store(shared=shared)
        store.learning_rate = self.accessor.options["learning_rate"]
        return store


def _create(cluster: Cluster, _: Any, told: Told) -> Table:
    """Make a table, or find the one of this name. Collective, after all ranks agree."""
    name, options = told.needed
    found: Table | None = cluster.tables.get(name)
    if found is not None:
        before, now = found.options.words(), told.words[1:]
        if before != now:
            differ = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
            raise MismatchError(
                f"there is a table {name!r} with {differ[0]}, but it is now asked for with "
                f"{differ[1]}; give the same options, or another name"
            )
        return found
    with together(cluster.group):
        if not isinstance(options.mode, Sync) and require_session()[AGENT] is None:
            from hpcdist.rpc import init_rpc

            serves_only = cluster.worker < 0
            init_rpc(f"server{cluster.server}" if serves_only else None, group=cluster.group)
        table = Table(cluster, name, options)
        cluster.tables[name] = table
        if cluster.worker >= 0:
            table.worker = worker_of(options.mode, cluster, table)
    fill(cluster, [name])
    return table


def _stats(cluster: Cluster, table: Table, _: Told) -> dict[str, Any]:
    own = None
    if table.shard is not None:
        with table.shard.lock:
            store, hot = table.shard.store, table.shard.hot.hottest()
            own = {**store.stats(), "rows": len(store), "hot": hot}
    everyone: list[Any] = []
    all_gather_object(everyone, (own, table.hot.hottest()), cluster.group)
    servers = [everyone[rank][0] for rank in cluster.servers]
    read = [hot for _, hot in everyone]
    rows = [each["rows"] for each in servers]
    mean = sum(rows) / len(rows)
    return {
        "rows": sum(rows),
        "bytes": sum(each.get("bytes", 0) for each in servers),
        "balance": max(rows) / mean if mean else 1.0,
        "hot": hottest([*read, *(each["hot"] for each in servers)]),
        "servers": servers,
    }


def _shrink(cluster: Cluster, table: Table, told: Told) -> int:
    (threshold, decay, unseen), entry = told.words, table.options.entry
    check_shrink(threshold, decay, unseen, entry is not None and entry.terms.scored)
    table.period += 1
    removed = 0 if table.shard is None else table.shard.shrink(threshold, decay, unseen)
    everyone: list[int] = []
    all_gather_object(everyone, removed, cluster.group)
    return sum(everyone)


def _set_lr(cluster: Cluster, table: Table, told: Told) -> None:
    (rate,) = told.words
    table.accessor.set_learning_rate(rate)
    if table.worker is not None:
        table.worker.set_lr(rate)
    if table.shard is not None:
        with table.shard.lock:
            table.shard.store.learning_rate = rate
    barrier(cluster.group)  # or a push of a worker that is ahead could come before


def _export(cluster: Cluster, table: Table, told: Told) -> tuple[NumpyArray, NumpyArray]:
    """Deal out the rows of each server to the workers; one that works itself keeps its own."""
    ids, rows, *_ = table.options.nothing()
    gives = np.zeros(cluster.group.nranks, np.int64)
    with together(cluster.group):
        if table.shard is not None:
            with table.shard.lock:
                ids = table.shard.store.slots.ids()
                rows = table.shard.store.pull(ids, create=False)
            to = cluster.workers if cluster.worker < 0 else (cluster.group.rank,)
            gives[[*to]] = np.diff(len(ids) * np.arange(len(to) + 1) // len(to))
        ids, rows = hand_over(cluster, (ids, rows), gives)
        order = np.argsort(ids)
        return ids[order], rows[order]


HANDLERS[Verb.CREATE] = _create
HANDLERS[Verb.STATS] = _stats
HANDLERS[Verb.SHRINK] = _shrink
HANDLERS[Verb.SET_LR] = _set_lr
HANDLERS[Verb.EXPORT] = _export
