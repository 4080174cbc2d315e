"""What travels along with the agreement of few ranks that share no memory; see `exchange.Slots`.

A rank offers its data before it knows the others'; whether they are taken, the agreement tells:
where they are not alike, or an object is longer, they travel once more by MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from hpcdist.arrays.pickled import Pickled
from hpcdist.transport.call.call import AnyArrays, Collective, Objects
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi.agreement import Agreement
from hpcdist.transport.mpi.exchange import ROOM, Slots
from hpcdist.transport.shm.collectives import SHARED, Range, fits, take_copies
from hpcdist.transport.shm.control import control_block_bytes
from hpcdist.transport.shm.hot import Tally, is_here
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.waiting.queue import CollectiveQueue

AGREED = 5
"""The state of an operation on which the hot path has agreed in slots; see `hot_slots.c`."""

_FROM_ROOT, _TO_ROOT = Kind.BROADCAST_OBJECT_LIST, Kind.GATHER_OBJECT
_OBJECTS = frozenset({_FROM_ROOT, _TO_ROOT, Kind.ALL_GATHER_OBJECT})


def open_hot(
    slots: Slots, ranks: Sequence[int], agreement: Agreement, queue: CollectiveQueue
) -> Tally | None:
    """Return what a group with slots has for the hot path, or None where that cannot be used.

    Args:
        slots: in which small data travel.
        ranks: the world rank of each of its ranks.
        agreement: that of the group, which counts in what is returned from now on.
        queue: where its operations take their turn.

    """
    if slots.wire is None or not is_here():
        return None
    memory = np.zeros(control_block_bytes(slots.size), np.uint8)
    control = compiled.ControlBlock(memory, slots.rank, slots.size, ROOM)
    control.most_eager = 0
    hot = compiled.Hot(control, tuple(ranks), queue.queued, queue.turn)
    hot.learn_slots(*slots.wire, agreement.clock_ns, agreement.under_way)
    agreement.count_in(hot)
    return cast(Tally, hot)


def offered(slots: Slots, call: Collective) -> Any:
    """Return the array of this rank that travels along; None if it has none."""
    if _is_few(call, slots):
        return SHARED[call.kind].offered(call, slots.rank)
    if not _is_object(call) or call.detail > ROOM or not call.pickles:
        return None
    return np.frombuffer(call.pickles[0].meta, np.uint8)


def came_along(slots: Slots, call: Collective, detail: Range) -> bool:
    """Return, after the agreement, whether all that `call` needs has come."""
    if _is_few(call, slots):
        return fits(call, detail)
    return _is_object(call) and detail[1] <= ROOM


def take(slots: Slots, call: Any) -> Any:
    """Return the result of `call`, for which all has come along."""
    if not isinstance(call, Objects):
        return take_copies(slots, call, slots.places)
    if call.kind is _TO_ROOT and call.root != slots.rank:
        return None
    senders = [call.root] if call.kind is _FROM_ROOT else range(slots.size)
    # pickle ignores what follows its end
    return [
        Pickled(slots.places[rank].view(ROOM, np.dtype(np.uint8)).tobytes()) for rank in senders
    ]


def _is_few(call: Collective, slots: Slots) -> TypeGuard[AnyArrays]:
    return isinstance(call, AnyArrays) and SHARED[call.kind].total(call, slots.size) <= ROOM


def _is_object(call: Collective) -> TypeGuard[Objects]:
    return isinstance(call, Objects) and call.kind in _OBJECTS
