"""`recover`: a world of MPI goes on with the ranks that are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from mpi4py import MPI

from hpcdist.runtime.mpi import World, locate, told_by_all
from hpcdist.transport.base import Recovered
from hpcdist.transport.mpi.communicators import Communicators
from hpcdist.transport.mpi.crew import Crew
from hpcdist.transport.mpi.site import make_site
from hpcdist.transport.mpi.survival import deaths_in
from hpcdist.transport.roles import GroupTable, Kept, Roles, Told, plan_groups, plan_roles

CANNOT = (
    "recover() cannot go on here: MPI ends this job when a rank dies. Start it with hpcdist run "
    "--survive, or with Open MPI's mpirun --with-ft ulfm (MPICH and srun cannot)"
)


@final
class _Built(NamedTuple):
    """What an attempt has made: the new world, and the groups that go on here."""

    roles: Roles
    world: World
    transports: list[Any]
    groups: list[tuple[Kept, Any]]

    def abandon(self) -> None:
        for each in self.transports:
            each.abandon()


def recover(
    former: Any,
    crew: Crew,
    make: Callable[..., Any],
    told: Told,
    groups: GroupTable,
    timeout_s: float,
) -> Recovered:
    """Go on with the ranks that are left; collective over them. See `Transport.recover`.

    Args:
        former: the transport of the world until now, of MPI, abandoned.
        crew: the processes of the job.
        make: makes another one, of a communicator, world ranks, a time limit and a site.
        told: which rank this is.
        groups: this rank's other groups.
        timeout_s: how long to wait for the others.

    """
    heap = former.context.heap

    def build(comm: MPI.Intracomm, made: Communicators) -> _Built:
        roles = plan_roles([Told(*each) for each in told_by_all(comm, tuple(told))])
        config = former.context.site.config
        world = locate(comm, MPI, config, keep=made.add)
        heap.revive()
        site = make_site(config, world.nodes, deaths_in(comm), made)._replace(heap=heap)
        transports: list[Any] = []
        try:
            transports.append(make(comm, range(comm.size), former.timeout_s, site))
            kept = plan_groups(told_by_all(comm, groups), roles)
            own = []
            for each in (each for each in kept if comm.rank in each.ranks):
                part = made.add(_of(comm, each.ranks))
                transports.append(make(part, each.ranks, each.timeout_s, site))
                own.append((each, transports[-1]))
        except BaseException:
            for transport in transports:
                transport.abandon()
            raise
        return _Built(roles, world, transports, own)

    built = crew.regroup(build, timeout_s)
    transport = built.transports[0]
    transport.crew, transport.costs, transport.job = crew, former.costs, former.job
    return Recovered(transport, built.roles, built.world, built.groups)


def _of(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    everybody = comm.Get_group()
    some = everybody.Incl(ranks)
    try:
        return comm.Create_group(some, hash(tuple(ranks)) % 32000)
    finally:
        some.Free()
        everybody.Free()
