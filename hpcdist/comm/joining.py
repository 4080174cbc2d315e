"""`join`: a spare waits until it takes the place of a rank that has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcdist.comm.group import Group, world_group
from hpcdist.runtime import reports
from hpcdist.runtime.torchrun import renew_torchrun_variables
from hpcdist.transport.base import Recovered
from hpcdist.transport.flight import recorder

NOT_NEEDED = 0
"""The exit code of a spare that got no place."""


def join(wait: Callable[[], Recovered | None]) -> tuple[Any, Group]:
    """Wait for a place; return the world, and its group. The others are in `recover`.

    Nothing is recorded meanwhile: ``hpcdist ps`` shows ranks.

    Args:
        wait: what the transport has for this, `StartedWorld.join`.

    Raises:
        SystemExit: the job has come to its end, or cannot go on; so does this program then.

    """
    reports.note_rank(-1, parked=True)
    recorder.close_ring()
    found = wait()
    if found is None:
        raise SystemExit(NOT_NEEDED)
    world = world_group(found.transport)
    take_roles(world, found)
    roles = found.roles
    reports.note_recovery(roles.lost, found.seconds, roles.gone, roles.taken)
    return found.world, world


def take_roles(world: Group, found: Recovered) -> None:
    """Have this process and the world know who is who after a recovery; local.

    Args:
        world: the group of all ranks.
        found: what the transport has made of it.

    """
    roles = found.roles
    world.generation, world.lost = roles.generation, roles.lost
    world.replaced = tuple(sorted(roles.taken))
    reports.note_rank(world.rank)
    reports.note_world(roles.generation, world.nranks)
    renew_torchrun_variables(found.world.place)
