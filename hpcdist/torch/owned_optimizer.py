"""`OwnedOptimizer`: torch's optimizer of a module on virtual ranks, each rank with its part.

See [Note: whole parameters]. torch's ZeroRedundancyOptimizer needs torch's process groups, and has
master weights here, so that weights of 16 bits would differ from those of a plain optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from hpcdist.comm.objects import tell_all
from hpcdist.comm.states import verifying
from hpcdist.parallel.sharding.group_sharded import ShardingOptions
from hpcdist.parallel.virtual.owners import plan_owners
from hpcdist.torch.clipping import note_owning
from hpcdist.torch.optimizers import loss_of
from hpcdist.torch.scaler import AgreeingScaler
from hpcdist.torch.sharded import check_companions
from hpcdist.torch.sharded_state import optimizer_state
from hpcdist.torch.virtual_ranks import TorchVirtualRanks, broadcast_tensors


def shard_virtual_module(
    model: TorchVirtualRanks, optimizer: Any, scaler: Any, options: ShardingOptions
) -> tuple[Any, Any, Any]:
    """Shard the optimizer of a module on virtual ranks, and at level ``os_g`` its gradients.

    Collective.

    Raises:
        UsageError: the optimizer or the scaler is not torch's, or the optimizer has taken steps or
            has other parameters than the module.

    """
    group = model.group
    with verifying(group, "condition") as alike:
        check_companions(model.module, optimizer, scaler)
        alike.append((f"level={options.level}", (), ""))
    trained = [each for each in model.parameters() if each.requires_grad]
    owners = plan_owners([each.numel() for each in trained], group.nranks)
    owner_of = {id(each): owner for each, owner in zip(trained, owners, strict=True)}
    if options.level == "os_g":
        model.shard_gradients(owner_of)
        note_owning(model)
    owned = [
        [each for each in trained if owner_of[id(each)] == rank] for rank in range(group.nranks)
    ]
    sharded = OwnedOptimizer(optimizer, model, owned)
    return model, sharded, None if scaler is None else AgreeingScaler(scaler, group)


@final
class OwnedOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """An optimizer of which each rank steps some parameters.

    Args:
        optimizer: a fresh one of all parameters; it keeps those of this rank.
        model: whose parameters these are.
        owned: the parameters of each rank of the model's group.

    Attributes:
        optim: the optimizer of this rank's parameters.

    """

    def __init__(
        self, optimizer: Any, model: TorchVirtualRanks, owned: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        super().__init__([dict(each) for each in optimizer.param_groups], optimizer.defaults)
        self.optim, self._model, self._owned = optimizer, model, owned
        mine = {id(each) for each in owned[model.group.rank]}
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in mine]
        for each in [each for each in optimizer.state if id(each) not in mine]:
            del optimizer.state[each]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that this rank owns, and give them to all ranks. Collective.

        Args:
            closure: computes the gradients, and returns the loss.

        """
        loss = loss_of(closure)
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        self.optim.step()
        group = self._model.group
        for rank, parameters in zip(group.ranks, self._owned, strict=True):
            broadcast_tensors(parameters, group, rank)
        return loss

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer does. Collective."""
        everyone = [each for group in self.param_groups for each in group["params"]]
        places = {id(each): place for place, each in enumerate(everyone)}
        own = {places[id(each)]: state for each, state in self.optim.state.items()}
        told = tell_all("a state of a sharded optimizer", own, self._model.group)
        whole = {place: state for each in told for place, state in each.items()}
        state: dict[str, Any] = super().state_dict()
        return {**state, "state": dict(sorted(whole.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of any number of ranks or of the plain optimizer. Local.

        Args:
            state_dict: the whole state.

        """
        super().load_state_dict(state_dict)
        for group in self.optim.param_groups:
            for each in group["params"]:
                self.optim.state.pop(each, None)
                if each in self.state:
                    self.optim.state[each] = self.state[each]
        self.state.clear()

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return `LocalSlice`s of what this rank owns, and numbers that all have. Collective."""
        return optimizer_state(self._model, self, self._model.group)[0]

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of `LocalSlice`s or whole arrays. Collective.

        Args:
            state: by name; what this rank does not need may be missing.

        Raises:
            UsageError: something that this rank needs is missing or has another shape.

        """
        optimizer_state(self._model, self, self._model.group)[1](state)
