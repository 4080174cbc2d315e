"""`ShardedGradients`: gradients that end on the ranks that own them.

A backward pass fills units of flat memory as in `DataParallel`; a full unit is reduced and
scattered, so that every rank gets the mean of what it owns. Either the memory of the units stays
(level ``os``), or it is there from the first gradient of a unit until the unit has arrived
(``os_g``, ``p_g_os``).

[Note: adding up] What a rank owns is the sum over all backward passes since the last step of the
optimizer (or `zero_grad`). So a gradient that is assigned in a second pass adds to the first.

[Note: two groups] Averaging over replicas waits for the end of the backward pass. In between, ranks
reach it at different moments, while others wait for them in an operation of the other group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm import describe
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty_near
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.averager import Averager, first_failure
from hpcdist.parallel.backward import BackwardPass, Policy
from hpcdist.parallel.parameter import Parameter
from hpcdist.parallel.sharding.partition import Unit
from hpcdist.transport.call.call import Call
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import Work


class ShardGroups(NamedTuple):
    """The ranks that share one copy of the model, and those that hold the same part of others."""

    shard: Group
    replicate: Group | None = None


class _Transfer(NamedTuple):
    """A unit under way: what arrives, and the work."""

    unit: int
    arriving: NumpyArray
    work: Work


def _describe_mean(group: Group, bucket: tuple[NumpyArray, NumpyArray]) -> Call:
    return describe.reduce_scatter(group, *bucket, ReduceOp.AVG)


@final
class ShardedGradients(Policy):
    """Collective over the groups to create.

    Args:
        parameters: those that are trained, in order of registration.
        units: what travels together, in the order in which it is sent.
        likes: for each unit an array, maybe without elements, of its dtype and kind of memory.
        groups: the ranks.
        stays: whether the memory of whole units stays between backward passes.
        owner: the model, which frees the parameters when it goes.
        after: called when a backward pass that was reduced has ended, well or not.

    Attributes:
        backward: the passes, which call what is here; all are reduced, unless the memory stays.
        averager: how units travel.
        owned: by unit, the mean gradient of what this rank owns, padded; None if there is none.

    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        units: Sequence[Unit],
        likes: Sequence[NumpyArray],
        groups: ShardGroups,
        *,
        stays: bool,
        owner: weakref.ref[Any],
        after: Callable[[UsageError | None], None],
    ) -> None:
        self._parameters, self._units, self._likes = parameters, units, likes
        self._groups, self._stays, self._after = groups, stays, after
        self.owned: list[NumpyArray | None] = [None] * len(units)
        self._kept: list[NumpyArray | None] = [None] * len(units)
        self._flats: list[NumpyArray | None] = [None] * len(units)
        self.averager = Averager(groups.shard, _describe_mean, Kind.REDUCE_SCATTER)
        self._replicas = None if groups.replicate is None else Averager(groups.replicate)
        self._error: UsageError | None = None
        self._transfers: list[_Transfer] = []
        self._arrivals: list[_Transfer] = []
        buckets = [unit.indices for unit in units]
        self.backward = BackwardPass(parameters, buckets, self, owner, in_place=False)
        for unit, like in zip(units, likes, strict=True):
            nothing = np.zeros_like(like, shape=(1,)).reshape(())
            for index in unit.indices:
                parameter = parameters[index]
                memory = np.broadcast_to(nothing, parameter.shape)
                parameter.has_grad = False
                parameter.attach(self.backward.slot(index, memory))

    def clear(self) -> None:
        """Clear all gradients, those that are owned, too."""
        self.backward.synchronize_begun()
        for parameter in self._parameters:
            parameter.has_grad = False
        self.discard()

    # ---- memory

    def open(self, unit: int) -> None:
        """See `Policy.open`."""
        if self._flats[unit] is not None:
            return
        plan = self._units[unit]
        group = self._groups.shard
        flat = self._flats[unit] = empty_near(self._likes[unit], plan.share * group.nranks, group)
        flat[sum(plan.sizes) :] = 0
        for index, start, size in zip(plan.indices, plan.starts, plan.sizes, strict=True):
            memory = flat[start : start + size].reshape(self._parameters[index].shape)
            self._parameters[index].move(memory)

    def _close(self, unit: int) -> None:
        """Give the memory of the unit back, unless it stays."""
        for index in self._units[unit].indices:
            self._parameters[index].has_grad = False
            if not self._stays:
                self._parameters[index].detach()
        if not self._stays:
            self._flats[unit] = None

    def _mine(self, unit: int) -> NumpyArray:
        """Return the memory for what this rank owns of the unit."""
        share = self._units[unit].share
        if self._stays:
            flat = self._flats[unit]
            assert flat is not None
            rank = self._groups.shard.rank
            return flat[rank * share : (rank + 1) * share]
        kept = self._kept[unit]
        if kept is None:
            kept = self._kept[unit] = empty_near(self._likes[unit], share, self._groups.shard)
        return kept

    # ---- a backward pass

    def begin(self, synced: bool) -> None:
        """See `Policy.begin`."""
        if self._stays:  # what is owned lies in memory that will be written
            self.owned = [None if own is None else own.copy() for own in self.owned]
        if synced:
            self.averager.begin()
            if self._replicas is not None:
                self._replicas.begin()

    def read(self, index: int) -> None:
        """Refuse to read a gradient that has been sent."""
        if self.backward.reducer.is_launched(index):
            raise UsageError(
                f"the gradient of parameter {self._parameters[index].name!r} is on its way to the "
                "ranks that own it; read it before the last one of its layer is assigned, or use "
                "hpcdist.clip_grad_norm_ and the sharded optimizer"
            )

    def send(self, unit: int, error: UsageError | None) -> UsageError | None:
        """See `Policy.send`."""
        self._error = self._error or error
        self._receive(only_completed=True)  # frees memory before more is taken
        flat = self._flats[unit]
        share, like = self._units[unit].share, self._likes[unit]
        # What is owned must stay until `_keep` adds to it; at level ``os`` it lies in what is sent.
        fresh = self._stays or self.owned[unit] is not None
        arriving = empty_near(like, share, self._groups.shard) if fresh else self._mine(unit)
        work = self.averager.average((arriving, flat), self._error)
        self._transfers.append(_Transfer(unit, arriving, work))
        if self.averager.inline:
            self._receive()
        return self._error

    def _receive(self, *, only_completed: bool = False) -> None:
        """Take in what has arrived, in order; all of it, unless `only_completed`."""
        while self._transfers:
            transfer = self._transfers[0]
            if only_completed and not transfer.work.is_completed():
                return
            del self._transfers[0]
            self._arrived(transfer)

    def _arrived(self, transfer: _Transfer) -> None:
        self._wait(transfer.work)
        if self._replicas is not None:
            self._arrivals.append(transfer)
        elif self._error is None:
            self._keep(transfer.unit, transfer.arriving)
        self._close(transfer.unit)

    def _wait(self, work: Work) -> None:
        """Wait for a unit; keep what went wrong with it, to be raised once all have been sent."""
        failure = first_failure([work])
        if failure is not None and self._error is None:
            # As a UsageError it calls off the units that follow; `finish` raises its cause.
            self._error = UsageError(f"a unit of this backward pass has failed: {failure}")
            self._error.__cause__ = failure

    def _average_replicas(self) -> None:
        """Average what has arrived with the other copies of the model; see [Note: two groups]."""
        for transfer in self._arrivals:
            assert self._replicas is not None
            self._wait(self._replicas.average(transfer.arriving, self._error))
            if self._error is None:
                self._keep(transfer.unit, transfer.arriving)

    def _keep(self, unit: int, arriving: NumpyArray) -> None:
        before, mine = self.owned[unit], self._mine(unit)
        if before is not None:
            np.add(arriving, before, out=mine)
        elif mine is not arriving:
            mine[...] = arriving
        self.owned[unit] = mine

    def fill_in(self, missing: Sequence[int]) -> UsageError | None:
        """Return that every parameter must have a gradient."""
        return UsageError(
            f"the backward pass ended without a gradient for {self.backward.names(missing)}"
            "; give every parameter one, zeros where it has no part in the loss"
        )

    def finish(self, missing: Sequence[int], error: UsageError | None) -> None:
        """See `Policy.finish`."""
        self._error = self._error or error
        self.averager.computed()
        if self._replicas is not None:
            self._replicas.computed()
        self._receive()
        self._average_replicas()
        self._after(self._error)
        if self._error is not None:
            raise self._error if self._error.__cause__ is None else self._error.__cause__

    def discard(self) -> None:
        """Forget what is owned."""
        self.owned = [None] * len(self._units)

    def reset(self) -> None:
        """See `Policy.reset`."""
        self._error = None
        self._transfers.clear()
        self._arrivals.clear()
