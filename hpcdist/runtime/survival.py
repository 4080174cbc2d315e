"""Whether this job goes on when one of its processes dies, and with how many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcdist.config import Config

_SWITCHED_ON = {"1", "true", "yes", "y", "on", "enabled"}


class Reserve(NamedTuple):
    """The last `spares` processes wait for a place; below `least` ranks the job ends."""

    spares: int = 0
    least: int = 1


def reserve_of(config: Config) -> Reserve:
    """Return what the launcher has set aside."""
    return Reserve(config.spares, config.min_ranks)


def can_recover(environ: Mapping[str, str]) -> bool:
    """Return whether MPI goes on after the death of a process: Open MPI was told to, by mpirun.

    Args:
        environ: the environment as it was when the process started.

    Example:
        >>> can_recover({"OMPI_MCA_mpi_ft_enable": "1"}), can_recover({})
        (True, False)

    """
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in _SWITCHED_ON
