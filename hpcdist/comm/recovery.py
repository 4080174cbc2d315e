"""`recover`: the ranks that are left go on when others have died."""

from __future__ import annotations

import time
from typing import cast

from hpcdist.comm.announcement import end_all
from hpcdist.comm.closed import Closed
from hpcdist.comm.environment import whereabouts_of
from hpcdist.comm.group import Group, world_of
from hpcdist.comm.joining import take_roles
from hpcdist.comm.making import check_timeout
from hpcdist.comm.session import Session, require_session
from hpcdist.runtime import reports
from hpcdist.text import in_short
from hpcdist.transport.base import Recovered, Transport
from hpcdist.transport.flight import recorder
from hpcdist.transport.presence.roles import GroupTable
from hpcdist.transport.waiting.unheard import forget_all


def recover(timeout: float | None = None) -> Group:
    """Go on after ranks have died, with the others and with spares; return the new world group.

    Collective over the ranks that are left: each calls it when it gets a `RankFailure`. Whatever is
    under way ends. The group of all ranks changes in place. A spare, if there is one, takes the
    number of a dead rank, the lowest first, and returns from its `init_parallel_env`; where there
    are no more spares, the ranks that are left close up, in their order. ``lost`` names the old
    ranks that are gone, ``replaced`` those of them whose place a spare has taken, and
    ``generation`` counts recoveries. Groups all of whose members are left go on; the others are
    closed, and made anew by whoever needs them. So are meshes, grids, plans, works, and what
    `rpc.init_rpc` has begun. Arrays of `hpcdist.empty` stay as they are.

    Another death meanwhile does no harm: it is among those that the ranks recover from.

    Args:
        timeout: seconds to wait for the other ranks to come here; None for those of the job.

    Raises:
        UsageError: MPI ends this job when a rank dies, so that nothing can go on.
        RankFailure: fewer processes are left than ``--min-ranks`` asks for; the job has to end.
        CollectiveTimeout: not all ranks that are left have come in time.

    Example:
        ::

            try:
                train(world)
            except dist.RankFailure:
                world = dist.recover()

    """
    session = require_session()
    began, limit_s = time.monotonic(), check_timeout(timeout, session.timeout_s)
    world = world_of(session)
    transport = cast(Transport, world.transport)
    found = transport.recover(world.generation, _table(session), limit_s, lambda: _give_up(session))
    _renew(session, found)
    forget_all()  # what was under way has failed because of the deaths
    seconds = time.monotonic() - began
    roles = found.roles
    reports.note_recovery(roles.lost, seconds, roles.gone, roles.taken)
    return world


def _table(session: Session) -> GroupTable:
    """Return the groups beside the world that this rank is in, and their time limits."""
    found = {}
    for group in session.groups.values():
        limit_s = getattr(group.transport, "timeout_s", None)
        if group.id and limit_s is not None:
            found[group.id, tuple(group.ranks)] = float(limit_s)
    return found


def _give_up(session: Session) -> None:
    """Leave what was made of the groups as they were; local."""
    session.give_up()
    for group in session.groups.values():
        if group.transport is not None:
            group.transport.abandon()
        end_all(group)


def _renew(session: Session, found: Recovered) -> None:
    """Have the groups go on as they are now; local."""
    place = found.world.place
    session.whereabouts = whereabouts_of(found.world, session.whereabouts.gpu)
    going_on = {kept.id: (kept, transport) for kept, transport in found.groups}
    hosts = found.world.hosts
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    recorder.settle(place.rank, place.size, job=found.transport.job, here=in_short(mine))
    for group in cast("list[Group]", [*session.groups.values()]):
        if group.id == 0:
            group.go_on(range(place.size), place.rank, found.transport)
            take_roles(group, found)
        elif group.id in going_on:
            kept, transport = going_on[group.id]
            group.go_on(kept.ranks, place.rank, transport)
        else:
            del session.groups[group.id]
            group.transport = group.transport and Closed(
                f"group {group.name} of ranks {group.ranks} has lost ranks, or its members did not "
                "all know it, when the job recovered; make it anew with new_group"
            )
            continue
        session.record(group)
