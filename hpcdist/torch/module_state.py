"""Equal modules on all ranks: `agree` checks them, `broadcast_module` makes them equal.

`entries_of` and `give_extras` are the two sides of a module's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as c10d
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hpcdist.comm.group import Group
from hpcdist.comm.states import State, verifying
from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.compressed.options import states_for
from hpcdist.parallel.gradient_groups import by_group, group_of
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.parallel.options import bucket_limits
from hpcdist.torch.process_group import HpcdistProcessGroup


def agree(
    layers: torch.nn.Module, group: Group, usual_mb: float, last_mb: float, compress: Any = None
) -> int:
    """Check that all ranks train the same module; return the bytes of a bucket. Collective."""
    with verifying(group) as alike:
        _, limit = bucket_limits(group, usual_mb, last_mb)
        alike += states_of(by_group(_named_tensors(layers), group)[group])
        alike += states_for(compress, trainable(layers))
    return limit


def states_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[State]:
    """Return what ranks compare of tensors."""
    return [(name, tuple(tensor.shape), _describe_tensor(tensor)) for name, tensor in named]


def broadcast_module(layers: torch.nn.Module, process_group: HpcdistProcessGroup) -> None:
    """Give all ranks the states of the first, but for parameters in other groups; collective."""
    group = process_group.group
    tensors = [
        tensor.detach()
        for tensor in (*layers.parameters(), *layers.buffers())
        if group_of(tensor, group) is group
    ]
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    broadcast_states(on_host, group, group.ranks[0])
    for tensor in tensors:
        if tensor.device.type != "cpu":
            process_group.broadcast(tensor, c10d.BroadcastOptions()).wait()


def trainable(layers: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return names and parameters that are trained, in order."""
    return [pair for pair in layers.named_parameters() if pair[1].requires_grad]


_registered = [0]


def registrations() -> int:
    """Return how often any module has got a parameter or a sub-module since this was imported."""
    return _registered[0]


def _count(*_: Any) -> None:
    _registered[0] += 1


register_module_parameter_registration_hook(_count)
register_module_module_registration_hook(_count)


class Entries(NamedTuple):
    """What ``state_dict`` has of a module: its tensors, and what layers keep besides."""

    tensors: dict[str, torch.Tensor]
    extras: dict[str, Any]


def entries_of(module: torch.nn.Module) -> Entries:
    """Return parameters and buffers that are saved, by all of their names, and extra states."""
    found = Entries({}, {})
    for name, each in module.state_dict(keep_vars=True).items():
        is_extra = name.rpartition(".")[2] == "_extra_state"
        (found.extras if is_extra else found.tensors)[name] = each
    return found


def check_names(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a state that has not all of these names."""
    missing = sorted(set(names) - state.keys())
    if missing:
        raise UsageError(f"the state has no {missing[0]!r}; load one of the same model")


def give_extras(module: torch.nn.Module, extras: Iterable[str], state: Mapping[str, Any]) -> None:
    """Give layers their extra states."""
    for name in extras:
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])


def _named_tensors(layers: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return names and tensors of a module that can be trained; a `UsageError` says why not."""
    states = [*layers.named_parameters(), *layers.named_buffers()]
    if not trainable(layers):
        raise UsageAssertionError(
            "This model does not have any parameters to train, and does not need to use "
            "DataParallel; call it as it is, or set requires_grad on what shall be trained"
        )
    lazy = [name for name, tensor in states if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{', '.join(lazy)} have no shape yet; call the model once with a batch before "
            "DataParallel"
        )
    return states


def _describe_tensor(tensor: torch.Tensor) -> str:
    dtype = f"{tensor.dtype}".removeprefix("torch.")
    return dtype if tensor.requires_grad else f"{dtype}, not trained"
