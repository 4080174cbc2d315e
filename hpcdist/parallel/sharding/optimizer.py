"""`ShardedOptimizer`: the steps of an optimizer, taken by each rank on what it owns.

Weights of 16 bits have their master weights in float32 here, like the optimizer's state only
for what the rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.transfer import host_numbers
from hpcdist.comm.collectives import all_reduce
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.optim.optimizer import Optimizer, Rates, check_keys, check_like
from hpcdist.optim.rules import Options
from hpcdist.optim.slices import Slice
from hpcdist.parallel.clipping import Measured, norm_of, power_sums, scaler
from hpcdist.parallel.scaler import unscale
from hpcdist.parallel.sharding.engine import Engine
from hpcdist.parallel.sharding.partition import Segment
from hpcdist.parallel.sharding.shard_state import (
    OwnedRun,
    State,
    as_slices,
    check_runs,
    fill_runs,
    owned_runs,
)
from hpcdist.transport.call.reduction import ReduceOp


class _Run(NamedTuple):
    """Neighbouring elements that are updated with the same options."""

    options: Options
    start: int
    stop: int


@final
class ShardedOptimizer(Rates):
    """A sharded `Optimizer`, made by `group_sharded_parallel`; with the same methods.

    Attributes:
        learning_rate: that of the first group; assigning sets that of all groups.
        param_groups: the groups of the optimizer it was made of.
        norm_is_collective: True: no rank has all gradients.
        model: the sharded model, if `shard_optimizer` has made one of the parameters.

    """

    norm_is_collective = True
    model: Any = None

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._rule = optimizer.rule
        given = {id(slot.parameter): slot.options for slot in optimizer.slots}
        options: list[Options] = [given[id(parameter)] for parameter in engine.parameters]
        rank = engine.groups.shard.rank
        self._segments = [unit.segments(rank) for unit in engine.units]
        self._runs = [
            _runs([(segment, options[segment.parameter]) for segment in segments])
            for segments in self._segments
        ]
        self._options = options
        self._slices = [
            Slice(engine.owned(number), self._rule) for number in range(len(engine.units))
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; options that are changed here hold from the next step on."""
        return self._optimizer.param_groups

    # ---- steps

    def step(self) -> None:
        """Update the weights that this rank owns, and hand them to all ranks. Collective.

        Ends the backward pass; afterwards there are no gradients.

        Raises:
            UsageError: there is no gradient, because no backward pass was reduced since the last
                step.

        """
        gradients = self._owned_gradients()
        if self._rule.measures_gradients:
            self._advance_by_ratios(gradients)
        else:
            self._advance(gradients)
        self._engine.gradients.clear()

    def _advance(self, gradients: Sequence[NumpyArray]) -> None:
        for number, gradient in enumerate(gradients):
            kept = self._slices[number]
            kept.step += 1
            for run in self._runs[number]:
                part = gradient[run.start : run.stop]
                kept.advance(part, run.options, run.start, run.stop)
            # Each unit at once, unless weights change only when all norms are known (LAMB).
            if self._rule.apply is None:
                self._engine.publish(number)
        if self._rule.apply is not None:
            self._apply(self._ratios([None] * len(gradients)))

    def _advance_by_ratios(self, gradients: Sequence[NumpyArray]) -> None:
        ratios = self._ratios(gradients)
        for number, gradient in enumerate(gradients):
            kept = self._slices[number]
            kept.step += 1
            for index, start, stop, _ in self._segments[number]:
                part = gradient[start:stop]
                kept.advance(part, self._options[index], start, stop, ratios[index])
            self._engine.publish(number)

    def _ratios(self, gradients: Sequence[NumpyArray | None]) -> Sequence[float]:
        """Return the ratio of norms of every parameter, over all its pieces. Collective."""
        squares = np.zeros((len(self._engine.parameters), 2))
        sums: list[Any] = []
        for gradient, kept, (index, start, stop, _) in self._pieces(gradients):
            part = None if gradient is None else gradient[start:stop]
            sums += kept.measure(self._options[index], start, stop, part)
        mine = [segment.parameter for _, _, segment in self._pieces(gradients)]
        squares[mine] = np.array(host_numbers(sums)).reshape(-1, 2)
        all_reduce(squares, group=self._engine.groups.shard)
        pairs = zip(squares.tolist(), self._options, strict=True)
        return [self._rule.ratio_of(pair, options) for pair, options in pairs]

    def _apply(self, ratios: Sequence[float]) -> None:
        for _, kept, (index, start, stop, _) in self._pieces([None] * len(self._slices)):
            kept.apply(self._options[index], start, stop, ratios[index])
        for number in range(len(self._slices)):
            self._engine.publish(number)

    def _pieces(
        self, gradients: Sequence[NumpyArray | None]
    ) -> Iterator[tuple[NumpyArray | None, Slice, Segment]]:
        """Give the segments of all units, each with the gradient and the slice of its unit."""
        for gradient, kept, segments in zip(gradients, self._slices, self._segments, strict=True):
            for segment in segments:
                yield gradient, kept, segment

    def clear_grad(self) -> None:
        """Forget all gradients; ends a backward pass that is under way."""
        self._engine.gradients.clear()

    def zero_grad(self) -> None:
        """Alias of `clear_grad` (torch's name)."""
        self.clear_grad()

    # ---- gradients

    def _owned_gradients(self) -> list[NumpyArray]:
        self._engine.gradients.backward.synchronize_begun()
        owned = [each for each in self._engine.gradients.owned if each is not None]
        if len(owned) < len(self._engine.units):
            raise UsageError(
                "there are no gradients: no backward pass has been reduced since the last step; "
                "assign every parameter its gradient, outside of no_sync(), before step()"
            )
        return owned

    def unscale_(self, scale: float) -> bool:
        """Divide all gradients by `scale`; return whether all of them, on all ranks, are finite.

        Collective; every rank gets the same answer.

        Args:
            scale: the factor of the loss.

        """
        return self._everywhere(unscale(self._owned_gradients(), scale))

    def _everywhere(self, flag: bool) -> bool:
        flags = np.array([flag], np.uint8)
        for group in self._engine.groups:
            if group is not None:
                all_reduce(flags, ReduceOp.MIN, group)
        return bool(flags[0])

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them. Collective.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        gradients = self._owned_gradients()
        sums = power_sums(gradients, norm_type)
        total = np.array([max(sums) if norm_type == inf else sum(sums)])
        op = ReduceOp.MAX if norm_type == inf else ReduceOp.SUM
        all_reduce(total, op, self._engine.groups.shard)
        return norm_of([float(total[0])], norm_type), scaler(gradients)

    # ---- state

    def state_dict(self) -> State:
        """Return the whole state on every rank, as `Optimizer.state_dict` does. Collective."""
        whole: State = {"learning_rate": self.learning_rate}
        kinds = [dict(kept.named_states()) for kept in self._slices]
        for kind in dict.fromkeys(name for each in kinds for name in each):
            arrays = self._engine.gather([each.get(kind) for each in kinds])
            whole |= {f"{name}.{kind}": array for name, array in arrays.items()}
        return whole | self._steps()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, of any level or of none. Local; all or nothing.

        Call `load_state_dict` of the model besides: weights are no state of the optimizer.

        Args:
            state: whole arrays by name.

        Raises:
            UsageError: the state is of other parameters or of another algorithm.

        """
        own = {"learning_rate", *self._steps(), *self._state_names()}
        check_keys(own, state)
        for name in ("learning_rate", *self._steps()):
            check_like(name, 0, state[name])
        self._fill(state)

    def sharded_state_dict(self) -> State:
        """Return this rank's part of the state: `LocalSlice`s, and numbers common to all. Local.

        The slices are views: a checkpoint can be loaded into them in place, and
        `load_sharded_state_dict` must be called after that.
        """
        return {
            "learning_rate": self.learning_rate,
            **as_slices(self._owned_runs()),
            **self._steps(),
        }

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of `LocalSlice`s or whole arrays. Collective.

        Args:
            state: by name; what this rank does not need may be missing.

        Raises:
            UsageError: something that this rank needs is missing or has another shape.

        """
        for name in ("learning_rate", *self._steps()):
            if name not in state:
                raise UsageError(f"the state has no {name!r}; load one of the same optimizer")
        self._fill(state)

    def _fill(self, state: Mapping[str, Any]) -> None:
        runs = list(self._owned_runs())
        check_runs(runs, state)
        fill_runs(runs, state)
        self.learning_rate = float(state["learning_rate"])
        for number, (kept, unit) in enumerate(zip(self._slices, self._engine.units, strict=True)):
            kept.step = int(state[f"{self._engine.names[unit.indices[0]]}.step"])
            kept.settle()
            if kept.master is not None:
                self._engine.publish(number)

    def adopt(self) -> None:
        """Copy the present weights to the master weights; see `Slice.adopt`. Local."""
        for number, kept in enumerate(self._slices):
            kept.use(self._engine.owned(number))
            kept.adopt()

    def _owned_runs(self) -> Iterator[OwnedRun]:
        engine = self._engine
        for unit, kept in zip(engine.units, self._slices, strict=True):
            for name, array in kept.named_states():
                rank = engine.groups.shard.rank
                yield from owned_runs(engine.names, engine.shapes, unit, rank, array, f".{name}")

    def _state_names(self) -> list[str]:
        """Return what arrays the whole state has."""
        return [
            f"{self._engine.names[index]}.{name}"
            for unit, kept in zip(self._engine.units, self._slices, strict=True)
            for name, _ in kept.named_states()
            for index in unit.indices
        ]

    def _steps(self) -> State:
        return {
            f"{self._engine.names[index]}.step": kept.step
            for unit, kept in zip(self._engine.units, self._slices, strict=True)
            for index in unit.indices
        }

    def __repr__(self) -> str:
        return f"ShardedOptimizer({type(self._optimizer).__name__}, level {self._engine.level!r})"


def _runs(segments: Sequence[tuple[Segment, Options]]) -> list[_Run]:
    """Join neighbouring segments with the same options."""
    runs: list[_Run] = []
    for segment, options in segments:
        if runs and runs[-1].options is options and runs[-1].stop == segment.start:
            runs[-1] = runs[-1]._replace(stop=segment.stop)
        else:
            runs.append(_Run(options, segment.start, segment.stop))
    return runs
