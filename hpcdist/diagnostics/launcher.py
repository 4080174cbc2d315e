"""`Starter`: what would start several ranks from here, and whether it fits the MPI library.

Asked only where the doctor runs alone: inside a job it is too late to choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hpcdist.diagnostics.problem import Check, Problem
from hpcdist.launch.command import Family, srun_mpi
from hpcdist.launch.launchers import find_site, output_of
from hpcdist.named_tuple import NamedTuple

_VENDORS = {
    "Open MPI": Family.OPENMPI,
    "MPICH": Family.MPICH,
    "MVAPICH": Family.MPICH,
    "MVAPICH2": Family.MPICH,
    "Intel MPI": Family.IMPI,
}
_LIMIT_S = 5


class Starter(NamedTuple):
    """What this machine has to start ranks with.

    Attributes:
        mpiexec: its path, None where there is none.
        family: whose it is, None if that cannot be told.
        srun: its path.
        kinds: what ``srun --mpi=list`` offers; none if it does not answer.

    """

    mpiexec: str | None = None
    family: Family | None = None
    srun: str | None = None
    kinds: tuple[str, ...] = ()


def find_starter(environ: Mapping[str, str]) -> Starter:
    """Return what would start ranks from here; asks ``mpiexec --version`` and srun."""
    site = find_site(environ)
    kinds = (
        ()
        if site.srun is None
        else read_kinds(output_of([site.srun, "--mpi=list"], environ, _LIMIT_S))
    )
    return Starter(site.mpiexec, site.family, site.srun, kinds)


def read_kinds(text: str) -> tuple[str, ...]:
    r"""Return the kinds of PMI that the text of ``srun --mpi=list`` names.

    Example:
        >>> read_kinds("MPI plugin types are...\n\tpmix\n\tnone\n")
        ('pmix', 'none')

    """
    return tuple(re.findall(r"^(?:srun: )?\s+(\w+)$", text, re.MULTILINE))


# ---- pure


def describe_starter(starter: Starter) -> str:
    """Return what would start ranks from here, as text."""
    ways = []
    if starter.srun:
        kind = srun_mpi(starter.family)
        ways.append(f"srun{f' --mpi={kind}' if kind else ''}")
    if starter.mpiexec:
        whose = f" ({starter.family.value})" if starter.family else ""
        ways.append(f"{starter.mpiexec}{whose}")
    return " or ".join(ways) or "nothing here starts several ranks"


def starter_problems(starter: Starter, vendor: str) -> Iterator[Problem]:
    """Give what would go wrong with several ranks.

    Args:
        starter: what there is to start them with.
        vendor: of the MPI library that they would load.

    """
    own = _VENDORS.get(vendor)
    if starter.mpiexec and starter.family and own and starter.family is not own:
        yield Problem(
            Check.LAUNCH,
            True,
            f"{starter.mpiexec} is of {starter.family.value}, but the ranks would load {vendor}: "
            "each would be alone",
            f"put the mpiexec of {vendor} first on PATH, or choose the library of the other by "
            "MPI4PY_MPIABI and LD_LIBRARY_PATH",
        )
    kind = srun_mpi(own)
    if starter.kinds and kind and not any(each.startswith(kind) for each in starter.kinds):
        yield Problem(
            Check.LAUNCH,
            False,
            f"{vendor} needs `srun --mpi={kind}`, and this Slurm offers {', '.join(starter.kinds)}",
            f"have Slurm built with {kind}; until then `hpcdist run --launcher mpiexec`",
        )
