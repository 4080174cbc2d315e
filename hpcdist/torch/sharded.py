"""Sharding of torch modules by torch's own engines: what `group_sharded_parallel` does with them.

Level ``os`` is `TorchDataParallel` with torch's ZeroRedundancyOptimizer; ``os_g`` and ``p_g_os``
are torch's ``fully_shard`` (FSDP2), which gathers parameters once per step or anew in forward and
backward. All of it communicates through hpcdist's backend.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from hpcdist.comm.group import Group
from hpcdist.comm.groups import new_group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.states import verify_states, verifying
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.parallel.sharding.gradients import ShardGroups
from hpcdist.parallel.sharding.group_sharded import ShardingOptions
from hpcdist.torch.alike import states_of_layers
from hpcdist.torch.backend import process_group_of
from hpcdist.torch.data_parallel import TorchDataParallel
from hpcdist.torch.masters import with_masters
from hpcdist.torch.module_state import agree, broadcast_module
from hpcdist.torch.on_grid import replace
from hpcdist.torch.optimizers import check_fresh
from hpcdist.torch.scaler import AgreeingScaler
from hpcdist.torch.sharded_state import model_state, optimizer_state
from hpcdist.torch.zero import ZeroRedundancyOptimizer

_MiB = 1 << 20
_NARROW = (torch.float16, torch.bfloat16)


class _Recipe(NamedTuple):
    """What makes an optimizer again, for other parameters: class, options, groups by name."""

    kind: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]


def shard_module(
    module: torch.nn.Module, optimizer: Any, scaler: Any, options: ShardingOptions
) -> tuple[Any, Any, Any]:
    """Shard a module; see `group_sharded_parallel`. Collective.

    Raises:
        UsageError: the optimizer or the scaler is not torch's, or the optimizer has taken steps or
            has other parameters than the module.

    """
    everyone = _union(options.groups)
    with verifying(everyone):
        _check_arguments(module, optimizer, scaler, options)
    recipe = _recipe_of(module, optimizer)
    if options.level == "os":
        model: Any = TorchDataParallel(
            module, comm_buffer_size=options.limit / _MiB, group=everyone
        )
    else:
        model = shard_fully(module, everyone, options)
        model.no_sync = nullcontext  # there is no room for whole gradients: each pass is reduced
    # Where parameters are DTensors now, the optimizer is made anew, by their names.
    groups = _groups(recipe, dict(module.named_parameters()))
    if options.level == "os":
        sharded = shard_states(recipe.kind, groups, recipe.defaults, options.groups.shard)
    else:
        sharded = recipe.kind(groups, **recipe.defaults)
    _add_states(model, sharded, options.groups.shard)
    return model, sharded, None if scaler is None else AgreeingScaler(scaler, everyone)


# ---- level os


def shard_states(
    kind: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    defaults: dict[str, Any],
    group: Group,
) -> Any:
    """Return an optimizer of which each rank of `group` steps some of the parameters. Collective.

    Args:
        kind: the class of the optimizer.
        groups: of parameters that all ranks have.
        defaults: arguments of the class.
        group: the ranks that share the state.

    """
    return ZeroRedundancyOptimizer(
        groups,
        optimizer_class=with_masters(kind, groups),
        process_group=process_group_of(group),
        parameters_as_bucket_view=True,
        **defaults,
    )


# ---- levels os_g and p_g_os


def shard_fully(module: torch.nn.Module, everyone: Group, options: ShardingOptions) -> Any:
    """Make parameters DTensors that are cut over the ranks. Collective over `everyone`.

    Args:
        module: it gets the values of the first rank, and other parameters of the same names.
        everyone: the ranks that train together.
        options: which of them share one copy, and how.

    """
    agree(module, everyone, options.limit / _MiB, options.limit / _MiB)
    verify_states(states_of_layers(module), everyone, "layer")
    broadcast_module(module, process_group_of(everyone))
    before = dict(module.named_parameters())
    narrow = {each.dtype for each in module.parameters()} & set(_NARROW)
    policy = MixedPrecisionPolicy()
    if narrow:  # master weights: what is sharded has 32 bits, what is gathered has 16
        dtype = narrow.pop()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        module.to(torch.float32)
    device = next(module.parameters()).device.type
    offload = CPUOffloadPolicy() if options.offload and device != "cpu" else OffloadPolicy()
    wrap = partial(
        fully_shard, mesh=_mesh(options.groups, device), mp_policy=policy, offload_policy=offload
    )
    shards_parameters = options.level == "p_g_os"
    slots = _slots(module)
    excluded = [
        each for each in excluded_modules(module, options.excluded) if not _is_tied(each, slots)
    ]
    # Bottom-up: each call takes the parameters that no call before it has taken.
    for each in excluded:
        wrap(each, reshard_after_forward=False)
    for each in units(module, options.segment, excluded):
        wrap(each, reshard_after_forward=shards_parameters)
    model = wrap(module, reshard_after_forward=shards_parameters)
    use_shared_memory(*model.modules())
    for name, parameter in module.named_parameters():
        replace(before[name], parameter)
    return model


def use_shared_memory(*modules: torch.nn.Module) -> None:
    """Let what sharded modules send and receive be in memory that the ranks of a node share.

    Args:
        modules: those of ``fully_shard``; others are left alone.

    """
    for module in modules:
        if isinstance(module, FSDPModule) and _is_on_cpu(module):
            module.set_allocate_memory_from_process_group_for_comm(True)


def _is_on_cpu(module: torch.nn.Module) -> bool:
    return all(each.device.type == "cpu" for each in module.parameters())


def units(
    module: torch.nn.Module,
    least: int,
    excluded: Sequence[torch.nn.Module],
    slots: Counter[int] | None = None,
) -> Iterator[torch.nn.Module]:
    """Give the deepest modules that have at least `least` bytes; the rest goes with the root.

    So does a weight that modules share, unless all of them are in one of these: a module that is
    sharded gets a parameter of its own. `slots` are those of the root.
    """
    slots = slots or _slots(module)
    for child in module.children():
        if any(child is each for each in excluded) or _nbytes(child) < least:
            continue
        deeper = list(units(child, least, excluded, slots))
        if deeper:
            yield from deeper
        elif any(True for _ in child.parameters()) and not _is_tied(child, slots):
            yield child


def _slots(module: torch.nn.Module) -> Counter[int]:
    """Return in how many modules each parameter is, by its ``id``."""
    return Counter(id(own) for each in module.modules() for own in each.parameters(recurse=False))


def _is_tied(module: torch.nn.Module, slots: Counter[int]) -> bool:
    """Return whether a module shares a parameter with one outside it; the root has `slots`."""
    return any(count != slots[key] for key, count in _slots(module).items())


def _nbytes(module: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def excluded_modules(module: torch.nn.Module, wanted: Sequence[str | int]) -> list[torch.nn.Module]:
    """Return the modules that are excluded, by name or by ``id``."""
    named = dict(module.named_modules())
    found = []
    for entry in wanted:
        hits = [each for name, each in named.items() if entry in (name, id(each))]
        if not hits:
            raise UsageError(
                f"exclude_layer has {entry!r}, which is neither the name nor the id of a module; "
                f"the modules are {', '.join(name for name in list(named)[1:9])}"
            )
        found += hits
    return found


def _mesh(groups: ShardGroups, device: str) -> DeviceMesh:
    own = process_group_of(groups.shard)
    if groups.replicate is None:
        return DeviceMesh.from_group(own, device)
    rows = tell_all("a mesh of groups", list(groups.shard.ranks), groups.replicate)
    across = process_group_of(groups.replicate)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([across, own], device, torch.tensor(rows), mesh_dim_names=names)


# ---- states


def _add_states(model: Any, optimizer: Any, group: Group) -> None:
    """Give both `sharded_state_dict` and `load_sharded_state_dict`, as those of arrays have."""
    states = {
        model: partial(model_state, model, group),
        optimizer: partial(optimizer_state, model, optimizer, group),
    }
    for owner, state in states.items():
        owner.sharded_state_dict = partial(_state_of, state)
        owner.load_sharded_state_dict = partial(_load_into, state)


State = Callable[[], tuple[Any, Callable[[Mapping[str, Any]], None]]]


def _state_of(state: State) -> Any:
    """Return what this rank owns: `LocalSlice`s by name, and what all have. Collective."""
    return state()[0]


def _load_into(state: State, given: Mapping[str, Any]) -> None:
    """Load this rank's part of a state of `LocalSlice`s or whole arrays. Collective."""
    state()[1](given)


