"""`recover`, `join`: a world of MPI goes on with the ranks that are left, and with spares."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

from mpi4py import MPI

from hpcdist.config import Config
from hpcdist.errors import RankFailure
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.mpi import World, locate, told_by_all
from hpcdist.transport.base import LinkCost, Recovered
from hpcdist.transport.flight import recorder
from hpcdist.transport.mpi.communicators import Communicators
from hpcdist.transport.mpi.crew import Crew
from hpcdist.transport.mpi.site import make_site
from hpcdist.transport.mpi.survival import deaths_in
from hpcdist.transport.presence.roles import (
    SPARE,
    GroupTable,
    Kept,
    Roles,
    Told,
    plan_groups,
    plan_roles,
)
from hpcdist.transport.shm.heap import Heap

CANNOT = (
    "recover() cannot go on here: MPI ends this job when a rank dies. Start it with hpcdist run "
    "--survive, or with Open MPI's mpirun --with-ft ulfm (MPICH and srun cannot)"
)

Make = Callable[..., Any]
"""Makes a transport, of a communicator, world ranks, a time limit and a site."""


class Settled(NamedTuple):
    """What all ranks of a world have alike, and a spare learns when it joins them."""

    timeout_s: float
    costs: Mapping[str, LinkCost]
    job: str
    worlds: int
    """How many there have been, for the flight recorder."""


class Own(NamedTuple):
    """What a process brings into a recovery; a spare has no heap, and nothing settled."""

    told: Told
    config: Config
    groups: GroupTable
    heap: Heap | None
    settled: Settled | None


@final
class _Built(NamedTuple):
    """What an attempt has made: the new world, and the groups that go on here.

    There is no world where this process waits on, as a spare.
    """

    roles: Roles
    world: World | None
    transports: list[Any]
    groups: list[tuple[Kept, Any]]

    def abandon(self) -> None:
        for each in self.transports:
            each.abandon()


def recover(crew: Crew, make: Make, own: Own, timeout_s: float) -> Recovered:
    """Go on with the ranks that are left; collective over them. See `Transport.recover`.

    All groups of the world until now have been abandoned.

    Args:
        crew: the processes of the job.
        make: makes the transports.
        own: what this rank brings.
        timeout_s: how long to wait for the others.

    """
    found = _regroup(crew, make, own, timeout_s)
    assert found is not None
    return found


def join(crew: Crew, make: Make, config: Config) -> Recovered | None:
    """Wait, as a spare, for a place in the world; None if there will be none.

    Args:
        crew: the processes of the job.
        make: makes the transport of the world.
        config: this process's settings.

    """
    while crew.is_called():
        try:
            found = _regroup(crew, make, Own(crew.told(), config, {}, None, None), math.inf)
        except RankFailure:  # too few are left, as the others hear, too
            return None
        if found is not None:
            return found
    return None


def _regroup(crew: Crew, make: Make, own: Own, timeout_s: float) -> Recovered | None:
    """Build the new world with the others; return it, None for a spare that waits on."""

    def build(comm: MPI.Intracomm, made: Communicators) -> _Built:
        return _build(comm, made, crew, make, own)

    began = time.monotonic()
    built = crew.regroup(build, timeout_s)
    crew.settle(built.roles)
    if built.world is None:
        return None
    transport = built.transports[0]
    transport.crew, crew.ranks = crew, built.world.comm
    seconds = time.monotonic() - began
    return Recovered(transport, built.roles, built.world, built.groups, seconds)


def _build(comm: MPI.Intracomm, made: Communicators, crew: Crew, make: Make, own: Own) -> _Built:
    told = [Told(*each) for each in told_by_all(comm, tuple(own.told))]
    roles = plan_roles(told, crew.seats)
    members, is_spare = _members(comm, made, roles)
    if is_spare:
        return _Built(roles, None, [], [])
    world = locate(members, MPI, own.config, keep=made.add)
    everyone = told_by_all(members, (own.groups, own.settled))
    settled = next(each for _, each in everyone if each is not None)
    site = make_site(own.config, world.nodes, deaths_in(members), made)
    if own.heap is None:
        recorder.count_worlds_from(settled.worlds)
    else:
        own.heap.revive()
        site = site._replace(heap=own.heap)
    transports: list[Any] = []
    try:
        transports.append(make(members, range(members.size), settled.timeout_s, site))
        transports[0].costs, transports[0].job = settled.costs, settled.job
        groups = []
        for each in plan_groups([table for table, _ in everyone], roles):
            if members.rank in each.ranks:
                part = made.add(_of(members, each.ranks))
                transports.append(make(part, each.ranks, each.timeout_s, site))
                groups.append((each, transports[-1]))
    except BaseException:
        for transport in transports:
            transport.abandon()
        raise
    return _Built(roles, world, transports, groups)


def _members(comm: MPI.Intracomm, made: Communicators, roles: Roles) -> tuple[MPI.Intracomm, bool]:
    """Return the communicator of the new world, in its order; and whether this is none of it."""
    if roles.ranks == tuple(range(comm.size)):
        return comm, False
    own = roles.ranks[comm.rank]
    is_spare = own == SPARE
    return made.add(cast(MPI.Intracomm, comm.Split(int(is_spare), max(own, 0)))), is_spare


def _of(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    everybody = comm.Get_group()
    some = everybody.Incl(ranks)
    try:
        return comm.Create_group(some, hash(tuple(ranks)) % 32000)
    finally:
        some.Free()
        everybody.Free()
