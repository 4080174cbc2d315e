"""States of sharded torch modules and optimizers, as `LocalSlice`s by name, for checkpoints.

The names are those of sharded models of arrays: ``"<parameter>"`` in the model's state,
``"<parameter>.<state>"`` in the optimizer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcdist.arrays.libraries import library_of
from hpcdist.comm.collectives import all_gather, all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.states import verify_states, verifying
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.sharding.shard_state import (
    OwnedRun,
    State,
    as_slices,
    check_runs,
    fill_runs,
)
from hpcdist.torch.data_parallel import TorchDataParallel
from hpcdist.torch.module_state import check_names, entries_of, give_extras
from hpcdist.torch.optimizers import is_dampened, materialize_states, set_aside
from hpcdist.transport.call.reduction import ReduceOp

Load = Callable[[Mapping[str, Any]], None]


class _Numbers(NamedTuple):
    """States that are no arrays of weights, by name, and where they are kept."""

    tensors: dict[str, torch.Tensor]

    def values(self) -> State:
        """Return them as numbers."""
        return {name: float(tensor) for name, tensor in self.tensors.items()}


def model_state(model: Any, group: Group) -> tuple[State, Load]:
    """Return this rank's part of a module, and a function that loads such a state.

    Parameters that every rank has are cut into equal parts, so that each is saved once. Buffers
    are whole.
    """
    module = model.module if isinstance(model, TorchDataParallel) else model
    entries = entries_of(module)
    runs = [
        run
        for name, each in entries.tensors.items()
        if isinstance(each, torch.nn.Parameter)
        for run in _owned_runs(name, each.detach(), group)
    ]
    buffers = {
        name: each.detach()
        for name, each in entries.tensors.items()
        if not isinstance(each, torch.nn.Parameter)
    }

    def load(state: Mapping[str, Any]) -> None:
        check_runs(runs, state)
        check_names(state, [*buffers, *entries.extras])
        fill_runs(runs, state)
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                _complete(parameter.detach().view(-1), group)
        for name, buffer in buffers.items():
            buffer.copy_(torch.as_tensor(state[name]))
        give_extras(module, entries.extras, state)

    return {**as_slices(runs), **buffers, **entries.extras}, load


def optimizer_state(model: Any, optimizer: Any, group: Group) -> tuple[State, Load]:
    """Return this rank's part of an optimizer's state, and a function that loads it.

    Both are collective. Dampened momentum begins with the gradient itself: before its first step
    it is saved as zeros, and when zeros are loaded, the next step is the first.
    """
    local = getattr(optimizer, "optim", optimizer)  # where each rank steps some parameters
    begins = is_dampened(local) and not local.state
    materialize_states(local)
    names = {id(each): name for name, each in model.named_parameters()}
    runs: list[OwnedRun] = []
    numbers = _Numbers({})
    problem = None
    for parameter, states in local.state.items():
        for key, value in states.items():
            name = f"{names[id(parameter)]}.{key}"
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                runs += _owned_runs(name, value.detach(), None)
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                numbers.tensors[name] = value
            else:
                problem = problem or unknown(name, value)
    verify_states([], group, error=problem)  # the others may have nothing of the kind
    give_back = set_aside(local) if begins else None
    known = numbers.values()
    if local is not optimizer:
        known = _everybodys(known, group)

    def load(state: Mapping[str, Any]) -> None:
        with verifying(group):  # the others may own nothing that is wrong
            check_runs(runs, state)
        fill_runs(runs, state)
        for name, tensor in numbers.tensors.items():
            tensor.fill_(float(state[name]))
        for group_, rate in zip(optimizer.param_groups, state["learning_rates"], strict=True):
            group_["lr"] = rate
        if give_back is not None:
            give_back()
        if is_dampened(local) and not _has_momentum(runs, group):
            set_aside(local)

    rates = [float(each["lr"]) for each in optimizer.param_groups]
    return {**as_slices(runs), **known, "learning_rates": rates}, load


def _has_momentum(runs: Sequence[OwnedRun], group: Group) -> bool:
    """Return whether any rank owns momentum that is not zero. Collective."""
    own = [run.data.any() for run in runs if run.name.endswith(".momentum_buffer")]
    anywhere = np.array(any(own))
    all_reduce(anywhere, ReduceOp.MAX, group)
    return bool(anywhere)


def unknown(name: str, value: Any) -> UsageError | None:
    """Return what is wrong with a tensor that lies on the ranks in a way nobody knows."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return UsageError(
            f"the optimizer's state {name!r} has shape {tuple(value.shape)}, which is not that of "
            "its parameter, so it cannot be cut as the parameter is; use an optimizer whose states "
            "are like parameters, such as AdamW"
        )
    return None


def _owned_runs(name: str, tensor: torch.Tensor, group: Group | None) -> Iterator[OwnedRun]:
    """Give what this rank owns; of a whole tensor its equal part, or all where `group` is None."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        _, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        start = first[0] * math.prod(shape[1:]) if shape else 0
        flat = tensor.to_local().reshape(-1)
    elif group is None:
        start, flat = 0, tensor.reshape(-1)
    else:
        share = -(-tensor.numel() // group.nranks)
        start = min(group.rank * share, tensor.numel())
        flat = tensor.view(-1)[start : start + share]
    if flat.numel():
        yield OwnedRun(name, _memory(flat), shape, start)


def _complete(flat: torch.Tensor, group: Group) -> None:
    """Fill a whole tensor, of which each rank has its equal part. Collective."""
    share = -(-flat.numel() // group.nranks)
    padded = flat.new_zeros(share * group.nranks)
    own = padded[group.rank * share : (group.rank + 1) * share]
    mine = flat[group.rank * share : (group.rank + 1) * share]
    own[: mine.numel()] = mine
    all_gather(padded, own, group)
    flat.copy_(padded[: flat.numel()])


def _memory(flat: torch.Tensor) -> Any:
    if flat.device.type != "cpu":
        raise UsageError(
            f"the state of a module on {flat.device.type} cannot be taken apart in host memory; "
            "use torch.distributed.checkpoint on hpcdist's backend"
        )
    return library_of(flat).view(flat)


def _everybodys(own: State, group: Group) -> State:
    """Return the numbers of all ranks, each of which has those of its own parameters."""
    gathered: list[State] = tell_all("a state of a sharded module", own, group)
    return {name: value for each in gathered for name, value in each.items()}
