"""`OwnedOptimizer`: the optimizer of a model of arrays on virtual ranks, each rank with its part.

See [Note: whole parameters].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.objects import tell_all
from hpcdist.comm.states import verifying
from hpcdist.errors import UsageError
from hpcdist.optim.optimizer import Optimizer, Rates
from hpcdist.parallel.clipping import Measured
from hpcdist.parallel.module_state import broadcast_state
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.scaler import unscale
from hpcdist.parallel.sharding.arrays import check_companions
from hpcdist.parallel.sharding.group_sharded import ShardingOptions
from hpcdist.parallel.sharding.shard_state import (
    OwnedRun,
    State,
    as_slices,
    check_runs,
    fill_runs,
)
from hpcdist.parallel.virtual.arrays import ArrayVirtualRanks
from hpcdist.parallel.virtual.owners import plan_owners
from hpcdist.transport.call.reduction import ReduceOp


def shard_virtual_arrays(
    model: ArrayVirtualRanks, optimizer: Any, scaler: Any, options: ShardingOptions
) -> tuple[Any, Any, Any]:
    """Shard the optimizer of a model on virtual ranks, and at level ``os_g`` its gradients.

    Collective.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    with verifying(model.group, "condition") as alike:
        check_companions(optimizer, scaler, trained)
        alike.append((f"level={options.level}", (), ""))
    owners = plan_owners([each.data.size for each in trained], model.group.nranks)
    if options.level == "os_g":
        model.shard_gradients({id(each): to for each, to in zip(trained, owners, strict=True)})
    owned: list[list[Parameter]] = [[] for _ in range(model.group.nranks)]
    for parameter, owner in zip(trained, owners, strict=True):
        owned[owner].append(parameter)
    return model, OwnedOptimizer(optimizer, model, owned), scaler


@final
class OwnedOptimizer(Rates):
    """An `Optimizer` of which each rank steps some parameters, with the same methods.

    Args:
        optimizer: of all parameters; it keeps those of this rank.
        model: whose parameters these are.
        owned: the parameters of each rank of the model's group.

    """

    norm_is_collective = True

    def __init__(
        self, optimizer: Optimizer, model: ArrayVirtualRanks, owned: list[list[Parameter]]
    ) -> None:
        self._optimizer, self._model, self._owned = optimizer, model, owned
        self._everyones = [slot.parameter for slot in optimizer.slots]
        self._own = optimizer.narrow(owned[model.group.rank])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; options that are changed here hold from the next step on."""
        return self._optimizer.param_groups

    # ---- steps

    def step(self) -> None:
        """Change the parameters that this rank owns, and give them to all ranks. Collective."""
        self._own.step()
        self._publish()

    def _publish(self) -> None:
        group = self._model.group
        for rank, parameters in zip(group.ranks, self._owned, strict=True):
            if parameters and group.nranks > 1:
                broadcast_state([(each.name, each) for each in parameters], group, rank)

    def clear_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for each in self._everyones:
            each.grad = None

    def zero_grad(self) -> None:
        """Alias of `clear_grad` (torch's name)."""
        self.clear_grad()

    # ---- gradients

    def unscale_(self, scale: float) -> bool:
        """Divide all gradients by `scale`; return whether all of them, on all ranks, are finite.

        Collective; every rank gets the same answer.

        Args:
            scale: the factor of the loss.

        """
        memories: Iterable[NumpyArray | None] = (each.memory() for each in self._everyones)
        finite = np.array([unscale([each for each in memories if each is not None], scale)])
        all_reduce(finite, ReduceOp.MIN, self._model.group)
        return bool(finite[0])

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them. Collective.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        return self._model.measure_gradients(norm_type)

    # ---- state

    def state_dict(self) -> State:
        """Return the whole state on every rank, as `Optimizer.state_dict` does. Collective."""
        own = self._optimizer.state_dict()
        told = tell_all("a state of a sharded optimizer", own, self._model.group)
        return {name: value for each in told for name, value in each.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, of any number of ranks. Collective.

        Args:
            state: whole arrays by name.

        Raises:
            UsageError: the state is of other parameters or of another algorithm.

        """
        self.load_sharded_state_dict(state)

    def sharded_state_dict(self) -> State:
        """Return `LocalSlice`s of what this rank owns, and numbers that all have. Collective.

        The slices are views: a checkpoint can be loaded into them in place, and
        `load_sharded_state_dict` must be called after that.
        """
        steps = tell_all("steps of a sharded optimizer", self._steps(), self._model.group)
        return {
            "learning_rate": self.learning_rate,
            **as_slices(self._runs()),
            **{name: step for each in steps for name, step in each.items()},
        }

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of `LocalSlice`s or whole arrays. Collective.

        Args:
            state: by name; what this rank does not need may be missing.

        Raises:
            UsageError: something that this rank needs is missing or has another shape.

        """
        runs = list(self._runs())
        with verifying(self._model.group):
            missing = [name for name in ("learning_rate", *self._steps()) if name not in state]
            if missing:
                raise UsageError(f"the state has no {missing[0]!r}; load one of the same optimizer")
            check_runs(runs, state)
        fill_runs(runs, state)
        self.learning_rate = float(state["learning_rate"])
        for label, _, kept in self._own.slices():
            kept.step = int(state[f"{label}.step"])
        self._own.settle()
        self._publish()

    def _runs(self) -> Iterator[OwnedRun]:
        for label, parameter, kept in self._own.slices():
            for name, array in kept.named_states():
                shape = parameter.shape
                shape = shape if array.size == parameter.data.size else (*shape, 2)
                yield OwnedRun(f"{label}.{name}", array, tuple(shape), 0)

    def _steps(self) -> dict[str, int]:
        return {f"{label}.step": kept.step for label, _, kept in self._own.slices()}

    def __repr__(self) -> str:
        name = type(self._optimizer).__name__
        return f"OwnedOptimizer({name}, on {self._model.group.nranks} ranks)"
