"""`ShardedModel`: a model of `Parameter`s whose training state is sharded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import on_host
from hpcdist.errors import UsageError
from hpcdist.optim.optimizer import Optimizer
from hpcdist.parallel.clipping import Measured
from hpcdist.parallel.module_state import (
    array_in,
    broadcast_state,
    buffers_of,
    is_trained,
    load,
    parameters_and_buffers,
    unique,
)
from hpcdist.parallel.overlap import CommStats
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.sharding.engine import Engine, Level
from hpcdist.parallel.sharding.gradients import ShardGroups
from hpcdist.parallel.sharding.optimizer import ShardedOptimizer
from hpcdist.parallel.sharding.shard_state import (
    OwnedRun,
    State,
    as_slices,
    check_runs,
    fill_runs,
    owned_runs,
)


@final
class ShardedModel:
    """A sharded model of arrays, made by `group_sharded_parallel`; other names are the model's.

    Its backward pass is yours, as with `DataParallel`: assign ``p.grad`` (or call
    ``p.accumulate``) for every parameter, last layer first. Gradients go to the ranks that own
    them: afterwards ``p.grad`` is None everywhere, and the sharded optimizer has what it needs.
    What several backward passes assign adds up until the optimizer's step.

    At level ``p_g_os`` read ``p.data`` where it is used, in forward and backward: reading gathers
    the layer of ``p``, and the layer read before is given back. So all ranks must read the same
    parameters in the same order, and a rank must not read one alone.

    Attributes:
        level: what is sharded.
        group: the ranks that share one copy of the model.
        norm_is_collective: True: no rank has all gradients.

    """

    norm_is_collective = True

    def __init__(
        self,
        layers: Any,
        level: Level,
        groups: ShardGroups,
        *,
        limit: int,
        segment: int,
        excluded: Sequence[str],
        ahead: bool,
        sync_buffers: bool,
    ) -> None:
        self._layers = layers
        self.level, self.group = level, groups.shard
        named = unique(layers.named_parameters())
        self._engine = Engine(
            [(name, each) for name, each in named if is_trained(each)],
            level,
            groups,
            limit=limit,
            segment=segment,
            excluded=excluded,
            ahead=ahead,
            owner=weakref.ref(self),
        )
        self._optimizer: ShardedOptimizer | None = None
        if sync_buffers:
            self._engine.after_backward = self._broadcast_buffers

    def shard(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Return the sharded form of the model's optimizer.

        Args:
            optimizer: one of `hpcdist.optim`, of the model's parameters.

        """
        self._optimizer = ShardedOptimizer(optimizer, self._engine)
        return self._optimizer

    # ---- training

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model; whether its gradients will be reduced is decided here."""
        self._engine.forward()
        run = self._layers if callable(self._layers) else self._layers.forward
        output = run(*inputs, **kwargs)
        self._engine.forward_ended()
        return output

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model.

        Args:
            inputs: of the model, by position.
            kwargs: of the model, by name.

        """
        return self(*inputs, **kwargs)

    def synchronize(self) -> None:
        """End the backward pass, which ends by itself with the last gradient. Collective.

        Raises:
            UsageError: a parameter has no gradient on this rank.
            RemoteError: that is so on another rank.

        """
        self._engine.gradients.backward.synchronize_begun()

    def apply_collective_grads(self) -> None:
        """Alias of `synchronize`."""
        self.synchronize()

    def zero_grad(self) -> None:
        """Forget all gradients; ends a backward pass that is under way."""
        self._engine.gradients.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of forwards inside the context without communication, if possible.

        It is at level ``os``, where every rank has memory for whole gradients. At the other
        levels each backward pass is reduced as it comes, and the sums are the same.
        """
        backward, before = self._engine.gradients.backward, self._engine.gradients.backward.sync
        backward.sync = self.level != "os"
        try:
            yield
        finally:
            backward.sync = before

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them. Collective.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        if self._optimizer is None:
            raise UsageError("this model has no sharded optimizer; use group_sharded_parallel")
        return self._optimizer.measure_gradients(norm_type)

    def comm_stats(self) -> CommStats:
        """Return the cost of reducing gradients so far, and the hidden share of it. Local."""
        return self._engine.gradients.averager.stats()

    def _broadcast_buffers(self) -> None:
        # Across replicas first: then the first rank of each shard group has the values of the first
        # rank of all, and every rank ends with them.
        for group in reversed(self._engine.groups):
            if group is not None:
                broadcast_state(unique(buffers_of(self._layers)), group, group.ranks[0])

    # ---- the model itself

    def parameters(self) -> list[Parameter]:
        """Return the parameters, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return names, without a prefix, and parameters, each once."""
        return unique(self._layers.named_parameters())

    def state_dict(self) -> dict[str, NumpyArray]:
        """Return all parameters and buffers, whole, as new NumPy arrays by name. Collective."""
        whole = self._engine.full_state()
        rest = {name: on_host(view_of(array_in(entry))) for name, entry in self._rest()}
        return {name: {**whole, **rest}[name] for name, _ in parameters_and_buffers(self._layers)}

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> None:
        """Load whole arrays, as `state_dict` returned them. Collective: the same on every rank.

        Args:
            state_dict: arrays by name, of all parameters and buffers.
            use_structured_name: accepted: names are always those of `state_dict`.

        Raises:
            UsageError: a name is missing or unknown, or an array has another shape.

        """
        known = {name for name, _ in parameters_and_buffers(self._layers)}
        different = sorted(map(str, known ^ state_dict.keys()))
        if different:
            raise UsageError(
                f"the state has other names than the model: {', '.join(different[:8])} occur in "
                "one of them only; load a state_dict() of the same model"
            )
        self.load_sharded_state_dict(state_dict)

    load_state_dict = set_state_dict

    def sharded_state_dict(self) -> State:
        """Return a `LocalSlice` of each parameter that this rank owns a part of. Local.

        Buffers and parameters that are not trained are whole, on every rank.
        """
        rest = {name: array_in(entry) for name, entry in self._rest()}
        return {**as_slices(self._owned_runs()), **rest}

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of `LocalSlice`s or whole arrays. Collective.

        Args:
            state: by name; what this rank does not need may be missing.

        Raises:
            UsageError: something that this rank needs is missing or has another shape.

        """
        runs = list(self._owned_runs())
        check_runs(runs, state)
        rest = self._rest()
        load(rest, {name: state[name] for name, _ in rest if name in state})
        fill_runs(runs, state)
        for number in range(len(self._engine.units)):
            self._engine.publish(number)
        self._engine.gathered.reshard()
        if self._optimizer is not None:
            self._optimizer.adopt()

    def _owned_runs(self) -> Iterator[OwnedRun]:
        engine = self._engine
        for number, unit in enumerate(engine.units):
            array, rank = engine.owned(number), engine.groups.shard.rank
            yield from owned_runs(engine.names, engine.shapes, unit, rank, array)

    def _rest(self) -> list[tuple[str, Any]]:
        """Return the names and entries that are not sharded."""
        return [pair for pair in parameters_and_buffers(self._layers) if not is_trained(pair[1])]

    def __getattr__(self, name: str) -> Any:
        if name == "_layers":
            raise AttributeError(name)
        return getattr(self._layers, name)

    def __repr__(self) -> str:
        return f"ShardedModel({self._layers!r}, level {self.level!r}, {self.group.nranks} ranks)"
