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
from typing import Any, NamedTuple, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm import describe
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty_near
from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.parallel.averager import Averager
from hpcdist.parallel.parameter import GradSlot, Parameter
from hpcdist.parallel.reducer import Reducer
from hpcdist.parallel.sharding.partition import Unit
from hpcdist.transport.base import Work
from hpcdist.transport.call import Call, Kind
from hpcdist.transport.reduction import ReduceOp


class ShardGroups(NamedTuple):
    """The ranks that share one copy of the model, and those that hold the same part of others."""

    shard: Group
    replicate: Group | None = None


class _Transfer(NamedTuple):
    """A unit under way: what arrives, and the work."""

    unit: int
    arriving: NumpyArray
    work: Work


def _scatter(group: Group, bucket: tuple[NumpyArray, NumpyArray]) -> Call:
    return describe.reduce_scatter(group, *bucket, ReduceOp.AVG)


@final
class ShardedGradients:
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
        owned: by unit, the mean gradient of what this rank owns, padded; None if there is none.
        sync: whether the next backward pass is reduced; only where memory stays.

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
        self.sync = True
        self.owned: list[NumpyArray | None] = [None] * len(units)
        self._kept: list[NumpyArray | None] = [None] * len(units)
        self._flats: list[NumpyArray | None] = [None] * len(units)
        self._reducer = Reducer([unit.indices for unit in units])
        self.averager = Averager(groups.shard, _scatter, Kind.REDUCE_SCATTER)
        self._replicas = None if groups.replicate is None else Averager(groups.replicate)
        self._intercept = bytearray(b"\1" * len(parameters))
        hooks = self._before_write, self._after_write, self._before_read
        for unit, like in zip(units, likes, strict=True):
            nothing = np.zeros_like(like, shape=(1,)).reshape(())
            for index in unit.indices:
                parameter = parameters[index]
                memory = np.broadcast_to(nothing, parameter.shape)
                parameter.has_grad = False
                parameter.attach(GradSlot(memory, index, self._intercept, *hooks, owner, adds=True))
        self._forward: bool | None = None
        self._synced: bool | None = None
        self._error: UsageError | None = None
        self._transfers: list[_Transfer] = []
        self._arrivals: list[_Transfer] = []

    def _unit_of(self, index: int) -> int:
        return self._reducer.bucket_of(index)

    # ---- what the model says

    def forward(self) -> None:
        """Note a forward pass; it decides whether the next backward pass is reduced."""
        self.synchronize()
        self._forward = self.sync or not self._stays

    def synchronize(self) -> None:
        """End the backward pass if one is under way. Collective if it is reduced."""
        if self._synced:
            self._end()
        elif self._synced is not None:
            self._reset()

    def clear(self) -> None:
        """Forget all gradients, those that are owned, too."""
        self.synchronize()
        for parameter in self._parameters:
            parameter.has_grad = False
        self.owned = [None] * len(self._units)

    # ---- what the parameters say

    def _before_write(self, index: int, error: UsageError | None) -> None:
        if self._synced is None:
            self._begin()
        elif self._reducer.is_ready(index):
            if self._synced:
                error = error or self._second(index)
            else:
                self._begin()
        if error is not None:
            if self._synced:
                self._end(error)
            raise error
        self._open(self._unit_of(index))

    def _after_write(self, index: int) -> None:
        units = self._reducer.ready(index)
        if not self._synced:
            return
        for unit in units:
            self._send(unit)
        if self._reducer.is_complete():
            self._end()

    def _before_read(self, index: int) -> None:
        if self._synced and self._reducer.is_launched(index):
            raise UsageError(
                f"the gradient of parameter {self._parameters[index].name!r} is on its way to the "
                "ranks that own it; read it before the last one of its layer is assigned, or use "
                "hpcdist.clip_grad_norm_ and the sharded optimizer"
            )

    # ---- memory

    def _open(self, unit: int) -> None:
        """Let the unit have memory, if it has none."""
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

    def _begin(self) -> None:
        self._reset()
        self._synced = (self.sync or not self._stays) if self._forward is None else self._forward
        self._forward = None
        if self._stays:  # what is owned lies in memory that will be written
            self.owned = [None if own is None else own.copy() for own in self.owned]
        if self._synced:
            self.averager.begin()
            if self._replicas is not None:
                self._replicas.begin()

    def _send(self, unit: int, error: UsageError | None = None) -> None:
        self._error = self._error or error
        self._receive(only_completed=True)
        flat = self._flats[unit]
        share, like = self._units[unit].share, self._likes[unit]
        fresh = self._stays or self.owned[unit] is not None
        arriving = empty_near(like, share, self._groups.shard) if fresh else self._mine(unit)
        try:
            work = self.averager.average((arriving, flat), self._error)
        except CollectiveTimeout:
            self._reset()
            raise
        self._transfers.append(_Transfer(unit, arriving, work))
        if self.averager.inline:
            self._receive()

    def _receive(self, *, only_completed: bool = False) -> None:
        """Take in what has arrived, in order; all of it, unless `only_completed`."""
        while self._transfers:
            transfer = self._transfers[0]
            if only_completed and not transfer.work.is_completed():
                return
            del self._transfers[0]
            self._arrived(transfer)

    def _arrived(self, transfer: _Transfer) -> None:
        try:
            transfer.work.wait()
        except CollectiveTimeout:
            self._reset()
            raise
        except Exception as error:
            self._error = self._error or _failed(error)
        if self._replicas is not None:
            self._arrivals.append(transfer)
        elif self._error is None:
            self._keep(transfer.unit, transfer.arriving)
        self._close(transfer.unit)

    def _average_replicas(self) -> None:
        """Average what has arrived with the other copies of the model; see [Note: two groups]."""
        for transfer in self._arrivals:
            assert self._replicas is not None
            try:
                self._replicas.average(transfer.arriving, self._error).wait()
            except CollectiveTimeout:
                raise
            except Exception as error:
                self._error = self._error or _failed(error)
            if self._error is None:
                self._keep(transfer.unit, transfer.arriving)

    def _keep(self, unit: int, arriving: NumpyArray) -> None:
        before, mine = self.owned[unit], self._mine(unit)
        if before is not None:
            np.add(arriving, before, out=mine)
        elif mine is not arriving:
            mine[...] = arriving
        self.owned[unit] = mine

    def _end(self, error: UsageError | None = None) -> None:
        """Send what has not been sent, wait for everything, and raise the first error."""
        if error is None and not self._reducer.is_complete():
            error = self._missing()
        try:
            for unit in self._reducer.rest():
                self._open(unit)
                self._send(unit, error)
            self.averager.computed()
            if self._replicas is not None:
                self._replicas.computed()
            self._receive()
            self._average_replicas()
            error = self._error
        finally:
            self._reset()
        if error is not None:
            self.owned = [None] * len(self._units)
        self._after(error)
        if error is not None:
            raise error if error.__cause__ is None else error.__cause__

    def _reset(self) -> None:
        self._synced = None
        self._error = None
        self._transfers.clear()
        self._arrivals.clear()
        self._reducer.restart()

    # ---- errors

    def _missing(self) -> UsageError:
        return UsageError(
            f"the backward pass ended without a gradient for {self._names(self._reducer.missing())}"
            "; give every parameter one, zeros where it has no part in the loss"
        )

    def _second(self, index: int) -> UsageError:
        others = self._names(self._reducer.missing())
        return UsageError(
            f"parameter {self._parameters[index].name!r} got a second gradient in one backward "
            f"pass, while {others} had none yet; add up gradients before assigning them, or let "
            "each backward pass begin with a call of the model"
        )

    def _names(self, indices: Sequence[int]) -> str:
        names = [repr(self._parameters[index].name) for index in indices[:8]]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        return f"parameter{'s' if len(indices) > 1 else ''} {', '.join(names)}{more}"


def _failed(error: Exception) -> UsageError:
    """Keep what went wrong with a unit, to be raised once all have been sent."""
    failure = UsageError(f"a unit of this backward pass has failed: {error}")
    failure.__cause__ = error
    return failure
