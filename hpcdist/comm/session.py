"""`Session`: the groups of one world, from `init_parallel_env` to `destroy_process_group`.

A process has at most one; each thread of a simulated world has one of its own. This is the
only place that keeps groups.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast, final

from hpcdist.comm.closed import Closed
from hpcdist.comm.members import Members
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.failure import tell_in_short
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.flight.recorder import enter_group
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.waiting.polling import AT_ONCE

G = TypeVar("G", bound=Members)
T = TypeVar("T")


class Whereabouts(NamedTuple):
    """What `ParallelEnv` tells of a rank beyond its group."""

    local_rank: int
    local_size: int
    node_rank: int
    nnodes: int
    endpoints: tuple[str, ...]
    gpu: int | None = None


@final
class OneThread:
    """A lock: one thread at a time changes what groups there are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._holder = 0, ""

    def take(self, taken: list[bool], what: str, *, patient: bool = False) -> None:
        """Take the lock to run `what`, and note that; wait for another thread if `patient`.

        Where the last in `taken` is true, the caller gives it back: see [Note: given back].

        Raises:
            UsageError: another thread is there, or this one.

        """
        taken.extend(map(self.lock.acquire, AT_ONCE))
        if not taken[0]:
            holder, doing = self._holder
            if not patient or holder == threading.get_ident():
                raise UsageError(
                    f"{what} was called at {call_site()} while another thread of this rank is in "
                    f"{doing or what}: the ranks could not tell which of their calls belong "
                    "together; let one thread make and end all groups, before the others begin"
                )
            taken.extend(map(self.lock.acquire, (True,)))
        self._holder = threading.get_ident(), what


@final
class Slot(Generic[T]):
    """A place in every session for what a package above keeps there, as `session[SLOT]`.

    Args:
        empty: makes the value that is there first.
        kept: whether it outlives the death of a rank; else it is made anew then.
        end: is called with the value, and with words that say why, when the session ends or a rank
            has died.

    """

    def __init__(
        self,
        empty: Callable[[], T],
        *,
        kept: bool = False,
        end: Callable[[T, str], None] | None = None,
    ) -> None:
        self.empty, self.kept, self.end = empty, kept, end


@final
class Session:
    """The world group and the groups made from it."""

    def __init__(self, world: Members, whereabouts: Whereabouts, timeout_s: float) -> None:
        self.world = world
        self.groups: dict[int, Members] = {0: world}
        self.whereabouts = whereabouts
        self.timeout_s = timeout_s
        self.next_id = 1
        self.groups_change = OneThread()
        self.ends_with_gloo = False
        """Whether nothing but `gloo_init_parallel_env` has asked for it."""
        self._slots: dict[Slot[Any], Any] = {}

    def __getitem__(self, slot: Slot[T]) -> T:
        """Return what is in a slot, made when first asked for."""
        if slot not in self._slots:
            self._slots[slot] = slot.empty()
        return cast("T", self._slots[slot])

    def __setitem__(self, slot: Slot[T], value: T) -> None:
        """Put a value into a slot."""
        self._slots[slot] = value

    def end(self, why: str) -> None:
        """Empty the slots that have something to end, such as that of RPC. Local."""
        for slot in tuple(self._slots):
            if slot.end is not None:
                slot.end(self._slots.pop(slot), why)

    def give_up(self) -> None:
        """Empty the slots whose content belongs to the ranks as they were. Local."""
        self.end("a rank has died")
        self._slots = {slot: value for slot, value in self._slots.items() if slot.kept}

    def record(self, group: Members) -> None:
        """Have the flight recorder follow `group` as it is now, if it follows this process.

        To be called anew for each group whose ranks change, after `recorder.settle`.
        """
        if group.is_member() and not is_simulated():
            group.flight = enter_group(group.ranks, group.id, group.name)

    def adopt(self, group: G) -> G:
        """Keep `group` until it is destroyed."""
        self.groups[group.id] = group
        self.record(group)
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
        if compiled is not None:
            compiled.hot_world(session and session.world)


def enter_simulation(restart: Callable[[], Session]) -> None:
    """Make this thread a rank of a simulated world, whose sessions `restart` makes."""
    here.session, here.restart = restart(), restart


def leave_simulation() -> None:
    """Make this thread an ordinary one again."""
    del here.session, here.restart


def is_simulated() -> bool:
    """Return whether this thread is a rank of a simulated world."""
    return "session" in vars(here)


def simulated_rank() -> dict[str, Any]:
    """Return what makes this thread a rank of a simulated world; nothing if it is none."""
    return dict(vars(here))


@contextmanager
def standing_for(rank: dict[str, Any]) -> Iterator[None]:
    """Make this thread stand for a `simulated_rank`, whose own thread it is not."""
    if not rank or is_simulated():
        yield
        return
    vars(here).update(rank)
    try:
        yield
    finally:
        vars(here).clear()


def require_session() -> Session:
    """Return the current session, or raise `UsageError`."""
    session = current_session()
    if session is None:
        tell_in_short()
        raise UsageError(
            "The global group is not initialized; call hpcdist.init_parallel_env() first"
        )
    return session


def resolve_group(group: G | None) -> G:
    """Return `group`, or the world group for None; raise `UsageError` for anything else."""
    if group is None:
        return cast("G", require_session().world)
    if Members not in type(group).__mro__:  # `isinstance` of an abstract class takes its time
        raise UsageError(
            f"group must be a Group from new_group or get_group, or None for all ranks, got "
            f"{group!r}; pass other arguments by keyword (op=, sync_op=, tag=)"
        )
    return group


def _stand_apart() -> None:
    """Make the groups of a forked child refuse: MPI and shared memory belong to its parent."""
    session = current_session()
    for group in session.groups.values() if session is not None else ():
        group.announced.clear()  # its parent tells these ends
        if group.transport is not None:
            group.transport = Closed(
                f"this process (pid {os.getpid()}) was forked from rank {group.world_rank} and is "
                "not a rank itself, so it cannot communicate; do that in the rank, and hand "
                "results over with multiprocessing",
                group.transport,
            )


os.register_at_fork(after_in_child=_stand_apart)
