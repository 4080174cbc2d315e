"""What a new job must not inherit from the job around it: `inherited(environ, here)`."""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.launch.survival import TOLD
from hpcdist.runtime.torchrun import NOTE, set_by_hpcdist

# What launchers set for their ranks: names, or beginnings of names ending in "*". With these left
# in place MPI would join the job around us, or the new launcher take itself for one of its ranks.
_INHERITED = (
    "OMPI_COMM_WORLD_*",
    "OMPI_WORLD_*",
    "OMPI_APP_CTX_NUM_PROCS",
    "OMPI_ARGV",
    "OMPI_COMMAND",
    "OMPI_FILE_LOCATION",
    "OMPI_FIRST_RANKS",
    "OMPI_NUM_APP_CTX",
    "OMPI_TOOL_NAME",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_MCA_ess",
    "OMPI_MCA_ess_*",
    "OMPI_MCA_orte_*",
    "OMPI_MCA_pmix",
    "OMPI_MCA_cpu_type",
    "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs",
    "OMPI_MCA_shmem_RUNTIME_QUERY_hint",
    "PRTE_LAUNCHED",
    "PRTE_SHARED_FS",
    "PMIX_*",
    "PMI_*",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
    "HYDI_CONTROL_FD",
    "PALS_*",
    *TOLD,
)
_KEPT = ("PMIX_MCA_",)
_SCHEDULERS = ("SLURM_*", "SLURMD_*", "PBS_*", "LSB_*", "COBALT_*", "FLUX_*")


def inherited(environ: Mapping[str, str], here: bool) -> tuple[str, ...]:
    """Return the names in `environ` that belong to the job around us and not to a new one.

    Args:
        environ: the environment the new job would inherit.
        here: the new job stays on this machine, so that allocations do not concern it either.

    Example:
        >>> inherited({"PMI_RANK": "0", "PATH": "/bin", "PMIX_MCA_gds": "hash"}, False)
        ('PMI_RANK',)

    """
    patterns = _INHERITED + (_SCHEDULERS if here else ())
    exact = {NOTE, *set_by_hpcdist(environ)} | {
        pattern for pattern in patterns if not pattern.endswith("*")
    }
    starts = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return tuple(
        sorted(
            name
            for name in environ
            if name in exact or (name.startswith(starts) and not name.startswith(_KEPT))
        )
    )
