"""How a collective of several nodes goes on: part by part, the lanes at work beside the node.

The contribution of a rank is a matrix of so many rows (one, or one for each rank of the group), and
a part is a range of its columns, the same on all ranks. Between two meetings of a node's ranks the
lanes carry two parts, of which the first may wait for what other nodes send, while its ranks copy
what came before and offer what comes next:

    offer 0 | begin 0, offer 1 | begin 1, offer 2, end 0 | begin 2, take 0, offer 3, end 1 | ...

Where parts go from node to node, more of them are under way, so that every node is busy.

[Note: slots] A rank has four slots of staging memory or more, used in turn: part k is offered
before the k-th meeting, and with d parts under way, what became of it is taken after the one with
the number k + d, before the one that follows. So d + 2 are in use. The first of all holds addresses
until the last slot but one has been offered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Collective
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.early import keep_for_ever
from hpcdist.transport.mpi.hierarchical.lanes import Lane
from hpcdist.transport.mpi.hierarchical.nodes import Hierarchy
from hpcdist.transport.mpi.patience import finish_when
from hpcdist.transport.tuning import STAGED_UP_TO

_TURNS, _STAGED = 2, STAGED_UP_TO
_SLOTS = 4
_UNDER_WAY = _SLOTS - 2
_MOST_SLOTS = 16
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

    Rows that a rank gives, rows of what becomes of them at a rank, columns, bytes of an element,
    and how many parts are under way at a time; see [Note: slots].
    """

    given: int
    made: int
    width: int
    itemsize: int
    under_way: int = _UNDER_WAY

    @property
    def slots(self) -> int:
        """The slots of a rank."""
        return max(_SLOTS, self.under_way + 2)

    @property
    def slot_bytes(self) -> int:
        """The bytes of each slot."""
        return _STAGED * _TURNS // self.slots

    @property
    def step(self) -> int:
        """The columns of a part; 0 where not even a cache line of each row fits into a slot."""
        line = max(1, _LINE // self.itemsize)
        return self.slot_bytes // ((self.given + self.made) * self.itemsize) // line * line

    def parts(self) -> Iterator[Part]:
        """Cut the columns into parts that fit into the slots."""
        for number, first in enumerate(range(0, self.width, self.step)):
            yield Part((number + 1) % self.slots, first, min(self.step, self.width - first))


def under_way_in_turn(nodes: int) -> int:
    """Return how many parts are to be under way that go from node to node, and back at once."""
    slots = 1 << (nodes + 2).bit_length()
    return min(slots, _MOST_SLOTS) - 2


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
        turn, place = divmod(slot, self.shape.slots // _TURNS)
        nbytes = self.shape.slot_bytes
        return self.node.staged(rank, turn, _STAGED)[place * nbytes :][:nbytes]

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
    lane: Lane | None = None
    if nodes.lane is not None:
        lane = Lane(nodes.lane, partial(finish_when, context, context.named(call)))
    under_way: deque[Part] = deque()

    def meet(part: Part | None, ended: Part | None) -> None:
        """End a part, which is taken after the meeting; and begin one there."""
        if lane is not None and ended is not None:
            lane.wait()
            steps.end(ended)
        node.step(call)
        if lane is not None and part is not None:
            steps.begin(part, lane)
        if ended is not None:
            steps.take(ended)

    try:
        for part in window.shape.parts():
            window.offer(part)
            is_full = len(under_way) == window.shape.under_way
            meet(part, under_way.popleft() if is_full else None)
            under_way.append(part)
        for part in under_way:
            meet(None, part)
        if window.is_direct:
            node.step(call)
    except BaseException:
        keep_for_ever([lane, steps, call])  # MPI may still use their memory
        raise
    return steps.result()
