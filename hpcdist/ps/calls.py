"""The RPC route: a worker calls servers, which answer while they compute, in no common order."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.session import require_session
from hpcdist.named_tuple import NamedTuple
from hpcdist.ps.cluster import CLUSTERS, Cluster
from hpcdist.ps.hot import Hot
from hpcdist.ps.merging import unique
from hpcdist.ps.route import Pending, requests_of
from hpcdist.ps.server import Shard
from hpcdist.ps.shared import Reader, Window, can_share
from hpcdist.rpc.agent import require_agent
from hpcdist.rpc.future import Future
from hpcdist.rpc.serving import calls


class _Here(NamedTuple):
    """What a call of this rank's own shard has returned, as a `Future` shows it."""

    value: Any

    def wait(self) -> Any:
        """Return it."""
        return self.value

    def done(self) -> bool:
        """Return that it is there."""
        return True


@final
class Calls:
    """The servers of a table, as one worker calls them. Local: nobody else has to call anything.

    Where this rank is a server itself, nothing is sent.
    """

    def __init__(self, cluster: Cluster, table: Any) -> None:
        self._agent = require_agent()
        self._where = cluster.key, table.name
        self._shard: Shard | None = table.shard
        self._no_rows: NumpyArray = table.options.nothing()[1]
        self._servers = [cluster.world_rank(rank) for rank in cluster.servers]
        self._own = cluster.server
        self.worker = cluster.worker
        self.workers = len(cluster.workers)
        self.names = [cluster.world_rank(rank) for rank in cluster.workers]
        self.timeout_s = require_session().timeout_s
        self.reader = Reader(len(self._servers), self._opened)
        self._hot: Hot = table.hot

    def on_all(self, what: str, *args: Any) -> list[Any]:
        """Return what a method of each server's shard returns."""
        begun = [self._begin(i, what, args) for i in range(len(self._servers))]
        return [each.wait() for each in begun]

    def pull(self, ids: NumpyArray, rows: NumpyArray) -> Pending:
        """Begin to get rows, some perhaps twice, into an array.

        Those that this rank can see are read where they are, see [Note: reading past]. The others
        come from their servers, which may make rows for ids that have none.
        """
        absent = self.reader.read(ids, rows)
        if absent.size < ids.size:
            self._hot.note(ids)
        if not absent.size:
            return Pending(lambda: rows, lambda: True)
        once, inverse = unique(ids[absent])

        def fill(found: NumpyArray) -> NumpyArray:
            rows[absent] = found[inverse]
            return rows

        return self.by_owner("pull", once).then(fill)

    def by_owner(self, what: str, ids: NumpyArray, *arrays: NumpyArray) -> Pending:
        """Begin a method of the shards that own `ids`, each with its part of ids and arrays.

        The result is what they return, as one array in the order of `ids`.
        """
        plan = requests_of(ids, len(self._servers))
        ends = np.cumsum(plan.counts)
        parts = [
            (number, plan.order[end - count : end])
            for number, (end, count) in enumerate(zip(ends, plan.counts, strict=True))
            if count
        ]
        begun = [
            self._begin(number, what, tuple(each[part] for each in (ids, *arrays)))
            for number, part in parts
        ]

        def finish() -> Any:
            found = [each.wait() for each in begun]
            if not found:
                return self._no_rows
            if found[0] is None:
                return None
            rows = np.empty((len(ids), *found[0].shape[1:]), found[0].dtype)
            for (_, part), each in zip(parts, found, strict=True):
                rows[part] = each
            return rows

        return Pending(finish, lambda: all(each.done() for each in begun))

    def is_there(self, worker: int) -> Future[bool]:
        """Ask a worker whether it has more calls to make; an error where it has died."""
        return self._agent.call(self.names[worker], calls)

    def _opened(self, number: int, before: Window | None) -> Window | None:
        """Return where the rows of a server are read now; None if it has to be asked for them."""
        if number == self._own:
            assert self._shard is not None
            return self._shard.window()
        if not can_share() or not self._agent.is_near(self._servers[number]):
            return None
        failed, known = None, {} if before is None else before.mapped
        while (layout := self._begin(number, "layout", ()).wait()) != failed:
            try:
                return Window(layout, known)
            except OSError:  # it has moved meanwhile; or it cannot be reached from here
                failed = layout
        return None

    def _begin(self, number: int, what: str, args: tuple[Any, ...]) -> _Here | Future[Any]:
        """Begin a method of the shard of a server."""
        if number == self._own:
            assert self._shard is not None
            return _Here(getattr(self._shard, what)(*args))
        to = self._servers[number]
        return self._agent.call(to, _on_shard, (*self._where, what, args), {}, self.timeout_s)


def _on_shard(key: int, name: str, what: str, args: tuple[Any, ...]) -> Any:
    """Call a method of this rank's shard of a table."""
    return getattr(require_session()[CLUSTERS][key].tables[name].shard, what)(*args)
