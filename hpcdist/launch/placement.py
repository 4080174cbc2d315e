"""How Open MPI's `mpiexec` finds a place for each rank: it counts cores, a host as one; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcdist.errors import UsageError
from hpcdist.runtime.slurm import parse_counts


def check_slots(size: int, environ: Mapping[str, str]) -> None:
    """Refuse what Open MPI's mpiexec would refuse, in fewer words.

    Args:
        size: how many processes it shall start.
        environ: the environment, that of an allocation of Slurm.

    Raises:
        UsageError: the allocation has fewer slots.

    """
    counts = environ.get("SLURM_TASKS_PER_NODE", "")
    policy = environ.get("PRTE_MCA_rmaps_default_mapping_policy", "").lower()
    if not counts or "oversubscribe" in policy.replace("nooversubscribe", ""):
        return
    slots = sum(parse_counts(counts))
    if size > slots:
        raise UsageError(
            f"{size} ranks were asked for, and this allocation has {slots} slots"
            f" (SLURM_TASKS_PER_NODE={counts}); Open MPI's mpiexec starts no more: get them"
            f" by `salloc -n {size}`, or share them by `hpcdist run --launcher srun -n {size}`"
        )


def openmpi_flags(size: int, cores: int, cpus: int, env: dict[str, str]) -> list[str]:
    """Return the flags that give every rank a place here, and set `env` to share cores politely.

    Open MPI counts cores, not hardware threads, as places, and refuses to start more ranks.

    Args:
        size: how many processes there are.
        cores: how many cores this machine has for them.
        cpus: how many hardware threads.
        env: the variables of the job, changed here.

    Example:
        >>> openmpi_flags(4, 2, 4, {})
        ['--oversubscribe', '--bind-to', 'none']

    """
    flags = ["--oversubscribe"] if size > cores else []
    flags += ["--bind-to", "none"] if size > cores else []
    if size > cpus:
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return flags


def openmpi_hosts(hosts: Sequence[str], per_host: int | None, size: int) -> list[str]:
    """Return the hosts with the number of their places; Open MPI takes a host for one.

    Args:
        hosts: their names; one with a number keeps it.
        per_host: how many processes run on each, None for an even share.
        size: how many processes there are.

    Example:
        >>> openmpi_hosts(("a", "b:8"), None, 4)
        ['a:2', 'b:8']

    """
    places = per_host or -(-size // len(hosts))
    return [host if ":" in host else f"{host}:{places}" for host in hosts]
