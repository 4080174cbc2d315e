"""What MPI says when a process has died, in words of hpcdist."""

from __future__ import annotations

from collections.abc import Iterable

from mpi4py import MPI

from hpcdist.errors import HpcdistError, TransportError
from hpcdist.runtime.survival import can_recover
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.presence.deaths import Deaths


def deaths_in(comm: MPI.Intracomm) -> Deaths:
    """Return the deaths of a world whose ranks are those of `comm`; local."""
    if not can_recover():
        return Deaths()
    return Deaths(lambda: failed_in(comm))


def failed_in(comm: MPI.Intracomm) -> Iterable[int]:
    """Return the ranks of `comm` that MPI holds for dead; local, at once."""
    MPI.COMM_SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # MPI hears of deaths where it makes progress
    failed = comm.Get_failed()
    try:
        if not failed.size:
            return ()
        everybody = comm.Get_group()
        ranks = MPI.Group.Translate_ranks(failed, range(failed.size), everybody)
        everybody.Free()
        return ranks
    finally:
        if failed != MPI.GROUP_EMPTY:
            failed.Free()


def is_of_death(error: MPI.Exception) -> bool:
    """Return whether MPI says by `error` that a process has died, or that others recover."""
    return can_recover() and error.Get_error_class() in _OF_DEATH


def translate(error: MPI.Exception, what: str, deaths: Deaths) -> HpcdistError:
    """Return what is raised in place of `error` of MPI, which has ended the operation `what`."""
    # Open MPI says MPI_ERR_OTHER in some collectives, and the name of the dead comes later.
    found = deaths.found() if can_recover() else deaths.known()
    if found or is_of_death(error):
        return deaths.failure(what)
    remedy = _WITHOUT_CMA if "CMA" in str(error) else ""
    return TransportError(
        f"MPI failed in {what}: {error}; called at {call_site()}. The group may be in an unknown "
        f"state: end the job{remedy}"
    )


_WITHOUT_CMA = (
    ". MPICH could not read the memory of another rank, which may have become unreadable "
    "(PR_SET_DUMPABLE) since the start: set MPIR_CVAR_CH4_CMA_ENABLE=0, and it does not try"
)


_OF_DEATH = {
    MPI.ERR_PROC_FAILED,
    MPI.ERR_PROC_FAILED_PENDING,
    MPI.ERR_REVOKED,
    MPI.ERR_IN_STATUS,  # of several requests: each has one of those, which no exception carries
}
