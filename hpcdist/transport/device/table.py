"""The table of backends for device memory, and how the ranks of a group choose one of them.

A backend is a class and a row of `BACKENDS`. What is chosen from is what every rank of the group
tells of itself; how it is chosen is `choose`, which is pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcdist.arrays.device import DeviceRuntime
from hpcdist.config import Config
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime import gpu
from hpcdist.runtime.mpi import told_by_all
from hpcdist.transport.device import cuda_mpi
from hpcdist.transport.device.backend import DeviceBackend
from hpcdist.transport.device.batches import MessageBatches
from hpcdist.transport.device.choose import Ability, Candidate, Choice, Standing, choose_backend
from hpcdist.transport.device.launches import Launches
from hpcdist.transport.device.nccl import backend as nccl
from hpcdist.transport.device.nccl.batch import NcclBatches

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext


class BackendRow(NamedTuple):
    """A backend as groups know it.

    `standing` tells what this rank can do with it, from the settings, the device and its UUID
    (empty for what is no CUDA device); local. `open` makes it for a group; collective, once all
    ranks have chosen it. `batches` makes what sends batches of messages with it, where it can.
    """

    candidate: Candidate
    standing: Callable[[Config, DeviceRuntime, str], Standing]
    open: Callable[[MpiContext, DeviceRuntime], DeviceBackend]
    batches: Callable[[MpiContext, Launches, Any], MessageBatches] | None = None


BACKENDS = {
    row.candidate.name: row
    for row in (
        BackendRow(nccl.CANDIDATE, nccl.standing, nccl.Nccl, NcclBatches),
        BackendRow(
            cuda_mpi.CANDIDATE, cuda_mpi.standing, lambda context, _: cuda_mpi.CudaMpi(context)
        ),
    )
}
"""By name, in the order of preference. What has no row here is staged through host memory."""


def may_choose(config: Config, name: str) -> bool:
    """Return whether the settings let a group choose the backend of this name."""
    return config.device_backend in ("auto", name)


def choose(context: MpiContext, runtime: DeviceRuntime) -> Choice:
    """Choose the backend of a group from what all its ranks can do. Collective."""
    config = context.site.config
    return choose_backend(
        told_by_all(context.comm, _ability(context, runtime)),
        [row.candidate for row in BACKENDS.values()],
        wanted=config.device_backend,
        may_share=config.share_gpu,
    )


def _ability(context: MpiContext, runtime: DeviceRuntime) -> Ability:
    """Ask what this rank can do; whatever goes wrong is a reason and no exception."""
    config, rank = context.site.config, context.ranks[context.rank]
    node, uuid, broken = context.site.nodes[rank], "", ""
    try:
        uuid = gpu.uuid_of(runtime.name)
    except (RuntimeError, OSError) as error:
        broken = f"{runtime.name} cannot be asked for its UUID ({error})"
    standings = {}
    for name, row in BACKENDS.items():
        reason = (
            broken
            if may_choose(config, name)
            else f"HPCDIST_DEVICE_BACKEND={config.device_backend}"
        )
        standings[name] = Standing(reason) if reason else row.standing(config, runtime, uuid)
    return Ability(rank, node, uuid or str(rank), standings)
