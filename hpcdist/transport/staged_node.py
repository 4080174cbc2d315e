"""Reductions of device arrays through memory that the ranks of a node share, added on the devices.

Every rank copies a part of its array to staging memory that all have locked, adds the slice that
is its own out of everyone's on its device, copies the sum back there, and fetches the others'. No
byte is copied, and no number added, by the host. The slices are added in the order of the ranks, so
that all ranks have the same bits, and those of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcdist.arrays.device import DeviceArray, Engine, Event
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call import Call, Kind
from hpcdist.transport.kernel import accumulate, write_out
from hpcdist.transport.select import STAGED_UP_TO
from hpcdist.transport.shared_node import SharedNode
from hpcdist.transport.shared_verbs import share_of
from hpcdist.transport.stage import Stage, arrive

if TYPE_CHECKING:
    from hpcdist.transport.mpi_host import MpiHost

FROM_BYTES = 64 << 10
"""Below this the steps between the ranks cost more than the host's own addition."""


class _Part(NamedTuple):
    """A run of elements, and which half of the staging memory it goes through."""

    turn: int
    first: int
    items: int


def applies(host: MpiHost, call: Call) -> bool:
    """Say whether `call` is added on the devices; equal on all ranks."""
    if call.kind is not Kind.ALL_REDUCE or host.node is None:
        return False
    assert call.recv is not None
    return call.recv.nbytes >= FROM_BYTES


def all_reduce(host: MpiHost, stage: Stage, call: Call) -> None:
    """Run an all-reduce on which all ranks have agreed; the last copies are left on a stream."""
    node = host.node
    assert node is not None
    node.check_usable()
    stage.pinned.lock(node.memory)
    assert call.recv is not None
    data = call.recv.reshape(-1)
    run = _Run(host, node, stage, call, data)
    fetched: Event | None = None
    try:
        for part in _parts(data.size, STAGED_UP_TO // data.itemsize):
            fetched = run.through(part, fetched)
        if fetched is not None:
            run.await_(fetched)  # before another operation writes to the staging memory
        node.step(call)
    except BaseException:
        node.failed = True  # the ranks are out of step
        raise


def _parts(items: int, step: int) -> Iterator[_Part]:
    for number, first in enumerate(range(0, items, step)):
        yield _Part(number & 1, first, min(step, items - first))


class _Run(NamedTuple):
    """One all-reduce of one rank."""

    host: MpiHost
    node: SharedNode
    stage: Stage
    call: Call
    data: DeviceArray

    def through(self, part: _Part, before: Event | None) -> Event:
        """Reduce one part; `before` is when the part before has been fetched."""
        engine, inward, outward = self.stage.engine, self.stage.inward, self.stage.outward
        mine = self.data[part.first : part.first + part.items]
        engine.copy_to_host(mine, self._staged(self.node.rank, part), outward)
        self.await_(engine.record(outward))
        if before is not None:
            self.await_(before)  # when all have come here, its half of the memory is free
        self.node.step(self.call)
        self._add_slice(engine, part)
        self.node.step(self.call)
        for rank in range(self.node.size):
            chosen = self._slice(rank, part)
            engine.copy_to_device(self._staged(rank, part)[chosen], mine[chosen], inward)
        return engine.record(inward)

    def _add_slice(self, engine: Engine, part: _Part) -> None:
        """Add this rank's slice of everyone's part on the device; leave it in its own memory."""
        chosen, inward, recipe = (
            self._slice(self.node.rank, part),
            self.stage.inward,
            self.call.recipe,
        )
        assert recipe is not None
        count = chosen.stop - chosen.start
        if count:
            with engine.on(inward):
                given = np.empty_like(self.data, shape=(self.node.size, count))
                for rank in range(self.node.size):
                    engine.copy_to_device(self._staged(rank, part)[chosen], given[rank], inward)
                out = np.empty_like(self.data, shape=count)
                write_out(recipe, accumulate(recipe, list(given)), out, self.host.size)
                engine.copy_to_host(out, self._staged(self.node.rank, part)[chosen], inward)
        self.await_(engine.record(inward))

    def _slice(self, rank: int, part: _Part) -> slice:
        first, count = share_of(part.items, self.node.size, rank)
        return slice(first, first + count)

    def _staged(self, rank: int, part: _Part) -> NumpyArray:
        nbytes = part.items * self.data.itemsize
        return self.node.staged(rank, part.turn, nbytes).view(self.data.dtype)

    def await_(self, event: Event) -> None:
        """Block the host until `event`."""
        arrive(self.stage.engine, event, self.host.timeout_s)
