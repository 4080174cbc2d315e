"""Start a world whose ranks are those of an MPI communicator, without the spares among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from hpcdist.errors import RankFailure, UsageError
from hpcdist.runtime import mpi
from hpcdist.runtime.failure import end_job_on_failure
from hpcdist.runtime.place import SPARES, count_spares
from hpcdist.runtime.process import snapshot
from hpcdist.runtime.survival import can_recover, fewest_ranks
from hpcdist.transport.base import Recovered, StartedWorld, WorldRequest
from hpcdist.transport.flight import recorder

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdist.transport.mpi.crew import Crew
    from hpcdist.transport.mpi.transport import MpiTransport

_crews: list[Crew] = []
"""That of the job, once all have met: spares wait in it, and the dead are gone, whatever comes."""


def start_world(request: WorldRequest) -> StartedWorld:
    """Start MPI and describe the world of the communicator. Collective over it.

    Of a process that dies meanwhile all others hear; they cannot go on before there is a world.

    Raises:
        TransportError: there is no MPI library that mpi4py can load.
        UsageError: the launcher started several ranks but MPI sees only this one, or settings that
            have to be the same on all ranks are not.
        RankFailure: a process has died.

    """
    comm = mpi.start(request.config, request.comm, ahead=_import_transport)
    with _starting():
        return _start(comm, request)


def _import_transport() -> None:
    import hpcdist.transport.mpi.transport  # noqa: F401 # which needs mpi4py's MPI


@contextmanager
def _starting() -> Iterator[None]:
    """Say by a `RankFailure` that a process has died meanwhile."""
    from hpcdist.transport.mpi.survival import is_of_death

    try:
        yield
    except mpi.load_mpi().Exception as error:
        if not is_of_death(error):
            raise
        raise RankFailure(
            "a process died while the others started; let the job end: --restarts of hpcdist run "
            "starts it again"
        ) from error


def _start(comm: MPI.Intracomm, request: WorldRequest) -> StartedWorld:
    spares = _spares_in(comm)
    if _crews and (spares or request.comm is None):  # a second world, of those that are left
        ranks = _crews[0].ranks
        assert ranks is not None
        return _ranks_of(ranks, request, _crews[0])
    if spares:
        return _meet_spares(comm, spares, request)
    return _ranks_of(comm, request)


def _spares_in(comm: MPI.Intracomm) -> list[int]:
    """Return which ranks of a communicator wait for a place: the last processes of the job. Local.

    Where there are only such, they are ranks of a world of their own.
    """
    count = count_spares(snapshot())
    if not count:
        return []
    if not can_recover():
        raise UsageError(
            f"{SPARES}={count} asks for spares, but MPI ends this job when a rank dies: start it "
            f"with hpcdist run --survive --spares {count}, or unset the variable"
        )
    ranks = mpi.load_mpi().COMM_WORLD.size - count
    spares = [rank for rank, number in enumerate(mpi.numbers_in_job(comm)) if number >= ranks]
    return spares if len(spares) < comm.size else []


def _meet_spares(comm: MPI.Intracomm, spares: list[int], request: WorldRequest) -> StartedWorld:
    """Start the world of all ranks but `spares`. Collective over all of them."""
    from hpcdist.transport.mpi.crew import Crew

    all_of_us = mpi.locate(comm, mpi.load_mpi(), request.config)
    crew = Crew(comm, all_of_us.nodes, spares, fewest_ranks(snapshot()))
    _crews.append(crew)
    is_spare = comm.rank in spares
    ranks = cast("MPI.Intracomm", comm.Split(int(is_spare), comm.rank))
    if not is_spare:
        return _ranks_of(ranks, request, crew)

    def join() -> Recovered | None:
        from hpcdist.transport.mpi.recovering import join
        from hpcdist.transport.mpi.transport import MpiTransport

        found = join(crew, MpiTransport, request.config)
        if found is not None:
            end_job_on_failure(found.transport.rank)
            mpi.before_finalize(request.before_end)
        return found

    return StartedWorld(
        all_of_us.place, all_of_us.hosts, all_of_us.local_ranks, _has_no_place, join
    )


def _has_no_place() -> Any:
    raise UsageError("this process is a spare, and has to wait for a place in the world")


def _ranks_of(comm: MPI.Intracomm, request: WorldRequest, crew: Crew | None = None) -> StartedWorld:
    """Start the world of the ranks of a communicator. Collective over it.

    Args:
        comm: the ranks.
        request: what is asked for.
        crew: the processes of the job, spares among them; None if there are no others.

    """
    world = mpi.locate(comm, mpi.load_mpi(), request.config)

    def connect() -> MpiTransport:
        # once MPI has started
        from hpcdist.transport.mpi.communicators import Communicators
        from hpcdist.transport.mpi.site import make_site
        from hpcdist.transport.mpi.survival import deaths_in
        from hpcdist.transport.mpi.transport import MpiTransport

        end_job_on_failure(world.place.rank)
        with _starting():
            site = make_site(request.config, world.nodes, deaths_in(world.comm), Communicators())
            made = _crew_of(comm, world.nodes, crew) if can_recover() else None
            transport = MpiTransport(world.comm, range(world.place.size), request.timeout_s, site)
            transport.crew = made
            told = site.costs, recorder.job_name()
            transport.costs, transport.job = transport.context.comm.bcast(told)  # of all the same
        mpi.before_finalize(request.before_end)
        return transport

    return StartedWorld(world.place, world.hosts, world.local_ranks, connect)


def _crew_of(comm: MPI.Intracomm, nodes: Sequence[int], crew: Crew | None) -> Crew:
    """Return the processes of the job, before anything else is made: [Note: lowest] of `crew`."""
    from hpcdist.transport.mpi.crew import Crew

    is_all = comm.size == mpi.load_mpi().COMM_WORLD.size
    least = fewest_ranks(snapshot()) if is_all else 1
    crew = crew or Crew(comm, nodes, least=least)
    crew.ranks = comm
    if is_all and not _crews:
        _crews.append(crew)
    return crew
