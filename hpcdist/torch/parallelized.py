"""`parallelize` and `fully_shard` for torch modules: which engine serves which axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard as torchs_fully_shard,
)

from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.parallel.layer_plans import LayerPlan
from hpcdist.parallel.layers import DataOptions
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.sharding.engine import LEVELS
from hpcdist.parallel.sharding.group_sharded import group_sharded_parallel
from hpcdist.torch.backend import process_group_of
from hpcdist.torch.context_parallel import apart, context_parallel
from hpcdist.torch.layers import device_of, make_equal
from hpcdist.torch.mesh import device_mesh_of, torch_placement
from hpcdist.torch.optimizers import follow_parameters
from hpcdist.torch.sharded import excluded_modules, units, use_shared_memory
from hpcdist.torch.tensor_parallel import AXIS, run_on_axis, tensor_parallel

_SEGMENT = 1 << 20


def parallelize_module(
    model: torch.nn.Module,
    optimizer: Any,
    mesh: ProcessMesh,
    plans: Mapping[str, Sequence[LayerPlan]],
    options: DataOptions,
) -> tuple[Any, Any]:
    """Make a module train on all ranks of `mesh`; see `parallelize`. Collective."""
    of_sequences, plans = apart(plans)
    if of_sequences:
        _check_alone(plans)
        context_parallel(model, mesh, of_sequences)
    if not plans:
        return _by_batch(model, optimizer, mesh, options)
    axes = [name for name in mesh.names if name != AXIS and mesh.get_dim_size(name) > 1]
    _check_axes(mesh, axes)
    with follow_parameters(optimizer, model):
        tensor_parallel(model, mesh, plans)
        if axes:
            _by_batch_beside(model, device_mesh_of(mesh, device_of(model))[tuple(axes)], options)
    run_on_axis(model, mesh)
    return model, optimizer


def _check_alone(plans: Mapping[str, Sequence[LayerPlan]]) -> None:
    if plans:
        raise UsageError(
            f"plans that cut layers ({', '.join(plans)}) and plans that cut sequences do not go "
            "together here: use the layers of fleet.meta_parallel, sep_attention, and "
            "fleet.distributed_model on a grid of mp and sep"
        )


def _check_axes(mesh: ProcessMesh, axes: Sequence[str]) -> None:
    if AXIS not in mesh.names:
        raise UsageError(f"mp_config needs an axis 'mp', but {mesh!r} has {', '.join(mesh.names)}")
    if len(axes) > 2:
        raise UsageError(
            f"beside 'mp' a mesh has at most two axes of several ranks, got {', '.join(axes)}"
        )


def _by_batch(
    model: torch.nn.Module, optimizer: Any, mesh: ProcessMesh, options: DataOptions
) -> tuple[Any, Any]:
    """Cut the batch over all ranks of the mesh."""
    level = options.sharding_level
    if level == 0 or (optimizer is None and level == 1):
        return DataParallel(model, group=mesh.group), optimizer
    if optimizer is None:
        make_equal(model, mesh.group)
        group = process_group_of(mesh.group)
        _shard(model, DeviceMesh.from_group(group, device_of(model)), options)
        return model, None
    model, optimizer, _ = group_sharded_parallel(
        model,
        optimizer,
        LEVELS[level - 1],
        group=mesh.group,
        offload=options.offload,
        exclude_layer=options.exclude_layer,
    )
    return model, optimizer


def _by_batch_beside(model: torch.nn.Module, axes: DeviceMesh, options: DataOptions) -> None:
    """Cut the batch over axes beside ``"mp"``, along which the parameters are cut already."""
    if options.sharding_level:
        _shard(model, axes, options)
        return
    if axes.ndim > 1:
        raise UsageError(
            "sharding_level 0 with 'mp' cuts the batch over one axis; use a level of 1 to 3, or a "
            f"mesh with one axis beside 'mp', not {', '.join(axes.mesh_dim_names or ())}"
        )
    try:  # its engine is that of `fully_shard`, which has buckets for parameters that are cut
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError as error:
        raise UsageError(
            f"torch {torch.__version__} cannot replicate what is cut along 'mp'; use a "
            "sharding_level of 1 to 3, or a newer torch"
        ) from error
    replicate(model, mesh=axes)


def _shard(model: torch.nn.Module, mesh: DeviceMesh, options: DataOptions) -> None:
    is_cpu = mesh.device_type == "cpu"
    policy = CPUOffloadPolicy() if options.offload and not is_cpu else OffloadPolicy()
    frees = options.sharding_level == 3
    kept = excluded_modules(model, options.exclude_layer or ())
    for each in kept:
        torchs_fully_shard(each, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    for each in (*units(model, _SEGMENT, kept), model):
        torchs_fully_shard(each, mesh=mesh, reshard_after_forward=frees, offload_policy=policy)
    use_shared_memory(*model.modules())


# ---- fully_shard


def fully_shard_module(
    module: torch.nn.Module,
    mesh: ProcessMesh | DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[Any], Any] | None,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: Iterable[torch.Tensor] | None,
) -> torch.nn.Module:
    """Shard a module; see `hpcdist.fully_shard`. Collective when the mesh is made."""
    device_mesh = _mesh_for(module, mesh)
    place = None
    if shard_placement_fn is not None:
        place = partial(_placement_of, shard_placement_fn)
    torchs_fully_shard(
        module,
        mesh=device_mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=place,
        mp_policy=MixedPrecisionPolicy() if mp_policy is None else mp_policy,
        offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
        ignored_params=None if ignored_params is None else set(ignored_params),
    )
    use_shared_memory(module)
    return module


def _mesh_for(module: torch.nn.Module, mesh: ProcessMesh | DeviceMesh | None) -> DeviceMesh:
    mesh = get_mesh() if mesh is None else mesh
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is None:
        return DeviceMesh.from_group(process_group_of(resolve_group(None)), device_of(module))
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"fully_shard needs a ProcessMesh or None for its mesh, got {mesh!r}")
    if mesh.ndim > 2:
        raise UsageError(
            f"fully_shard takes a mesh of one axis, which shards, or of two, of which the first "
            f"replicates; got {mesh!r}. Take a part of it: mesh.get_submesh_with_dim(name)"
        )
    return device_mesh_of(mesh, device_of(module))


def _placement_of(shard_placement_fn: Callable[[Any], Any], parameter: Any) -> Any:
    placement = shard_placement_fn(parameter)
    return torch_placement(placement) if isinstance(placement, Placement) else placement