# ---- the optimizer and the scaler


def _check_arguments(
    module: torch.nn.Module, optimizer: Any, scaler: Any, options: ShardingOptions
) -> None:
    check_companions(module, optimizer, scaler)
    on_device = any(each.device.type != "cpu" for each in module.parameters())
    if options.offload and options.level == "os" and on_device:
        raise UsageError(
            "torch's ZeroRedundancyOptimizer cannot keep its state in host memory; use level os_g "
            "or p_g_os with offload=True"
        )


def check_companions(module: torch.nn.Module, optimizer: Any, scaler: Any) -> None:
    """Refuse what is no fresh optimizer of the parameters that are trained, or no scaler."""
    check_fresh(optimizer, "group_sharded_parallel")
    own = {id(each) for each in module.parameters() if each.requires_grad}
    frozen = {id(each) for each in module.parameters()} - own
    given = {id(each) for group in optimizer.param_groups for each in group["params"]} - frozen
    if own != given:
        raise UsageError(
            f"the optimizer must have exactly the {len(own)} parameters of the module that are "
            f"trained, but has {len(given)}, or others; make it of model.parameters()"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(
            f"the scaler of a torch module must be a torch.amp.GradScaler or None, got {scaler!r}"
        )
    if any(own_group(each) is not None for each in module.parameters()):
        raise UsageError(
            "group_sharded_parallel got a module with parameters that have an hpcdist_group; use "
            "DataParallel"
        )


def _recipe_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Recipe:
    """Return how to make the optimizer again, with names in place of parameters."""
    names = {id(each): name for name, each in module.named_parameters()}
    groups = [
        {**group, "params": [names[id(each)] for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters  # AdamW has defaults that it does not take
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return _Recipe(kind, defaults, groups)


def _groups(recipe: _Recipe, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**group, "params": [parameters[name] for name in group["params"]]}
        for group in recipe.groups
    ]


def _union(groups: ShardGroups) -> Group:
    """Return the group of all ranks that train together. Collective over the groups."""
    if groups.replicate is None:
        return groups.shard
    rows = tell_all("a union of groups", list(groups.shard.ranks), groups.replicate)
    return new_group(sorted(rank for row in rows for rank in row))
