"""What to do when a launcher and an MPI library do not know each other: a part of a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.errors import UsageError
from hpcdist.runtime.slurm import in_slurm_step

# What each kind of start should have been, by the MPI library: a part of its version text, the
# `--mpi=` of srun, its name.
_LIBRARIES = (
    ("Open MPI", "pmix", "Open MPI"),
    ("Intel", "pmi2", "Intel MPI"),
    ("MPICH", "pmi2", "MPICH"),
    ("MVAPICH", "pmi2", "MVAPICH"),
)


def remedy(environ: Mapping[str, str], name: str, mpi_library: str) -> str:
    """Return what to do where a launcher started several ranks and MPI sees one.

    Args:
        environ: the environment of the process.
        name: the variable by which the launcher told the number of ranks.
        mpi_library: the text of `MPI.Get_library_version()`.

    Example:
        >>> remedy({}, "PMI_SIZE", "Open MPI v5")[:46]
        'it was started by a hydra mpiexec (MPICH, Inte'

    """
    kind, library = next(
        ((kind, called) for part, kind, called in _LIBRARIES if part in mpi_library),
        ("pmix", "the loaded MPI"),
    )
    own = f"start the job by the mpiexec that belongs to {library}, or by `hpcdist run`"
    if name == "OMPI_COMM_WORLD_SIZE":
        if kind == "pmix":
            return f"it was started by the mpiexec of another Open MPI; {own}"
        return f"it was started by Open MPI's mpiexec, while {library} is loaded; {own}"
    by_hydra = name == "PMI_SIZE" and "MPI_LOCALNRANKS" in environ
    by_slurm = name in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") and not by_hydra
    if in_slurm_step(environ) and by_slurm:
        asked = environ.get("SLURM_MPI_TYPE")
        did = f"srun ran with --mpi={asked}" if asked else "srun ran without --mpi"
        if asked == kind:
            other = "`srun --mpi=list` shows what this Slurm can do; or use `hpcdist run`"
            return f"{did}, which should serve {library} but did not; {other}"
        return (
            f"{did}, and {library} needs `srun --mpi={kind}` (or SLURM_MPI_TYPE={kind} in the"
            " environment)"
        )
    if name == "SLURM_NTASKS":
        return (
            "inside an allocation a program is one process until srun starts it on every task;"
            f" put `srun --mpi={kind}` in front of it (or use `hpcdist run`); `srun -n1` or"
            " `mpiexec -n 1` runs one"
        )
    if name == "PMI_SIZE":
        return f"it was started by a hydra mpiexec (MPICH, Intel MPI) of another MPI; {own}"
    if name == "FLUX_JOB_SIZE":
        return f"flux started it without a PMI that {library} knows; use `flux run -o pmi=pmix`"
    by = "torchrun" if name == "WORLD_SIZE" else "paddle.distributed.launch"
    return f"{by} starts processes without MPI; use `mpiexec -n {environ[name]}` or `hpcdist run`"


def not_together(what: str, remedy: str) -> UsageError:
    """Return the error of a launcher and an MPI library that do not know each other.

    Args:
        what: what was seen.
        remedy: what to do, which `hpcdist doctor` tells on a line of its own.

    Example:
        >>> str(not_together("MPI sees one rank of 4", "use `hpcdist run`; or mpiexec"))
        'MPI sees one rank of 4: use `hpcdist run`; or mpiexec'

    """
    error = UsageError(f"{what}: {remedy}")
    error.remedy = remedy
    return error
