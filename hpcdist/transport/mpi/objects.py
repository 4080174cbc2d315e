"""Object collectives over MPI: parcels (pickles and their large buffers) instead of arrays.

The size of the largest pickle is known from the agreement. Small ones travel padded in one
collective; larger ones, and buffers, are broadcast or sent from where they lie to where they
stay, without ever being copied into a pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.pickled import EAGER, Pickled, empty_buffers
from hpcdist.transport.call.call import Objects
from hpcdist.transport.call.kinds import OPTIONAL, Family, Kind, table_for
from hpcdist.transport.mpi.boxes import exchange
from hpcdist.transport.mpi.collectives import Range, Verb
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import block, scattered
from hpcdist.transport.mpi.pickled import receive_pickled, send_pickled
from hpcdist.transport.mpi.tags import Tag


def broadcast_object_list(context: MpiContext, call: Objects, detail: Range) -> list[Pickled]:
    own = call.pickles[0] if context.rank == call.root else None
    return [_broadcast_pickled(context.comm, own, detail[1], call.root)]


def _broadcast_pickled(comm: MPI.Intracomm, own: Pickled | None, nbytes: int, root: int) -> Pickled:
    """Broadcast one pickle of `nbytes` in all; small ones have no buffers out of band."""
    length = nbytes
    if nbytes > EAGER:
        length = comm.bcast(None if own is None else len(own.meta), root)
    meta = bytearray(length) if own is None else own.meta
    comm.Bcast(block(meta, length), root)
    buffers = empty_buffers(meta) if own is None else own.buffers
    _broadcast_buffers(comm, buffers, root)
    return Pickled(meta, buffers)


def _broadcast_buffers(comm: MPI.Intracomm, buffers: Sequence[Any], root: int) -> None:
    if len(buffers) == 1:
        comm.Bcast(block(buffers[0], memoryview(buffers[0]).nbytes), root)
    elif buffers:
        message, datatype = scattered(list(buffers))
        comm.Bcast(message, root)
        datatype.Free()


def all_gather_object(context: MpiContext, call: Objects, detail: Range) -> list[Pickled]:
    own, longest, comm = call.pickles[0], detail[1], context.comm
    if longest <= EAGER:
        out = np.empty(longest * context.size, np.uint8)
        comm.Allgather(
            [own.meta.ljust(longest, b"\0"), longest, MPI.BYTE], [out, longest, MPI.BYTE]
        )
        return _cut(out, longest, context.size)
    return _exchange(context, [own] * context.size)


def gather_object(context: MpiContext, call: Objects, detail: Range) -> list[Pickled] | None:
    own, longest, comm, root = call.pickles[0], detail[1], context.comm, call.root
    if longest <= EAGER:
        padded = [own.meta.ljust(longest, b"\0"), longest, MPI.BYTE]
        if context.rank != root:
            comm.Gather(padded, None, root)
            return None
        out = np.empty(longest * context.size, np.uint8)
        comm.Gather(padded, [out, longest, MPI.BYTE], root)
        return _cut(out, longest, context.size)
    if context.rank != root:
        MPI.Request.Waitall(send_pickled(comm, own, root, Tag.PICKLED))
        return None
    return [
        own.copy() if rank == root else receive_pickled(comm, rank, Tag.PICKLED)
        for rank in range(context.size)
    ]


def scatter_object_list(context: MpiContext, call: Objects, detail: Range) -> list[Pickled]:
    longest, comm, root = detail[1], context.comm, call.root
    if longest <= EAGER:
        mine = np.empty(longest, np.uint8)
        sent = None
        if context.rank == root:
            joined = b"".join(pickled.meta.ljust(longest, b"\0") for pickled in call.pickles)
            sent = [joined, longest, MPI.BYTE]
        comm.Scatter(sent, [mine, longest, MPI.BYTE], root)
        return _cut(mine, longest, 1)
    if context.rank != root:
        return [receive_pickled(comm, root, Tag.PICKLED)]
    requests = [
        request
        for rank, pickled in enumerate(call.pickles)
        if rank != root
        for request in send_pickled(comm, pickled, rank, Tag.PICKLED)
    ]
    MPI.Request.Waitall(requests)
    return [call.pickles[root].copy()]


def all_to_all_object(context: MpiContext, call: Objects, detail: Range) -> list[Pickled]:
    longest, comm, size = detail[1], context.comm, context.size
    if longest <= EAGER:
        joined = b"".join(pickled.meta.ljust(longest, b"\0") for pickled in call.pickles)
        out = np.empty(longest * size, np.uint8)
        comm.Alltoall([joined, longest, MPI.BYTE], [out, longest, MPI.BYTE])
        return _cut(out, longest, size)
    return _exchange(context, call.pickles)


def _exchange(context: MpiContext, pickles: Sequence[Pickled]) -> list[Pickled]:
    """Send pickle j to rank j and receive one from every rank, each from and to its place."""
    requests = []
    for step in range(1, context.size):
        to = (context.rank + step) % context.size
        requests += send_pickled(context.comm, pickles[to], to, Tag.PICKLED)
    received = {context.rank: pickles[context.rank].copy()}
    for step in range(1, context.size):
        source = (context.rank - step) % context.size
        received[source] = receive_pickled(context.comm, source, Tag.PICKLED)
    MPI.Request.Waitall(requests)
    return [received[rank] for rank in range(context.size)]


def _cut(padded: Any, longest: int, count: int) -> list[Pickled]:
    """Cut padded pickles apart; pickle ignores what follows its end."""
    view = memoryview(padded)
    return [Pickled(view[start : start + longest]) for start in range(0, count * longest, longest)]


_ROWS: dict[Kind, Verb] = {
    Kind.EXCHANGE: exchange,
    Kind.BROADCAST_OBJECT_LIST: broadcast_object_list,
    Kind.ALL_GATHER_OBJECT: all_gather_object,
    Kind.GATHER_OBJECT: gather_object,
    Kind.SCATTER_OBJECT_LIST: scatter_object_list,
    Kind.ALL_TO_ALL_OBJECT: all_to_all_object,
}
OBJECT_VERBS = table_for("OBJECT_VERBS", OPTIONAL | {Family.OBJECTS}, _ROWS)
