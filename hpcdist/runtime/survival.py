"""Whether this job goes on when one of its processes dies."""

from __future__ import annotations

import os
from collections.abc import Mapping

_SWITCHED_ON = {"1", "true", "yes", "y", "on", "enabled"}


def can_recover(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether MPI goes on after the death of a process: Open MPI was told to, by mpirun.

    Args:
        environ: the environment as it was when a process started; else that of this one.

    Example:
        >>> can_recover({"OMPI_MCA_mpi_ft_enable": "1"}), can_recover({})
        (True, False)

    """
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in _SWITCHED_ON


def fewest_ranks(environ: Mapping[str, str]) -> int:
    """Return with how many ranks at least the job goes on.

    Args:
        environ: the environment as it was when the process started.

    Example:
        >>> fewest_ranks({"HPCDIST_MIN_RANKS": "3"}), fewest_ranks({})
        (3, 1)

    """
    told = environ.get("HPCDIST_MIN_RANKS", "")
    return int(told) if told.isdigit() else 1
