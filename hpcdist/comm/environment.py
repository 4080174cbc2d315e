"""Start and end: `init_parallel_env`, ranks, groups, `ParallelEnv`.

`new_group` needs only the members; everything else here is local, unless it says otherwise.
"""

from __future__ import annotations

import atexit
import importlib.util
import warnings
from collections.abc import Iterable
from typing import Any, final

import numpy as np

from hpcdist.comm.group import Closed, Dormant, Group
from hpcdist.comm.session import (
    Session,
    Whereabouts,
    current_session,
    group_at_hand,
    is_simulated,
    session_at_hand,
    set_session,
)
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.runtime.environ import snapshot
from hpcdist.runtime.place import read_place
from hpcdist.transport.lane import seconds

_HOST_BACKENDS = (None, "auto", "mpi", "gloo")
_HOST_DEVICES = (None, "auto", "cpu")


def init_parallel_env(
    nccl_config: Any = None,
    *,
    backend: str | None = "auto",
    device: str | None = "auto",
    timeout: Any = None,
    comm: Any = None,
) -> Group:
    """Start hpcdist and return the group of all ranks. Every rank calls this first; collective.

    Works under ``srun``, ``mpirun``, ``hpcdist run``, `spawn` and alone (a world of one rank).
    A second call returns the same group.

    Args:
        nccl_config: accepted for Paddle's sake; NCCL's own settings.
        backend: ``"auto"`` or ``"mpi"`` (``"gloo"`` means the same: host memory).
        device: ``"auto"`` or ``"cpu"``.
        timeout: seconds (or a timedelta) after which an operation that not all ranks have
            joined is a `CollectiveTimeout`; default 1800, or ``HPCDIST_TIMEOUT_S``.
        comm: an mpi4py communicator to use instead of ``MPI.COMM_WORLD``; hpcdist talks on its
            own duplicates of it.

    Raises:
        UsageError: the launcher started several ranks but MPI sees one (launcher and MPI
            library do not match), or an argument is wrong.
        TransportError: there is no MPI library.

    Example:
        >>> import hpcdist as dist
        >>> dist.init_parallel_env().nranks >= 1
        True

    """
    session = current_session()
    if session is not None:
        return session.world
    _check_backend(backend)
    if device not in _HOST_DEVICES:
        raise UsageError(
            f"device={device!r} is not available in this installation; use 'auto' or 'cpu'"
        )
    config = read_config()
    timeout_s = _check_timeout(timeout, config.timeout_s)

    from hpcdist.runtime.failure import end_job_on_failure
    from hpcdist.runtime.mpi import start_world
    from hpcdist.transport.mpi_host import MpiHost

    world = start_world(config, comm)
    place = world.place
    end_job_on_failure(place.rank)
    transport = MpiHost(world.comm, range(place.size), timeout_s, config.piece_mb)
    endpoints = tuple(
        f"{host}:{_FIRST_PORT + local}"
        for host, local in zip(world.hosts, world.local_ranks, strict=True)
    )
    whereabouts = Whereabouts(
        place.local_rank, place.local_size, place.node_rank, place.nnodes, endpoints
    )
    set_session(session := Session(transport, whereabouts, timeout_s))
    _end_at_exit()
    return session.world


_FIRST_PORT = 6170
"""Paddle's first port: endpoints name ranks; nobody listens there."""


def _end_at_exit() -> None:
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    """End the session before MPI ends; tell whoever still waits that this rank is gone."""
    session = current_session()
    if session is None:
        return
    set_session(None)
    groups = [group for group in reversed(session.groups.values()) if group.transport is not None]
    transport = session.world.transport
    if transport is None or not transport.together_at_end():
        for group in groups:
            if group.transport is not None:
                group.transport.leave("has ended")
        return
    for group in groups:
        if group.transport is not None:
            group.transport.close()


