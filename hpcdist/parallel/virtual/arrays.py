"""`ArrayVirtualRanks`: `hpcdist.DataParallel` of a model of `Parameter`s on virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.states import verifying
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.parallel.array_model import ArrayModel
from hpcdist.parallel.clipping import Measured, norm_of, power_sums, scaler
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.parallel.module_state import (
    array_in,
    broadcast_state,
    buffers_of,
    is_trained,
    load,
    states_of,
    trainable,
    unique,
)
from hpcdist.parallel.options import DEFAULT_MB, bucket_limits, training_group
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.virtual.engine import VirtualRanks
from hpcdist.parallel.virtual.exchange import Exchange
from hpcdist.parallel.virtual.memory import FlatMemory
from hpcdist.parallel.virtual.settings import checked_count, nan_in
from hpcdist.parallel.virtual.streams import GENERATORS, Streams

Arrays = list[NumpyArray]


@final
class ArrayVirtualRanks(ArrayModel, VirtualRanks):
    """A model whose ``named_parameters()`` gives names and `Parameter`s; see `VirtualRanks`."""

    def __init__(
        self,
        layers: Any,
        strategy: Any = None,
        comm_buffer_size: float = DEFAULT_MB,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
        *,
        check_nan: bool | None = None,
        virtual_ranks: int,
        seed: int = 0,
        compress: None = None,
    ) -> None:
        self._layers, self.group = layers, training_group(group)
        with verifying(self.group, "condition") as alike:
            count = checked_count(virtual_ranks, self.group, find_unused_parameters)
            seed = integer(seed, "seed")
            alike.append((f"virtual_ranks={count}, seed={seed}", (), ""))
        with verifying(self.group) as alike:
            _, self._limit = bucket_limits(self.group, comm_buffer_size, last_comm_buffer_size)
            entries = trainable(layers)
            _check_groups(entries)
            alike += states_of(entries)
        broadcast_state(entries, self.group, self.group.ranks[0])
        for name, entry in entries:
            if is_trained(entry):
                entry.name = name
        self._count, self._exchange = count, Exchange(self.group, count)
        self.virtual_ranks = self._exchange.own
        self._streams = Streams(self.virtual_ranks, count, seed, GENERATORS)
        self._check_nan = read_config().check_nan if check_nan is None else check_nan
        self._memory, self._kept = self._lay_out([]), {}
        self._syncs, self._has_turn = True, False

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._give([each for _, each in self._named()], [None] * len(self._named()))

    # ---- see VirtualRanks

    def _named(self) -> list[tuple[str, Parameter]]:
        return [pair for pair in self.named_parameters() if pair[1].requires_grad]

    def _lay_out(self, trained: Sequence[Any]) -> FlatMemory:
        likes = [np.empty_like(each, _sum_dtype(each), shape=0) for each in _views(trained)]
        return self._memory_for(trained, likes, self._limit, _empty)

    def measure_gradients(self, norm_type: float) -> Measured:
        """See `VirtualRanks.measure_gradients`.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        memories = {
            index: memory
            for index, (_, each) in enumerate(self._named())
            if (memory := each.memory()) is not None
        }
        if self._owners is None:
            sums = power_sums(memories.values(), norm_type)
        else:
            everyones = np.zeros(len(self._named()))
            everyones[[*memories]] = power_sums(memories.values(), norm_type)
            all_reduce(everyones, group=self.group)  # of each number but one summand is not 0
            sums = everyones.tolist()
        return norm_of(sums, norm_type), scaler(memories.values())

    def _listed_buffers(self) -> list[Any]:
        return [array_in(entry) for _, entry in self._entries()]

    def _fill_buffers(self, contents: Sequence[NumpyArray]) -> None:
        if contents:
            names = [name for name, _ in self._entries()]
            load(self._entries(), dict(zip(names, contents, strict=True)))

    def _broadcast_buffers(self) -> None:
        if entries := self._entries():
            broadcast_state(entries, self.group, self.group.ranks[0])

    def _entries(self) -> list[tuple[str, Any]]:
        return unique(buffers_of(self._layers))

    def _taken(self, trained: Sequence[Parameter]) -> list[NumpyArray | None]:
        memories = [each.memory() for each in trained]
        return [None if each is None else each.copy() for each in memories]

    def _give(self, trained: Sequence[Parameter], gradients: Sequence[NumpyArray | None]) -> None:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.has_grad = False
            if gradient is not None:
                parameter.accumulate(gradient)

    def _add(self, trained: Sequence[Parameter], means: Arrays) -> None:
        for parameter, mean in zip(trained, means, strict=True):
            if mean is not None:
                parameter.accumulate(mean.astype(view_of(parameter.data).dtype, copy=False))

    def _wide(self, gradients: Sequence[Any]) -> Arrays:
        return [each.astype(_sum_dtype(each), copy=False) for each in gradients]

    def _summed(self, one: Arrays, other: Arrays) -> Arrays:
        with np.errstate(all="ignore"):
            for left, right in zip(one, other, strict=True):
                np.add(left, right, out=left)
        return one

    def _flaw(self, named: Sequence[tuple[str, Any]], gradients: Sequence[Any]) -> str | None:
        looked_at = zip(named, gradients, strict=True) if self._check_nan else ()
        wrong = [name for (name, _), each in looked_at if bool(np.isnan(each).any())]
        return nan_in(wrong) if wrong else None

    def __repr__(self) -> str:
        return (
            f"DataParallel({self._layers!r}, {self._count} virtual ranks on "
            f"{self.group.nranks} ranks)"
        )


def _check_groups(entries: Sequence[tuple[str, Any]]) -> None:
    apart = [name for name, each in entries if own_group(each) is not None]
    if apart:
        raise UsageError(
            f"{apart[0]} has a group of its own, so not all ranks have it; virtual ranks need "
            "every parameter on all ranks: take the group away, or leave virtual_ranks out"
        )


def _views(trained: Sequence[Parameter]) -> Arrays:
    return [view_of(each.data) for each in trained]


def _sum_dtype(array: NumpyArray) -> np.dtype[Any]:
    """Return the dtype in which gradients like this one are summed: 16 bits are too few."""
    return np.dtype(np.float32) if array.dtype.itemsize == 2 else array.dtype


def _empty(like: NumpyArray, size: int) -> NumpyArray:
    return np.empty_like(like, shape=size)
