"""Which way device memory takes in a group: one pure decision, from what every rank can do.

NCCL and CUDA-aware MPI are never both in use in one process, because together on one device they
may dead-lock (NCCL user guide, "Using NCCL with MPI"): a process that has NCCL never hands device
pointers to MPI, unless it was told to leave NCCL alone. Staging through host memory is always
there, and takes what the chosen way cannot do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from hpcdist.errors import UsageError
from hpcdist.transport.device.nccl.binding import SHARES_GPUS


class BackendName(Enum):
    """How device memory travels; the value is the name that settings use."""

    NCCL = "nccl"
    MPI = "mpi"
    STAGED = "staged"


class Ability(NamedTuple):
    """What one rank can do with the device its array is on.

    `nccl` and `mpi` are empty where that way is open, else why it is not. `node` tells ranks of
    one node apart from those of another. `nccl_version` is NCCL's number, as 22809 for 2.28.9.
    """

    rank: int
    node: int
    uuid: str
    nccl: str
    mpi: str
    nccl_version: int = 0


class Choice(NamedTuple):
    """A way and the reason for it."""

    way: BackendName
    why: str


def choose_backend(abilities: Sequence[Ability], *, wanted: str, may_share: bool) -> Choice:
    """Choose for a group; equal on all ranks, for all of them know all `abilities`.

    Args:
        abilities: one per rank of the group.
        wanted: ``"auto"`` or the value of a `BackendName`.
        may_share: whether several ranks may use one GPU.

    Raises:
        UsageError: ranks share a GPU without leave, or the wanted way is not open on all ranks.

    """
    shared = shared_gpus(abilities)
    if shared and not may_share:
        raise UsageError(_complaint(shared))
    not_nccl = _first("nccl", abilities) or _not_shared(abilities, shared, wanted)
    if wanted == "staged":
        return Choice(BackendName.STAGED, "HPCDIST_DEVICE_WAY=staged")
    if wanted == "nccl" or (wanted == "auto" and not not_nccl):
        if not_nccl:
            raise UsageError(f"HPCDIST_DEVICE_WAY=nccl, but {not_nccl}")
        return Choice(BackendName.NCCL, "NCCL is there on all ranks")
    not_mpi = _first("mpi", abilities)
    if wanted == "mpi":
        if not_mpi:
            raise UsageError(f"HPCDIST_DEVICE_WAY=mpi, but {not_mpi}")
        return Choice(BackendName.MPI, "HPCDIST_DEVICE_WAY=mpi")
    if not not_mpi and all(each.nccl for each in abilities):
        return Choice(BackendName.MPI, f"this MPI is CUDA-aware, and {not_nccl}")
    return Choice(BackendName.STAGED, not_nccl)


def shared_gpus(abilities: Sequence[Ability]) -> list[str]:
    """Name the ranks, in words, that use one GPU together."""
    users: dict[tuple[int, str], list[int]] = defaultdict(list)
    for each in abilities:
        users[each.node, each.uuid].append(each.rank)
    return [f"ranks {', '.join(map(str, ranks))}" for ranks in users.values() if len(ranks) > 1]


def _first(way: str, abilities: Sequence[Ability]) -> str:
    """Say why a way is closed, on the first rank where it is; empty where it is open."""
    for each in abilities:
        reason = getattr(each, way)
        if reason:
            return f"on rank {each.rank} {reason}"
    return ""


def _not_shared(abilities: Sequence[Ability], shared: Sequence[str], wanted: str) -> str:
    """Say why NCCL does not serve the GPUs that ranks share; empty if it does or none is shared.

    It is an experiment of NCCL's (user guide, NCCL_MULTI_RANK_GPU_ENABLE), so not made unasked.
    """
    if not shared:
        return ""
    oldest = min(abilities, key=lambda each: each.nccl_version)
    if wanted != "nccl":
        return f"{shared[0]} share a GPU"
    if oldest.nccl_version >= SHARES_GPUS:
        return ""
    return (
        f"{shared[0]} share a GPU, for which NCCL {SHARES_GPUS} (2.30) or newer is needed, and "
        f"rank {oldest.rank} has {oldest.nccl_version}"
    )


def _complaint(shared: Sequence[str]) -> str:
    return (
        f"{'; '.join(shared)} use the same GPU; give each rank its own (srun "
        "--gpus-per-node=N --ntasks-per-node=N --gpu-bind=none, and "
        "init_parallel_env(device='gpu')), or allow it with HPCDIST_SHARE_GPU=1"
    )