def is_available() -> bool:
    """Say whether hpcdist can communicate here: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def is_initialized() -> bool:
    """Say whether `init_parallel_env` has been called (and not undone)."""
    return current_session() is not None


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in `group` (None: the world); -1 if it is not a member.

    Before `init_parallel_env` the launcher's environment answers.
    """
    if group is None and not is_initialized():
        return read_place(snapshot()).rank
    return group_at_hand(group).rank


def get_world_size(group: Group | None = None) -> int:
    """Return how many ranks `group` has (None: the world); -1 if this process is not a member.

    Before `init_parallel_env` the launcher's environment answers.
    """
    if group is None and not is_initialized():
        return read_place(snapshot()).size
    return group_at_hand(group).world_size


def get_backend(group: Group | None = None) -> str:
    """Return the name of the transport of `group`, ``"MPI"``; `UsageError` for a non-member."""
    return group_at_hand(group).backend


# ---- groups


def new_group(
    ranks: Iterable[int] | None = None,
    backend: str | None = None,
    timeout: Any = None,
    *,
    name: str | None = None,
) -> Group:
    """Make a group of some ranks. Collective over the members; nobody else needs to call it.

    Args:
        ranks: world ranks, in any order (the group is sorted); None for all.
        backend: as in `init_parallel_env`.
        timeout: seconds (or a timedelta) for the operations of this group; default: the world's.
        name: for messages; made of the id by default.

    Returns:
        The group; on a rank that is not a member one with ``rank == -1``. Members agree on its
        id, without the others.

    Raises:
        UsageError: ranks that are no integers, twice there, out of range, or none at all; on
            every caller, before anything is sent.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> dist.new_group([0]).ranks
        [0]

    """
    session = session_at_hand()
    members = _check_ranks(ranks, session.world.nranks)
    _check_backend(backend)
    timeout_s = _check_timeout(timeout, session.timeout_s)
    world = session.world
    if world.rank not in members:
        return session.adopt(Group(members, world.rank, session.next_id, None, name))
    assert world.transport is not None
    transport, group_id = world.transport.subgroup(members, session.next_id, timeout_s)
    return session.adopt(Group(members, world.rank, group_id, transport, name))


def get_group(id: int = 0) -> Group | None:
    """Return the group with this id; warn and return None if there is none."""
    group = session_at_hand().groups.get(id)
    if group is None:
        warnings.warn(f"Group {id} is not initialized.", stacklevel=2)
    return group


def destroy_process_group(group: Group | None = None) -> None:
    """Free the communicators of `group`, or of all groups; they cannot be used any more.

    Collective over the members. After ``destroy_process_group()`` the next
    `init_parallel_env` starts again.
    """
    session = session_at_hand()
    if group is None or group is session.world:
        for each in reversed(list(session.groups.values())):
            _close(each)
        set_session(None)
        return
    group = group_at_hand(group)
    if session.groups.get(group.id) is not group:
        raise UsageError(
            f"Destroy group with id {group.id} is invalid: it has been destroyed before or belongs "
            "to an earlier init_parallel_env"
        )
    del session.groups[group.id]
    _close(group)


def _close(group: Group) -> None:
    if group.transport is not None:
        group.transport.close()
        group.transport = Closed(group.name)


def shutdown_process_group(group: Group | None = None) -> None:
    """Free what `group` (None: the world) keeps in MPI; its next operation restarts it.

    Collective over the members.
    """
    group = group_at_hand(group)
    transport = group.transport
    if transport is None or isinstance(transport, (Closed, Dormant)):
        return
    group.transport = Dormant(group, transport.reopen)
    transport.close()


def restart_process_group(group: Group | None = None) -> None:
    """Restart a group after `shutdown_process_group`. Collective over the members."""
    group = group_at_hand(group)
    if isinstance(group.transport, Dormant):
        group.transport.wake()


def _check_ranks(ranks: Any, size: int) -> list[int]:
    if ranks is None:
        return list(range(size))
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise UsageError(f"ranks must be integers such as [0, 1], got {ranks!r}")
    given = list(ranks)
    wrong = [
        rank for rank in given if not isinstance(rank, (int, np.integer)) or isinstance(rank, bool)
    ]
    if wrong or not given:
        raise UsageError(f"ranks must be at least one integer, got {given!r}")
    members = sorted(int(rank) for rank in given)
    if members[0] < 0 or members[-1] >= size:
        raise UsageError(f"ranks {given} are out of range: the world has ranks 0 to {size - 1}")
    if len(set(members)) < len(members):
        raise UsageError(f"ranks {given} contain a rank twice; name each rank once")
    return members


