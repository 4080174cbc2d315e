"""`group_of`, `split`: how groups come from groups. Collective over the members of the new one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from hpcdist.comm.describe_objects import all_gather_object as describe_all_gather, part_of
from hpcdist.comm.dispatch import dispatch, not_a_member
from hpcdist.comm.members import Members
from hpcdist.comm.session import is_simulated, require_session
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import CollectiveTimeout, UsageError, came_of
from hpcdist.integers import integer
from hpcdist.transport.call.call import UNDEFINED, Objects, Refusal
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.layout import NEW_GROUP
from hpcdist.transport.flight.recorder import end, enter_making, fail, note
from hpcdist.transport.waiting.polling import raising_held
from hpcdist.transport.waiting.queue import seconds


@raising_held
def group_of(members: list[int], timeout: Any = None, name: str | None = None) -> Members:
    """Make the group of the world ranks `members`, in this order."""
    session = require_session()
    world, parent = session.world, session.world.transport
    assert parent is not None
    is_member, taken = world.rank in members, list[bool]()
    transport, group_id, before = None, session.next_id, parent.groups_begun
    try:
        timeout_s = check_timeout(timeout, session.timeout_s)
        session.groups_change.take(taken, f"new_group({members})")
        with _recorded(members, is_member):
            if is_member:
                transport, group_id = parent.subgroup(members, group_id, timeout_s)
            return session.adopt(world.beside(members, group_id, transport, name))
    except BaseException as error:
        why = error if isinstance(error, UsageError) else UsageError("it was interrupted")
        is_alone = bool(taken) and taken[-1]
        if is_member and not (is_alone and parent.groups_begun > before):
            with contextlib.suppress(UsageError):
                parent.subgroup(members, group_id, session.timeout_s, why)
        raise
    finally:
        if taken and taken[-1]:
            session.groups_change.lock.release()


@contextlib.contextmanager
def _recorded(members: list[int], is_member: bool) -> Iterator[None]:
    """Have it recorded that this rank, if it `is_member`, makes a group of `members`."""
    if is_simulated() or not is_member:
        yield
        return
    place, number = enter_making(members)
    mark = note(NEW_GROUP, place, number, 0, 0, 0)
    try:
        yield
    except BaseException:
        fail(mark)
        raise
    end(mark)


def split(group: Members, color: Any, key: Any, timeout: Any, name: str | None) -> Members:
    """Make the groups of `Group.split`; return this rank's."""
    if group.transport is None:
        not_a_member(group)
        return group_of([])
    session = require_session()
    check_timeout(timeout, session.timeout_s)
    told: list[Any] = []
    dispatch(group, True, part_of("Group.split", _describe_split), told, color, key)
    own = told[group.rank][0]
    members = sorted((key, rank) for rank, (color, key) in enumerate(told) if color == own)
    if own is None:
        members = []
    return group_of([group.ranks[rank] for _, rank in members], timeout, name)


def _describe_split(group: Members, told: list[Any], color: Any, key: Any) -> Objects | Refusal:
    try:
        entry = _color(color), 0 if key is None else integer(key, "key")
    except UsageError as error:
        return cannot(Kind.ALL_GATHER_OBJECT, group, error)
    return describe_all_gather(group, told, entry)


def _color(color: Any) -> int | None:
    if color is None:
        return None
    number = integer(color, "color")
    if number < 0 and number != UNDEFINED:
        raise UsageError(f"color must be at least 0, or None for no group, got {color!r}")
    return None if number == UNDEFINED else number


def check_timeout(timeout: Any, default_s: float) -> float:
    """Return `timeout` in seconds, the default for None; it must be positive."""
    try:
        timeout_s = seconds(timeout)
    except (TypeError, ValueError):
        timeout_s = -1.0
    if timeout_s is None:
        return default_s
    if not timeout_s > 0:
        raise UsageError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timeout_s


@contextlib.contextmanager
def limited(transport: Any, limit_s: float | None) -> Iterator[None]:
    """Give the operations of a group another time limit, unless it is None; local."""
    if limit_s is None or not hasattr(transport, "set_timeout"):
        yield
        return
    before = transport.timeout_s
    transport.set_timeout(min(limit_s, threading.TIMEOUT_MAX))
    try:
        yield
    finally:
        transport.set_timeout(before)


def hurried(transport: Any, error: BaseException | None) -> contextlib.AbstractContextManager[None]:
    """Have ranks meet at once or not at all, if `error` came of a time limit that is over.

    This rank has waited long enough for others; who comes later is told that it was given up.
    """
    return limited(transport, _SOON_S if came_of(error, CollectiveTimeout) else None)


_SOON_S = 1.0
