"""`PlanSlots`: plans of small operations through the memory that the ranks of a node share.

Each rank has a slot for each plan, in its heap, which all ranks see. A `SharedRequest`
(`shm/native/plan_slots.c`) is used like a persistent request of MPI, and needs no agreement: the
ranks have agreed when the plan was made.

[Note: plan slots] A rank gives a slot back when it has taken what the last start has brought;
others may still be reading there. So slots are taken together: one that all ranks have given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import AnyArrays, Barrier, Collective, Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.shm.control import LINE, PAYLOAD, SPINS
from hpcdist.transport.shm.kernel import address_of, code_of, compiled, divisor_of
from hpcdist.transport.shm.node import SharedNode

_SLOT = LINE + 2 * PAYLOAD
_IN_POOL = 16
_WORD = np.dtype(np.int64)
_ALL_FREE = (1 << _IN_POOL) - 1


class Steps(NamedTuple):
    """What a rank gives and takes; see `planned_t` in `shm/native/hot.h`."""

    given: Sequence[NumpyArray]
    taken: Sequence[NumpyArray]
    part: int
    first: int = 0
    source: int = -1


def steps_of(call: Collective, rank: int, size: int) -> Steps | None:
    """Return what a rank does in a small operation; None where that is not for slots."""
    if call.finish is not None or call.ended is not None or call.begin is not None:
        return None
    if isinstance(call, Barrier):
        return Steps((), (), 0) if call.device is None else None
    if not isinstance(call, AnyArrays) or call.device is not None or call.kind not in _STEPS:
        return None
    if isinstance(call, Reduction) and code_of(call) is None:
        return None
    if call.counts is not None and call.kind is not Kind.ALLTOALL:
        return None
    steps: Steps = _STEPS[call.kind](call, rank, size)
    inside = sum(each.nbytes for each in steps.given) <= PAYLOAD
    return steps if inside and steps.first + steps.part <= PAYLOAD else None


def _all_reduce(call: Any, rank: int, size: int) -> Steps:
    return Steps((call.recv,), (call.recv,), call.recv.nbytes)


def _reduce(call: Any, rank: int, size: int) -> Steps:
    taken = (call.recv,) if rank == call.root else ()
    return Steps((call.recv,), taken, call.recv.nbytes)


def _reduce_scatter(call: Any, rank: int, size: int) -> Steps:
    part = call.recv.nbytes
    return Steps(call.sends or (call.send,), (call.recv,), part, rank * part)


def _broadcast(call: Any, rank: int, size: int) -> Steps:
    at_root = rank == call.root
    given, taken = ((call.recv,), ()) if at_root else ((), (call.recv,))
    return Steps(given, taken, call.recv.nbytes, 0, call.root)


def _all_gather(call: Any, rank: int, size: int) -> Steps:
    return Steps((call.send,), call.receives or (call.recv,), call.send.nbytes)


def _gather(call: Any, rank: int, size: int) -> Steps:
    taken = (call.receives or (call.recv,)) if rank == call.root else ()
    return Steps((call.send,), taken, call.send.nbytes)


def _scatter(call: Any, rank: int, size: int) -> Steps:
    part, given = call.recv.nbytes, call.sends or (call.send,)
    at_root = rank == call.root
    return Steps(given if at_root else (), (call.recv,), part, rank * part, call.root)


def _alltoall(call: Any, rank: int, size: int) -> Steps:
    given = call.sends or (call.send,)
    part = sum(each.nbytes for each in given) // size
    return Steps(given, call.receives or (call.recv,), part, rank * part)


_STEPS = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_GATHER: _all_gather,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALLTOALL: _alltoall,
}


@final
class PlanSlots:
    """The slots of one group on one node, of which this rank's are in its heap."""

    def __init__(self, comm: MPI.Intracomm, node: SharedNode) -> None:
        self._comm, self._node = comm, node
        self._pools: list[tuple[NumpyArray, tuple[int, ...]]] = []
        """Of each pool this rank's memory, and where that of each rank lies."""
        self._free = 0

    def take(self) -> int | None:
        """Return a slot that is free on all ranks, None where there is no memory. Collective."""
        free = self._comm.allreduce(self._free, MPI.BAND)
        if not free:
            memory = self._node.heap.empty(_IN_POOL * _SLOT)
            place = -1 if memory is None else self._node.heap.offset_of(memory)
            places = self._comm.allgather(place)
            if memory is None or min(places) < 0:
                return None
            first = len(self._pools) * _IN_POOL
            bases = tuple(base + at for base, at in zip(self._node.bases, places, strict=True))
            self._pools.append((memory, bases))
            free = _ALL_FREE << first
            self._free |= free
        slot: int = (free & -free).bit_length() - 1
        self._free &= ~(1 << slot)
        self._own(slot).view(_WORD)[0] = 0
        self._comm.Barrier()  # nobody starts before all numbers are 0
        return slot

    def give_back(self, slot: int) -> None:
        """Let a slot be taken again; see [Note: plan slots]. Local."""
        self._free |= 1 << slot

    def request(self, slot: int, call: Collective, steps: Steps) -> Any:
        """Return what starts a planned operation; its arrays have to be kept alive."""
        code = code_of(call) if isinstance(call, Reduction) else None
        nbytes = steps.given[0].nbytes if steps.given else 0
        pool, place = divmod(slot, _IN_POOL)
        return compiled.SharedRequest(
            tuple(base + place * _SLOT for base in self._pools[pool][1]),
            self._node.rank,
            PAYLOAD,
            tuple(map(address_of, steps.given)),
            nbytes,
            tuple(map(address_of, steps.taken)),
            steps.part,
            steps.first,
            steps.source,
            None if code is None else code.number,
            divisor_of(call, self._node.size) if isinstance(call, Reduction) else 1.0,
            SPINS,
        )

    def _own(self, slot: int) -> NumpyArray:
        pool, place = divmod(slot, _IN_POOL)
        return self._pools[pool][0][place * _SLOT : (place + 1) * _SLOT]