def _check_backend(backend: Any) -> None:
    if not (backend is None or isinstance(backend, str)) or (
        (backend.lower() if backend else backend) not in _HOST_BACKENDS
    ):
        raise UsageError(
            f"backend={backend!r} is not available in this installation; use 'auto' or 'mpi' "
            "('gloo' is accepted and means the same)"
        )


def _check_timeout(timeout: Any, default_s: float) -> float:
    try:
        timeout_s = seconds(timeout)
    except (TypeError, ValueError):
        timeout_s = -1.0
    if timeout_s is None:
        return default_s
    if not timeout_s > 0:
        raise UsageError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timeout_s


# ---- the environment


@final
class ParallelEnv:
    """What a rank can know about itself and its job (Paddle's `ParallelEnv`).

    Before `init_parallel_env` the launcher's environment answers, afterwards MPI does.
    """

    def __init__(self) -> None:
        session = current_session()
        if session is not None:
            self._rank, self._size = session.world.rank, session.world.nranks
            self._where, self._timeout_s = session.whereabouts, session.timeout_s
            return
        place = read_place(snapshot())
        self._rank, self._size = place.rank, place.size
        self._where = Whereabouts(
            place.local_rank, place.local_size, place.node_rank, place.nnodes, ()
        )
        self._timeout_s = read_config().timeout_s

    @property
    def rank(self) -> int:
        """Rank in the world."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self._size

    @property
    def nranks(self) -> int:
        """Same as `world_size`."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Rank on this node."""
        return self._where.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._where.local_size

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self._where.node_rank

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return self._where.nnodes

    @property
    def device_id(self) -> int:
        """Number of this rank's device; 0 on CPUs."""
        return 0

    @property
    def dev_id(self) -> int:
        """Same as `device_id`."""
        return self.device_id

    @property
    def device_type(self) -> str:
        """Kind of this rank's device."""
        return "cpu"

    @property
    def current_endpoint(self) -> str:
        """``host:port`` that names this rank; empty before `init_parallel_env`."""
        return self.trainer_endpoints[self._rank] if self._where.endpoints else ""

    @property
    def trainer_endpoints(self) -> list[str]:
        """The endpoints of all ranks; they name ranks, nobody listens there."""
        return list(self._where.endpoints)

    @property
    def nrings(self) -> int:
        """Communicator rings per group: always 1."""
        return 1

    @property
    def pg_timeout(self) -> int:
        """Time limit of operations in milliseconds."""
        return int(self._timeout_s * 1000)


# ---- Paddle's gloo names: the host transport


def gloo_init_parallel_env(rank_id: int, rank_num: int, server_endpoint: str = "") -> None:
    """Start hpcdist on host memory; `rank_id` and `rank_num` must be what MPI says.

    Collective. `server_endpoint` is not needed: MPI has connected the ranks.
    """
    world = init_parallel_env(backend="gloo")
    if (rank_id, rank_num) != (world.rank, world.nranks):
        raise UsageError(
            f"gloo_init_parallel_env got rank {rank_id} of {rank_num}, but this process is rank "
            f"{world.rank} of {world.nranks}; start it with mpiexec or srun and pass get_rank() "
            "and get_world_size()"
        )


def gloo_barrier() -> None:
    """Wait until every rank has called this. Collective."""
    if not is_initialized():
        raise UsageError("gloo context is not initialized; call gloo_init_parallel_env first")
    from hpcdist.comm.collectives import barrier

    barrier()


def gloo_release() -> None:
    """End what `gloo_init_parallel_env` started. Collective; harmless when nothing is started."""
    if is_initialized() and not is_simulated():
        destroy_process_group()
