"""Make and end groups. Only the members of a group need to call these."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

from hpcdist.comm.announcement import end_all
from hpcdist.comm.closed import Closed, Dormant
from hpcdist.comm.group import Group, world_of
from hpcdist.comm.making import group_of
from hpcdist.comm.members import Members
from hpcdist.comm.nccl_config import create_nccl_config
from hpcdist.comm.session import Session, require_session, resolve_group, set_session
from hpcdist.errors import UsageAssertionError, UsageError, UsageTypeError
from hpcdist.integers import as_integer
from hpcdist.transport.base import Transport
from hpcdist.transport.registry import check_backend_of_group
from hpcdist.transport.waiting.polling import raising_held


def new_group(
    ranks: Iterable[int] | None = None,
    backend: str | None = None,
    timeout: Any = None,
    nccl_comm_init_option: int = 0,
    nccl_config: Mapping[str, int | str] | None = None,
    *,
    name: str | None = None,
) -> Group:
    """Make a group of some ranks. Collective over the members; nobody else needs to call it.

    Args:
        ranks: world ranks, in any order (the group is sorted); None for all.
        backend: the transport of the world, which all groups have, or a name for any.
        timeout: seconds (or a timedelta) for the operations of this group; default: the world's.
        nccl_comm_init_option: accepted for Paddle's sake, without effect.
        nccl_config: checked, and a warning says what to set in its place; see
            `create_nccl_config`.
        name: for messages; made of the id by default.

    Returns:
        The group; on a rank that is not a member one with ``rank == -1``. Members agree on its
        id, without the others.

    Raises:
        UsageError: the ranks are not integers, are named twice, are out of range, or are none at
            all, or a setting of NCCL does not exist; on every caller, before anything is sent.
            Another thread of this rank is making or ending a group; the other members get a
            `RemoteError`.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> dist.new_group([0]).ranks
        [0]

    """
    world = world_of(require_session())
    create_nccl_config(nccl_config)
    members = _check_ranks(ranks, world.nranks)
    check_backend_of_group(backend, world.backend)
    return cast(Group, group_of(members, timeout, name))


def get_group(id: int = 0) -> Group | None:
    """Return the group with this id; warn and return None if there is none. Local.

    Args:
        id: what its attribute `id` says; 0 is the world.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> dist.get_group(0) is world
        True

    """
    group = cast("Group | None", require_session().groups.get(id))
    if group is None:
        warnings.warn(f"Group {id} is not initialized.", stacklevel=2)
    return group


@raising_held
def destroy_process_group(group: Group | None = None) -> None:
    """Free the communicators of `group`, or of all groups; they cannot be used any more.

    Collective over the members. After ``destroy_process_group()`` the next
    `init_parallel_env` starts again.

    Args:
        group: None for all groups of this process, the world included.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> group = dist.new_group([0])
        >>> dist.destroy_process_group(group)

    """
    session = require_session()
    taken: list[bool] = []
    try:
        session.groups_change.take(taken, "destroy_process_group")
        _destroy(session, group)
    finally:
        if taken and taken[-1]:
            session.groups_change.lock.release()


def _destroy(session: Session, group: Group | None) -> None:
    if group is None or group is session.world:
        session.end(f"rank {session.world.rank} has called destroy_process_group")
        for each in reversed(list(session.groups.values())):
            _close(each)
        set_session(None)
        return
    group = resolve_group(group)
    if session.groups.get(group.id) is not group:
        raise UsageAssertionError(
            f"Destroy group with id {group.id} is invalid: it has been destroyed before or belongs "
            "to an earlier init_parallel_env"
        )
    _close(group)
    del session.groups[group.id]


def _close(group: Members) -> None:
    transport, made_for_group = group.transport, None
    if transport is not None:
        made_for_group = None if group.id == 0 else transport.user_comm
        transport.close()
    end_all(group)
    group.transport = Closed(
        f"group {group.name} has been destroyed by destroy_process_group; make a new one with "
        "new_group (or init_parallel_env for the world)"
    )
    if made_for_group is not None:
        made_for_group.Free()


@raising_held
def shutdown_process_group(group: Group | None = None) -> None:
    """Free the MPI resources of `group`; its next operation restarts it. Collective.

    Args:
        group: None for the world.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> group = dist.new_group([0])
        >>> dist.shutdown_process_group(group)
        >>> dist.restart_process_group(group)

    """
    group = resolve_group(group)
    transport = group.transport
    if transport is None or isinstance(transport, (Closed, Dormant)):
        return
    transport.close()
    end_all(group)

    def wake() -> Transport:
        group.transport = restarted = transport.reopen()
        return restarted

    group.transport = Dormant(group.name, transport, wake)


def restart_process_group(group: Group | None = None) -> None:
    """Restart a group after `shutdown_process_group`. Collective over the members.

    Args:
        group: None for the world.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> group = dist.new_group([0])
        >>> dist.shutdown_process_group(group)
        >>> dist.restart_process_group(group)

    """
    group = resolve_group(group)
    if isinstance(group.transport, Dormant):
        group.transport.wake()


def _check_ranks(ranks: Any, size: int) -> list[int]:
    if ranks is None:
        return list(range(size))
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise UsageTypeError(f"ranks must be integers such as [0, 1], got {ranks!r}")
    given = list(ranks)
    try:
        members = sorted(as_integer(each) for each in given)
    except TypeError:
        members = []
    if not members:
        raise UsageError(f"ranks must be at least one integer, got {given!r}")
    if members[0] < 0 or members[-1] >= size:
        raise UsageError(f"ranks {given} are out of range: the world has ranks 0 to {size - 1}")
    if len(set(members)) < len(members):
        raise UsageError(f"ranks {given} contain a rank twice; name each rank once")
    return members
