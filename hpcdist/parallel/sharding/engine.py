"""`Engine`: one sharded model of arrays; what its model and its optimizer have in common.

The three levels are three choices: ``os`` keeps parameters and gradients whole, ``os_g`` also frees
whole gradients, ``p_g_os`` also keeps parameters sharded. All of them own the same parts, take the
same steps and write the same checkpoints.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, final, get_args

import numpy as np

from hpcdist.arrays.buffer import is_writeable
from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import on_host
from hpcdist.comm.collectives import all_reduce
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.sharding.gathered import GatheredParameters
from hpcdist.parallel.sharding.gradients import ShardedGradients, ShardGroups
from hpcdist.parallel.sharding.partition import Item, Unit, layer_of, plan_layers, plan_units
from hpcdist.parallel.sharding.replicated import ReplicatedParameters, gathered_whole
from hpcdist.transport.call.reduction import ReduceOp

Level = Literal["os", "os_g", "p_g_os"]
LEVELS: tuple[Level, ...] = get_args(Level)

_MEASURED = 4
"""Backward passes after which ranks agree whether to gather ahead; by then it is decided."""


class Store(Protocol):
    """Where the weights of some units are; units are counted from 0."""

    def owned(self, position: int) -> NumpyArray:
        """Return what this rank owns of a unit."""
        ...

    def publish(self, position: int) -> None:
        """Make the owners' new weights of a unit available to all ranks."""
        ...


@final
class Engine:
    """Collective over the groups to create; the parameters must be equal on all ranks.

    Args:
        named: names and parameters that are trained.
        level: what is sharded.
        groups: the ranks.
        limit: bytes of a unit of gradients.
        segment: bytes of the least unit of gathered parameters.
        excluded: names of parameters or layers that are never sharded.
        ahead: whether parameters may be gathered ahead of their use.
        owner: the model.

    Attributes:
        names: of the parameters.
        parameters: in order of registration.
        units: what travels together, in the order in which gradients are sent.

    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        level: Level,
        groups: ShardGroups,
        *,
        limit: int,
        segment: int,
        excluded: Sequence[str],
        ahead: bool,
        owner: weakref.ref[Any],
    ) -> None:
        self.level, self.groups = level, groups
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for parameter in self.parameters]
        for name, parameter in named:
            parameter.name = name
        stay = _excluded(self.names, excluded)
        items = _items(named, stay)
        shards_parameters = level == "p_g_os"
        plan, size = (plan_layers, segment) if shards_parameters else (plan_units, limit)
        self.units = plan(items, groups.shard.nranks, size)
        gathered = [shards_parameters and unit.indices[0] not in stay for unit in self.units]
        firsts = [_view(self.parameters[unit.indices[0]]) for unit in self.units]
        likes = [np.empty_like(first, shape=(0,)) for first in firsts]
        del firsts  # level p_g_os lets go of the memory
        self.gathered = GatheredParameters(
            self.parameters, _where(self.units, gathered, True), groups.shard
        )
        self.replicated = ReplicatedParameters(
            self.parameters, _where(self.units, gathered, False), groups.shard
        )
        stores: dict[bool, Store] = {True: self.gathered, False: self.replicated}
        self._places = [
            (stores[own], gathered[:number].count(own)) for number, own in enumerate(gathered)
        ]
        self.gradients = ShardedGradients(
            self.parameters,
            self.units,
            likes,
            groups,
            stays=level == "os",
            owner=owner,
            after=self._backward_ended,
        )
        overlap = read_config().overlap if ahead and groups.shard.nranks > 1 else "never"
        self._undecided = overlap == "auto"
        self.gathered.ahead = overlap == "always"
        self._backwards = 0
        self.after_backward = _nothing

    # ---- weights

    def owned(self, number: int) -> NumpyArray:
        """Return the weights of a unit that this rank owns."""
        store, position = self._places[number]
        return store.owned(position)

    def publish(self, number: int) -> None:
        """Make the owners' new weights of a unit available to all ranks. Collective."""
        store, position = self._places[number]
        store.publish(position)

    def adopt(self, number: int) -> None:
        """Take what whole parameters hold now as the weights this rank owns. Local."""
        store, position = self._places[number]
        if store is self.replicated:
            self.replicated.adopt(position)

    def full_state(self) -> dict[str, NumpyArray]:
        """Return all weights as new NumPy arrays, by name. Collective over the group."""
        return self.gather([self.owned(number) for number in range(len(self.units))])

    def gather(self, parts: Sequence[NumpyArray | None]) -> dict[str, NumpyArray]:
        """Return, by name, whole NumPy arrays of which ranks own `parts` in units. Collective."""
        arrays: dict[str, NumpyArray] = {}
        for unit, part in zip(self.units, parts, strict=True):
            if part is None:
                continue
            flat = gathered_whole(part, self.groups.shard)
            per = part.size // unit.share if unit.share else 1
            for index, start, size in zip(unit.indices, unit.starts, unit.sizes, strict=True):
                shape = self.shapes[index] if per == 1 else (*self.shapes[index], per)
                run = flat[start * per : (start + size) * per]
                arrays[self.names[index]] = on_host(run.reshape(shape))
        return {name: arrays[name] for name in self.names if name in arrays}

    # ---- passes

    def forward(self) -> None:
        """Begin a forward pass."""
        self.gradients.backward.forward()
        self.gathered.begin("forward")

    def forward_ended(self) -> None:
        """End the forward pass: what it has gathered goes."""
        self.gathered.begin("backward")

    def _backward_ended(self, error: UsageError | None) -> None:
        self.gathered.begin("backward")
        self._backwards += 1
        # Gathering ahead changes the order of operations, so ranks must agree on it. All of them
        # come here after the same number of passes: one that fails ends on every rank.
        if self._undecided and self._backwards == _MEASURED:
            self._undecided = False
            self.gathered.ahead = self._all_have_cores()
        if error is None:
            self.after_backward()

    def _all_have_cores(self) -> bool:
        """Return whether communication hides behind computing on every rank. Collective."""
        spare = np.array([not self.gradients.averager.inline], np.uint8)
        all_reduce(spare, ReduceOp.MIN, self.groups.shard)
        return bool(spare[0])


def _nothing() -> None:
    pass


def _where(units: Iterable[Unit], flags: Iterable[bool], wanted: bool) -> list[Unit]:
    return [unit for unit, flag in zip(units, flags, strict=True) if flag is wanted]


def _view(parameter: Parameter) -> NumpyArray:
    return view_of(parameter.data)


def _items(named: Sequence[tuple[str, Parameter]], stay: set[int]) -> list[Item]:
    items = []
    for index, (name, parameter) in enumerate(named):
        view = _view(parameter)
        kind = (
            dtype_row(view.dtype).name,
            is_writeable(view),
            device_runtime_of(view),
            index in stay,
        )
        items.append(Item(name, view.shape, view.size, view.nbytes, kind))
    return items


def _excluded(names: Sequence[str], excluded: Sequence[str]) -> set[int]:
    """Return the indices of parameters whose name or layer is excluded.

    Raises:
        UsageError: an entry is the name of neither.

    """
    stay: set[int] = set()
    for entry in excluded:
        found = {
            index
            for index, name in enumerate(names)
            if entry == name or name.startswith(f"{entry}.")
        }
        if not found:
            layers = sorted({layer_of(name) for name in names})
            raise UsageError(
                f"exclude_layer has {entry!r}, which is not the name of a layer or parameter; the "
                f"layers are {', '.join(layers[:8])}"
            )
        stay |= found
    return stay
