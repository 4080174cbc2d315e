"""`shard_arrays`: what `group_sharded_parallel` does with a model of `Parameter`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpcdist.arrays.device import on_device
from hpcdist.arrays.libraries import view_of
from hpcdist.comm.group import Group
from hpcdist.comm.states import State, verify_states
from hpcdist.errors import UsageError
from hpcdist.optim.optimizer import Optimizer
from hpcdist.parallel.module_state import broadcast_state, is_trained, states_of, trainable
from hpcdist.parallel.scaler import GradScaler
from hpcdist.parallel.sharding.gradients import ShardGroups
from hpcdist.parallel.sharding.group_sharded import ShardingOptions
from hpcdist.parallel.sharding.model import ShardedModel


def shard_arrays(
    layers: Any, optimizer: Any, scaler: Any, options: ShardingOptions
) -> tuple[ShardedModel, Any, Any]:
    """Shard a model of `Parameter`s. Collective."""
    model = shard_model(layers, options, partial(check_companions, optimizer, scaler))
    return model, model.shard(optimizer), scaler


def shard_model(
    layers: Any, options: ShardingOptions, check: Callable[[Sequence[Any]], None]
) -> ShardedModel:
    """Shard a model of `Parameter`s, whose optimizer comes later. Collective.

    Args:
        layers: the model.
        options: how.
        check: raises a `UsageError` if the parameters that are trained are not the right ones.

    """
    entries: list[tuple[str, Any]] = []
    states: list[State] = []
    problem = None
    try:
        entries = trainable(layers)
        states = states_of(entries)
        trained = [each for _, each in entries if is_trained(each)]
        _check_groups(trained)
        check(trained)
        _check_offload(options, trained)
    except UsageError as error:
        problem = error
    for group in _both(options.groups):
        verify_states(states, group, error=problem)
    for group in _both(options.groups):
        broadcast_state(entries, group, group.ranks[0])
    return ShardedModel(
        layers,
        options.level,
        options.groups,
        limit=options.limit,
        segment=options.segment,
        excluded=[str(entry) for entry in options.excluded],
        ahead=options.ahead,
        sync_buffers=options.sync_buffers,
    )


def _both(groups: ShardGroups) -> list[Group]:
    """Return the groups, replicas first: so the values of one rank reach all."""
    return [group for group in (groups.replicate, groups.shard) if group is not None]


def check_companions(optimizer: Any, scaler: Any, trained: Sequence[Any]) -> None:
    """Refuse what is no fresh optimizer of the parameters that are trained, or no scaler."""
    check_optimizer(optimizer, trained)
    if scaler is not None and type(scaler) is not GradScaler:
        raise UsageError(
            f"the scaler of a model of arrays must be an hpcdist.GradScaler or None, got {scaler!r}"
        )


def check_optimizer(optimizer: Any, trained: Sequence[Any]) -> None:
    """Refuse what is no fresh optimizer of exactly the parameters that are trained."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the optimizer of a model of arrays must be one of hpcdist.optim, got {optimizer!r}"
        )
    if optimizer.has_stepped():
        raise UsageError(
            "the optimizer has taken steps already; shard a fresh one, and let it load the "
            "state_dict() of this one"
        )
    own = {id(slot.parameter) for slot in optimizer.slots}
    if own != {id(each) for each in trained}:
        raise UsageError(
            f"the optimizer must have exactly the {len(trained)} parameters of the model that are "
            f"trained, but has {len(own)}, or other ones; make it from model.named_parameters()"
        )


def _check_groups(trained: Sequence[Any]) -> None:
    own = [each for each in trained if each.group is not None]
    if own:
        raise UsageError(
            f"group_sharded_parallel got {own[0]!r}, which has a group of its own; use DataParallel"
        )


def _check_offload(options: ShardingOptions, trained: Sequence[Any]) -> None:
    if options.offload and any(on_device(view_of(each.data)) for each in trained):
        raise UsageError(
            "offload=True, but there are parameters on a device, whose state is kept where they "
            "are; pass offload=False, or give the model NumPy arrays"
        )
