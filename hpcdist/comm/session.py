"""`Session`: the groups of one world, from `init_parallel_env` to `destroy_process_group`.

A process has at most one; each thread of a simulated world has one of its own. This is the
only place that keeps groups.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, final

from hpcdist.comm.group import Closed, Group
from hpcdist.errors import UsageError
from hpcdist.transport.base import Transport


class Whereabouts(NamedTuple):
    """What `ParallelEnv` tells of a rank beyond its group."""

    local_rank: int
    local_size: int
    node_rank: int
    nnodes: int
    endpoints: tuple[str, ...]
    gpu: int | None = None


@final
class Session:
    """The world group and the groups made from it."""

    def __init__(self, transport: Transport, whereabouts: Whereabouts, timeout_s: float) -> None:
        self.world = Group(range(transport.size), transport.rank, 0, transport)
        self.groups: dict[int, Group] = {0: self.world}
        self.whereabouts = whereabouts
        self.timeout_s = timeout_s
        self.next_id = 1

    def adopt(self, group: Group) -> Group:
        """Keep `group` until it is destroyed."""
        self.groups[group.id] = group
        self.next_id = max(self.next_id, group.id) + 1
        return group


class _Here(threading.local):
    """The class attribute is the process's session; a simulated rank's thread hides it."""

    session: Session | None = None
    restart: Callable[[], Session] | None = None
    """In a simulated rank: makes the session of the next `init_parallel_env`."""


here = _Here()
"""`here.session` is the current session or None; read it, but set it with `set_session`."""


def current_session() -> Session | None:
    """Return the session of this thread's simulated world, or of this process, or None."""
    return here.session


def set_session(session: Session | None) -> None:
    """Make `session` the one of this process (of this simulated rank, inside `simulate`)."""
    if is_simulated():
        here.session = session
    else:
        _Here.session = session


def enter_simulation(restart: Callable[[], Session]) -> None:
    """Make this thread a rank of a simulated world, whose sessions `restart` makes."""
    here.session, here.restart = restart(), restart


def leave_simulation() -> None:
    """Make this thread an ordinary one again."""
    del here.session, here.restart


def is_simulated() -> bool:
    """Say whether this thread is a rank of a simulated world."""
    return "session" in vars(here)


def session_at_hand() -> Session:
    """Return the current session, or raise `UsageError`."""
    session = current_session()
    if session is None:
        raise UsageError(
            "The global group is not initialized; call hpcdist.init_parallel_env() first"
        )
    return session


def group_at_hand(group: Any) -> Group:
    """Return `group`, or the world group for None; raise `UsageError` for anything else."""
    if group is None:
        return session_at_hand().world
    if type(group) is not Group:
        raise UsageError(
            f"group must be a Group from new_group or get_group, or None for all ranks, got "
            f"{group!r}; give what is no group by keyword (op=, sync_op=, tag=)"
        )
    return group


def _stand_apart() -> None:
    """Let the groups of a forked child refuse: MPI and shared memory belong to its parent."""
    session = current_session()
    for group in session.groups.values() if session is not None else ():
        if group.transport is not None:
            group.transport = Closed(
                f"this process (pid {os.getpid()}) was forked from rank {group.world_rank} and is "
                "no rank itself, so it cannot communicate; do that in the rank, and hand results "
                "over with multiprocessing",
                group.transport,
            )


os.register_at_fork(after_in_child=_stand_apart)
