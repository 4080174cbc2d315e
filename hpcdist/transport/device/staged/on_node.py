"""Reductions of device arrays through memory that the ranks of a node share, added on the devices.

Every rank copies a part of its array to staging memory that all have locked, and adds the slice
that is its own out of everyone's on its device. Where others need the sum it is copied back, and
they fetch it. The host copies no byte and adds no number. The slices are added in the order of the
ranks, so that all ranks have the same bits, and those of the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcdist.arrays.device import DeviceArray, Event
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.runs import contribution
from hpcdist.transport.device.host_waits import arrive
from hpcdist.transport.device.staged.buffers import StagingBuffers
from hpcdist.transport.device.staged.plan import Shape, Step, plan_steps
from hpcdist.transport.shm.collectives import share_of
from hpcdist.transport.shm.kernel import accumulate, write_out
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.tuning import STAGED_UP_TO

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

FROM_BYTES = 64 << 10
"""Below this the steps between the ranks cost more than the host's own addition."""

_REDUCED = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)


def applies(context: MpiContext, call: Reduction) -> bool:
    """Return whether `call` is added on the devices; equal on all ranks."""
    return call.kind in _REDUCED and context.node is not None and call.nbytes >= FROM_BYTES


def reduce(context: MpiContext, staging: StagingBuffers, call: Reduction) -> None:
    """Run a reduction on which all ranks have agreed; the last copies are left on a stream."""
    node = context.node
    assert node is not None
    node.check_usable()
    staging.pinned.lock(node.memory)
    given, target = contribution(call), call.recv.reshape(-1)
    if call.send is not None and np.may_share_memory(given, target):
        with staging.runtime.on(staging.outward):
            given = given.copy()
    run = _Run(context, node, staging, call, given, target)
    shape = Shape(given.size, target.size, context.size, context.rank, context.rank == call.root)
    read: Event | None = None
    try:
        steps = plan_steps(call.kind, shape, STAGED_UP_TO // given.itemsize)
        for number, step in enumerate(steps):
            read = run.through(step, number & 1, read)
        if read is not None:
            run.await_(read)  # before another operation writes to the staging memory
        node.step(call)
    except BaseException:
        node.failed = True  # the ranks are out of step
        raise


class _Run(NamedTuple):
    """One reduction of one rank; `target` is where its result goes, if it gets any."""

    context: MpiContext
    node: SharedNode
    staging: StagingBuffers
    call: Reduction
    given: DeviceArray
    target: DeviceArray

    def through(self, step: Step, turn: int, before: Event | None) -> Event:
        """Reduce one part through one half of the staging memory; return when it has been read.

        `before` is when the part before has been read.
        """
        runtime, outward = self.staging.runtime, self.staging.outward
        mine = self._staged(self.node.rank, step, turn)
        for at, start, items in step.out:
            runtime.copy_to_host(self.given[at : at + items], mine[start : start + items], outward)
        self.await_(runtime.record(outward))
        if before is not None:
            self.await_(before)  # when all have come here, its half of the memory is free
        self.node.step(self.call)
        (self._scatter if self.call.kind is Kind.REDUCE_SCATTER else self._gather)(step, turn)
        return runtime.record(self.staging.inward)

    def _scatter(self, step: Step, turn: int) -> None:
        """Add this rank's block into its own array."""
        first = self.node.rank * step.items
        for at, _, items in step.into:
            out = self.target[at : at + items]
            self._add(step, turn, slice(first, first + items), out)

    def _gather(self, step: Step, turn: int) -> None:
        """Add this rank's slice, and let those who get the result fetch everyone's."""
        runtime, inward = self.staging.runtime, self.staging.inward
        own = self._slice(self.node.rank, step)
        if own.stop > own.start:
            with runtime.on(inward):
                out = np.empty_like(self.given, shape=(own.stop - own.start,))
            self._add(step, turn, own, out)
            runtime.copy_to_host(out, self._staged(self.node.rank, step, turn)[own], inward)
        self.await_(runtime.record(inward))
        self.node.step(self.call)
        for at, _, items in step.into:
            mine = self.target[at : at + items]
            for rank in range(self.node.size):
                chosen = self._slice(rank, step)
                staged = self._staged(rank, step, turn)[chosen]
                runtime.copy_to_device(staged, mine[chosen], inward)

    def _add(self, step: Step, turn: int, chosen: slice, out: DeviceArray) -> None:
        """Add what `chosen` holds of everyone's part, on the device, into `out`."""
        runtime, inward, rule = self.staging.runtime, self.staging.inward, self.call.rule
        with runtime.on(inward):
            theirs = np.empty_like(self.given, shape=(self.node.size, out.size))
            for rank in range(self.node.size):
                staged = self._staged(rank, step, turn)[chosen]
                runtime.copy_to_device(staged, theirs[rank], inward)
            write_out(rule, accumulate(rule, list(theirs)), out, self.context.size)

    def _slice(self, rank: int, step: Step) -> slice:
        first, count = share_of(step.items, self.node.size, rank)
        return slice(first, first + count)

    def _staged(self, rank: int, step: Step, turn: int) -> NumpyArray:
        blocks = self.node.size if self.call.kind is Kind.REDUCE_SCATTER else 1
        nbytes = blocks * step.items * self.given.itemsize
        return self.node.staged(rank, turn, nbytes).view(self.given.dtype)

    def await_(self, event: Event) -> None:
        """Block the host until `event`."""
        arrive(self.staging.runtime, event, self.context.timeout_s)
