"""`Cluster`: which ranks of a group work, which serve, and which tables they have."""

from __future__ import annotations

from typing import Any, final

from hpcdist.comm.group import Group
from hpcdist.comm.session import Slot, require_session, resolve_group
from hpcdist.errors import UsageError
from hpcdist.ps.modes import Mode, Sync


@final
class Cluster:
    """The ranks of a group as workers and servers; by default each is both.

    Attributes:
        group: all of them.
        key: under which the session keeps it.
        workers: ranks of the group that train.
        servers: those that keep rows; the order says which rows.
        mode: of tables that say nothing.
        tables: by name, in the order in which they were made.
        begins_from: the saves that tables are filled from when the workers begin, and names of
            those tables; None for all.
        begun: whether the workers have begun (`fleet.init_worker`): servers serve from then on.
        stopped: whether this worker has stopped.
        over: whether all have.

    """

    def __init__(
        self, group: Group, key: int, workers: tuple[int, ...], servers: tuple[int, ...]
    ) -> None:
        self.group, self.key, self.workers, self.servers = group, key, workers, servers
        self.mode: Mode = Sync()
        self.tables: dict[str, Any] = {}
        self.begins_from: tuple[str, tuple[str, ...] | None] | None = None
        self.begun = self.stopped = self.over = False

    @property
    def worker(self) -> int:
        """Number of this rank among the workers; -1 if it only serves."""
        return self.workers.index(self.group.rank) if self.group.rank in self.workers else -1

    @property
    def server(self) -> int:
        """Number of this rank among the servers; -1 if it keeps no rows."""
        return self.servers.index(self.group.rank) if self.group.rank in self.servers else -1

    @property
    def dedicated(self) -> bool:
        """Whether there are ranks that only serve."""
        return not {*self.servers} <= {*self.workers}

    def world_rank(self, rank: int) -> int:
        """Return the world rank of a rank of the group."""
        return self.group.ranks[rank]


CLUSTERS: Slot[dict[int, Cluster]] = Slot(dict)
"""Workers, servers and tables, by the number of the group."""


def cluster_of(group: Group | None = None) -> Cluster:
    """Return the workers and servers of a group: as `fleet.init` has set, or every rank as both.

    Raises:
        UsageError: this rank is not in the group.

    """
    group = resolve_group(group)
    if not group.is_member():
        raise UsageError(
            f"rank {group.world_rank} is not in group {group.name}, whose world ranks are "
            f"{group.ranks}; let only these make tables there"
        )
    clusters = require_session()[CLUSTERS]
    if group.id not in clusters:
        everyone = tuple(range(group.nranks))
        clusters[group.id] = Cluster(group, group.id, everyone, everyone)
    return clusters[group.id]
