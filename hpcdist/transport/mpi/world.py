"""Start a world whose ranks are those of an MPI communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdist.runtime import mpi
from hpcdist.runtime.failure import end_job_on_failure
from hpcdist.runtime.process import snapshot
from hpcdist.runtime.survival import can_recover
from hpcdist.transport import recorder
from hpcdist.transport.base import StartedWorld, WorldRequest

if TYPE_CHECKING:
    from hpcdist.transport.mpi.transport import MpiTransport


def start_world(request: WorldRequest) -> StartedWorld:
    """Start MPI and describe the world of the communicator; see `runtime.mpi.start_world`."""
    world = mpi.start_world(request.config, request.comm)

    def connect() -> MpiTransport:
        # once MPI has started
        from hpcdist.transport.mpi.communicators import Communicators
        from hpcdist.transport.mpi.crew import Crew
        from hpcdist.transport.mpi.site import make_site
        from hpcdist.transport.mpi.survival import deaths_in
        from hpcdist.transport.mpi.transport import MpiTransport

        end_job_on_failure(world.place.rank)
        site = make_site(request.config, world.nodes, deaths_in(world.comm), Communicators())
        crew = Crew(world.comm) if can_recover(snapshot()) else None  # first, see [Note: lowest]
        transport = MpiTransport(world.comm, range(world.place.size), request.timeout_s, site)
        transport.crew = crew
        told = site.costs, recorder.job_name()
        transport.costs, transport.job = transport.context.comm.bcast(told)  # of all the same
        mpi.before_finalize(request.before_end)
        return transport

    return StartedWorld(world.place, world.hosts, world.local_ranks, connect)
