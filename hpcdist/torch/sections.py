"""What the sections of a `Strategy` become for a torch module: groups, engines, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.data.shard_loader import ShardDataloader
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import get_mesh
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.sharding.engine import LEVELS
from hpcdist.parallel.sharding.group_sharded import group_sharded_parallel
from hpcdist.parallel.stages import (
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    shard_optimizer,
)
from hpcdist.parallel.strategy import Section, Strategy
from hpcdist.text import an
from hpcdist.torch.layers import device_of
from hpcdist.torch.on_mesh import Joining
from hpcdist.torch.scaler import AgreeingScaler

_MiB = 1 << 20
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_STAGES = {1: ShardingStage1, 2: ShardingStage2, 3: ShardingStage3}


def distributed(
    layer: torch.nn.Module, loader: Any, optimizer: Any, strategy: Strategy
) -> tuple[Any, Any]:
    """Return model and optimizer as they train on all ranks. Collective."""
    sharding = strategy.sharding
    if optimizer is None or is_fsdp(layer) or isinstance(layer, DataParallel):
        if sharding.enable and optimizer is not None:
            raise UsageError(
                f"sharding.enable=True, but the layer is {an(type(layer).__name__)}, which is "
                "distributed already; give to_static the layer as it was, or leave it to that"
            )
        return layer, optimizer
    if is_on_mesh(layer):
        return layer, _sharded_on_mesh(loader, optimizer, sharding)
    group = data_group(loader)
    if sharding.enable:
        shard, replicate = _shard_groups(group, sharding.degree)
        model, optimizer, _ = group_sharded_parallel(
            layer,
            optimizer,
            LEVELS[sharding.stage - 1],
            group=shard,
            dp_group=replicate,
            buffer_max_size=sharding.comm_buffer_size_MB * _MiB,
        )
        return model, optimizer
    if group.nranks == 1:
        return layer, optimizer
    options = strategy.dp_optimization
    size = {"comm_buffer_size": options.fuse_grad_size_in_MB} if options.enable else {}
    return DataParallel(layer, group=group, **size), optimizer


def _sharded_on_mesh(loader: Any, optimizer: Any, sharding: Section) -> Any:
    if not sharding.enable:
        return optimizer
    if not isinstance(loader, ShardDataloader) or loader.axis is None:
        raise UsageError(
            "sharding.enable=True of a layer on a mesh cuts over the axis that cuts batches, so "
            "to_static needs a ShardDataloader with shard_dims; or call shard_optimizer yourself"
        )
    return shard_optimizer(optimizer, _STAGES[sharding.stage](loader.axis, loader.mesh))


def data_group(loader: Any) -> Group:
    """Return the ranks that have parts of the same batches."""
    if isinstance(loader, ShardDataloader) and loader.axis is not None:
        return loader.mesh.get_group(loader.mesh.names[loader.axis])
    return training_group(loader)


def _shard_groups(group: Group, degree: int) -> tuple[Group, Group | None]:
    """Return the ranks that share one copy of the state, and those with the same part of it."""
    if degree >= group.nranks:
        return group, None
    if degree < 1 or group.nranks % degree:
        raise UsageError(
            f"sharding.degree={degree} does not go into the {group.nranks} ranks that train "
            "together; use a divisor"
        )
    return group.split(group.rank // degree), group.split(group.rank % degree)


def recompute(layer: torch.nn.Module, section: Section) -> None:
    """Make parts of a module recompute their activations in the backward pass, in place.

    The parts are those named, or the members of its lists of layers, or its children.
    """
    if not section.enable:
        return
    for index, part in enumerate(_segments(layer, section.checkpoints)):
        if index not in section.no_recompute_segments:
            part.forward = partial(_recomputed, layer, part.forward)


def _recomputed(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    mesh = mesh_of((args, kw))
    again = nullcontext() if mesh is None else Joining(mesh)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kw
    )


def _segments(layer: torch.nn.Module, names: Sequence[Any]) -> list[torch.nn.Module]:
    modules = dict(layer.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise UsageError(
            f"recompute.checkpoints has {unknown[0]!r}, which is the name of no layer; there are "
            f"{', '.join([*modules][1:9])}"
        )
    if names:
        return [modules[name] for name in names]
    lists = [
        each
        for each in layer.modules()
        if isinstance(each, (torch.nn.ModuleList, torch.nn.Sequential))
    ]
    return list((lists[0] if lists else layer).children())


def autocasting(layer: torch.nn.Module, amp: Section) -> Callable[[], Any]:
    """Return what makes the context to compute in."""
    if not amp.enable or amp.level == "o0":
        return nullcontext
    return partial(torch.autocast, device_of(layer), dtype=_DTYPES[amp.dtype])


def training_group(loader: Any) -> Group:
    """Return the ranks that train together."""
    mesh = loader.mesh if isinstance(loader, ShardDataloader) else get_mesh()
    return resolve_group(None) if mesh is None else mesh.group


def scaler_for(model: torch.nn.Module, amp: Section, group: Group) -> AgreeingScaler | None:
    """Return the scaler of the loss, where it needs one; the ranks of the group step together."""
    if not amp.enable or amp.dtype != "float16" or amp.level == "o0":
        return None
    own = torch.amp.GradScaler(
        device_of(model),
        init_scale=float(amp.init_loss_scaling),
        growth_factor=float(amp.incr_ratio),
        backoff_factor=float(amp.decr_ratio),
        growth_interval=amp.incr_every_n_steps,
    )
    return AgreeingScaler(own, group)


# ---- what a module is


def is_fsdp(model: Any) -> bool:
    """Return whether a module is one of `fully_shard`."""
    return isinstance(model, FSDPModule)


def is_on_mesh(layer: torch.nn.Module) -> bool:
    """Return whether a module takes DTensors: after `shard_layer` and `parallelize`."""
    return not is_fsdp(layer) and any(isinstance(each, DTensor) for each in layer.parameters())


def mesh_of(outputs: Sequence[Any]) -> Any:
    """Return the mesh of outputs that are DTensors; None if none is."""
    meshes = [each.device_mesh for each in tree_leaves(outputs) if isinstance(each, DTensor)]
    return meshes[0] if meshes else None
