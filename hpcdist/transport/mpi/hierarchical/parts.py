"""How a collective of several nodes goes on: part by part, the lanes at work beside the node.

The contribution of a rank is a matrix of so many rows (one, or one for each rank of the group), and
a part is a range of its columns, the same on all ranks. Between two meetings of a node's ranks the
lanes carry one part, while its ranks copy what came before and offer what comes next:

    offer 0 | begin 0, offer 1 | end 0, begin 1, take 0, offer 2 | end 1, begin 2, take 1 | ...

[Note: slots] A rank has four slots of staging memory, used in turn: part k is offered before the
k-th meeting, and what became of it is taken after the next one, before the one that follows. So
three are in use, and the first of all holds addresses until the third part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.call import Collective
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.hierarchical.lanes import Lane
from hpcdist.transport.mpi.hierarchical.nodes import Hierarchy
from hpcdist.transport.mpi.patience import finish, named
from hpcdist.transport.tuning import STAGED_UP_TO

_SLOTS = 4
_SLOT = STAGED_UP_TO // 2
_LINE = 64
_TOLD_FROM = 64 << 10
_ADDRESS = np.dtype(np.int64)


class Part(NamedTuple):
    """Columns from `first` on, `items` of them; `slot` is the staging memory for them."""

    slot: int
    first: int
    items: int

    @property
    def columns(self) -> slice:
        """The columns of this part."""
        return slice(self.first, self.first + self.items)


class Shape(NamedTuple):
    """What an operation needs of the staging memory, equal on all ranks.

    Rows that a rank gives, rows of what becomes of them at a rank, columns, bytes of an element.
    """

    given: int
    made: int
    width: int
    itemsize: int

    @property
    def step(self) -> int:
        """The columns of a part; 0 where not even a cache line of each row fits into a slot."""
        line = max(1, _LINE // self.itemsize)
        return _SLOT // ((self.given + self.made) * self.itemsize) // line * line

    def parts(self) -> Iterator[Part]:
        """Cut the columns into parts that fit into the slots."""
        for number, first in enumerate(range(0, self.width, self.step)):
            yield Part((number + 1) % _SLOTS, first, min(self.step, self.width - first))


@final
class Window:
    """What the ranks of a node offer each other in one operation.

    `own` is the contribution of this rank, None where it has none. Ranks whose contribution lies
    in the heap of the node tell where, and others read it there; all others stage it. Collective
    over the node.
    """

    def __init__(
        self,
        nodes: Hierarchy,
        call: Collective,
        own: NumpyArray | None,
        shape: Shape,
        dtype: np.dtype,
    ) -> None:
        self.node, self.shape, self._dtype = nodes.node, shape, dtype
        self._own = None if own is None else own.reshape(shape.given, shape.width)
        self._places: Sequence[int] = (0,) * self.node.size
        if shape.given * shape.width * dtype.itemsize >= _TOLD_FROM:
            self._told(self.node.rank)[0] = 0 if own is None else self.node.shared_address(own)
            self.node.step(call)
            self._places = [int(self._told(rank)[0]) for rank in range(self.node.size)]
        self.is_direct = any(self._places)
        """Whether ranks read arrays of others where they are, so that these have to wait."""
        self.stages = own is not None and not self._places[self.node.rank]
        """Whether this rank stages its contribution."""

    def offer(self, part: Part) -> None:
        """Put a part of the contribution where the ranks of the node can read it."""
        if self.stages and self._own is not None:
            self.given(self.node.rank, part)[...] = self._own[:, part.columns]

    def given(self, rank: int, part: Part) -> NumpyArray:
        """Return what a rank of the node has offered of a part, `given` rows."""
        place = self._places[rank]
        shape = self.shape
        if place:
            nbytes = shape.given * shape.width * self._dtype.itemsize
            whole = self.node.heap_of(rank)[place - 1 : place - 1 + nbytes].view(self._dtype)
            return whole.reshape(shape.given, shape.width)[:, part.columns]
        return self._rows(rank, part, 0, shape.given)

    def made(self, rank: int, part: Part) -> NumpyArray:
        """Return what became of a part at a rank of the node, `made` rows."""
        return self._rows(rank, part, self.shape.given, self.shape.made)

    def _rows(self, rank: int, part: Part, first: int, rows: int) -> NumpyArray:
        row = part.items * self._dtype.itemsize
        memory = self._slot(rank, part.slot)[first * row : (first + rows) * row]
        return memory.view(self._dtype).reshape(rows, part.items)

    def _slot(self, rank: int, slot: int) -> NumpyArray:
        turn, half = divmod(slot, 2)
        return self.node.staged(rank, turn, STAGED_UP_TO)[half * _SLOT :][:_SLOT]

    def _told(self, rank: int) -> NumpyArray:
        return self._slot(rank, 0)[: _ADDRESS.itemsize].view(_ADDRESS)


class Steps:
    """One operation on this rank; the work of each part is told apart as in the module's text."""

    window: Window

    def begin(self, part: Part, lane: Lane) -> None:
        """Hand a part to the lane; on the ranks that have one."""
        raise NotImplementedError

    def end(self, part: Part) -> None:
        """Put what the lane has brought where the node reads it, if it is not there; likewise."""

    def take(self, part: Part) -> None:
        """Take this rank's result of a part."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return what the operation returns."""


def run_parts(context: MpiContext, nodes: Hierarchy, call: Collective, steps: Steps) -> Any:
    """Run one operation, on which all ranks of the group have agreed; return its result."""
    window, node = steps.window, nodes.node
    lane = (
        None
        if nodes.lane is None
        else Lane(nodes.lane, partial(finish, context, named(context, call)))
    )
    before: Part | None = None

    def end(part: Part) -> None:
        if lane is not None:
            lane.wait()
            steps.end(part)

    for part in window.shape.parts():
        window.offer(part)
        if before is not None:
            end(before)
        node.step(call)
        if lane is not None:
            steps.begin(part, lane)
        if before is not None:
            steps.take(before)
        before = part
    if before is not None:
        end(before)
        node.step(call)
        steps.take(before)
    if window.is_direct:
        node.step(call)
    return steps.result()
