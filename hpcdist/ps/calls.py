"""The RPC route: a worker calls servers, which answer while they compute, in no common order."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.session import require_session
from hpcdist.ps.cluster import Cluster
from hpcdist.ps.route import Pending, requests_of
from hpcdist.ps.server import Shard
from hpcdist.ps.shared import Found, Window, can_share
from hpcdist.rpc.agent import require_agent
from hpcdist.rpc.future import Future
from hpcdist.rpc.serving import calls


class _Some(NamedTuple):
    """Rows that were read past their server, and a call for the others."""

    found: Found
    rest: _Here | Future[Any]

    def wait(self) -> Any:
        """Return all of them."""
        self.found.rows[self.found.absent] = self.rest.wait()
        return self.found.rows

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self.rest.done()


class _Here(NamedTuple):
    """What a call of this rank's own shard has returned, as a `Future` shows it."""

    value: Any

    def wait(self) -> Any:
        """Return it."""
        return self.value

    def done(self) -> bool:
        """Return that it is there."""
        return True


_Begun: TypeAlias = "_Here | _Some | Future[Any]"


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
        self._windows: dict[int, Window | None] = {
            number: None
            for number, rank in enumerate(self._servers)
            if number == self._own or not can_share() or not self._agent.is_near(rank)
        }
        """Where rows of other servers are read; None of those that have to be asked."""

    def on_all(self, what: str, *args: Any) -> list[Any]:
        """Return what a method of each server's shard returns."""
        begun = [self._begin(i, what, args) for i in range(len(self._servers))]
        return [each.wait() for each in begun]

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
        begin = self._pull if what == "pull" else self._begin
        begun = [
            begin(number, what, tuple(each[part] for each in (ids, *arrays)))
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

    def _pull(self, number: int, what: str, args: tuple[Any, ...]) -> _Begun:
        """Begin to get rows of a server: those that are there are read where they are, if possible.

        See [Note: reading past]. Ids without a row go to the server, which may make one.
        """
        window, (ids,) = self._window(number), args
        found = None if window is None else window.read(ids)
        if found is None:
            return self._begin(number, what, args)
        if not found.absent.size:
            return _Here(found.rows)
        return _Some(found, self._begin(number, what, (ids[found.absent],)))

    def _window(self, number: int) -> Window | None:
        """Return where the rows of a server are read now; None if it has to be asked for them."""
        if number in self._windows:
            window = self._windows[number]
            if window is None or not window.is_old:
                return window
        self._windows[number] = window = self._opened(number, self._windows.get(number))
        return window

    def _opened(self, number: int, before: Window | None) -> Window | None:
        failed = None
        while (layout := self._begin(number, "layout", ()).wait()) != failed:
            try:
                return Window(layout, before)
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
    return getattr(require_session().clusters[key].tables[name].shard, what)(*args)
