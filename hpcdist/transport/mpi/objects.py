"""Object collectives over MPI: parcels (pickles and their large buffers) instead of arrays.

The size of the largest parcel is known from the agreement. Small ones travel padded in one
collective; larger ones, and buffers, are broadcast or sent from where they lie to where they
stay, without ever being copied into a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.pickled import EAGER, Parcel, empty_buffers
from hpcdist.transport.call import Call, Kind
from hpcdist.transport.mpi.collectives import VERBS, Range
from hpcdist.transport.mpi.datatypes import block, scattered

if TYPE_CHECKING:
    from hpcdist.transport.mpi.transport import MpiHost

_PARCEL = 6


def broadcast_object_list(host: MpiHost, call: Call, detail: Range) -> list[Parcel]:
    own = call.parcels[0] if host.rank == call.root else None
    return [_broadcast_parcel(host.comm, own, detail[1], call.root)]


def _broadcast_parcel(comm: MPI.Intracomm, own: Parcel | None, nbytes: int, root: int) -> Parcel:
    """Broadcast one parcel of `nbytes` in all; small ones are a pickle and nothing else."""
    length = nbytes
    if nbytes > EAGER:
        length = comm.bcast(None if own is None else len(own.meta), root)
    meta = bytearray(length) if own is None else own.meta
    comm.Bcast(block(meta, length), root)
    buffers = empty_buffers(meta) if own is None else own.buffers
    _broadcast_buffers(comm, buffers, root)
    return Parcel(meta, buffers)


def _broadcast_buffers(comm: MPI.Intracomm, buffers: Sequence[Any], root: int) -> None:
    if len(buffers) == 1:
        comm.Bcast(block(buffers[0], memoryview(buffers[0]).nbytes), root)
    elif buffers:
        message, datatype = scattered(list(buffers))
        comm.Bcast(message, root)
        datatype.Free()


def all_gather_object(host: MpiHost, call: Call, detail: Range) -> list[Parcel]:
    own, longest, comm = call.parcels[0], detail[1], host.comm
    if longest <= EAGER:
        out = np.empty(longest * host.size, np.uint8)
        comm.Allgather(
            [own.meta.ljust(longest, b"\0"), longest, MPI.BYTE], [out, longest, MPI.BYTE]
        )
        return _cut(out, longest, host.size)
    return _exchange(host, [own] * host.size)


def gather_object(host: MpiHost, call: Call, detail: Range) -> list[Parcel] | None:
    own, longest, comm, root = call.parcels[0], detail[1], host.comm, call.root
    if longest <= EAGER:
        padded = [own.meta.ljust(longest, b"\0"), longest, MPI.BYTE]
        if host.rank != root:
            comm.Gather(padded, None, root)
            return None
        out = np.empty(longest * host.size, np.uint8)
        comm.Gather(padded, [out, longest, MPI.BYTE], root)
        return _cut(out, longest, host.size)
    if host.rank != root:
        MPI.Request.Waitall(send_parcel(comm, own, root, _PARCEL))
        return None
    return [
        own.copy() if rank == root else receive_parcel(comm, rank, _PARCEL)
        for rank in range(host.size)
    ]


def scatter_object_list(host: MpiHost, call: Call, detail: Range) -> list[Parcel]:
    longest, comm, root = detail[1], host.comm, call.root
    if longest <= EAGER:
        mine = np.empty(longest, np.uint8)
        sent = None
        if host.rank == root:
            joined = b"".join(parcel.meta.ljust(longest, b"\0") for parcel in call.parcels)
            sent = [joined, longest, MPI.BYTE]
        comm.Scatter(sent, [mine, longest, MPI.BYTE], root)
        return _cut(mine, longest, 1)
    if host.rank != root:
        return [receive_parcel(comm, root, _PARCEL)]
    requests = [
        request
        for rank, parcel in enumerate(call.parcels)
        if rank != root
        for request in send_parcel(comm, parcel, rank, _PARCEL)
    ]
    MPI.Request.Waitall(requests)
    return [call.parcels[root].copy()]


def all_to_all_object(host: MpiHost, call: Call, detail: Range) -> list[Parcel]:
    longest, comm, size = detail[1], host.comm, host.size
    if longest <= EAGER:
        joined = b"".join(parcel.meta.ljust(longest, b"\0") for parcel in call.parcels)
        out = np.empty(longest * size, np.uint8)
        comm.Alltoall([joined, longest, MPI.BYTE], [out, longest, MPI.BYTE])
        return _cut(out, longest, size)
    return _exchange(host, call.parcels)


def _exchange(host: MpiHost, parcels: Sequence[Parcel]) -> list[Parcel]:
    """Send parcel j to rank j and receive one from every rank, each from and to its place."""
    requests = []
    for step in range(1, host.size):
        to = (host.rank + step) % host.size
        requests += send_parcel(host.comm, parcels[to], to, _PARCEL)
    received = {host.rank: parcels[host.rank].copy()}
    for step in range(1, host.size):
        source = (host.rank - step) % host.size
        received[source] = receive_parcel(host.comm, source, _PARCEL)
    MPI.Request.Waitall(requests)
    return [received[rank] for rank in range(host.size)]


def _cut(padded: Any, longest: int, count: int) -> list[Parcel]:
    """Cut padded pickles apart; pickle ignores what follows its end."""
    view = memoryview(padded)
    return [Parcel(view[start : start + longest]) for start in range(0, count * longest, longest)]


def send_parcel(comm: MPI.Intracomm, parcel: Parcel, to: int, tag: int) -> list[MPI.Request]:
    """Begin to send `parcel`: its meta, then its buffers as one message."""
    requests = [comm.Isend(block(parcel.meta, len(parcel.meta)), to, tag)]
    if parcel.buffers:
        message, datatype = scattered(list(parcel.buffers))
        requests.append(comm.Isend(message, to, tag))
        datatype.Free()
    return requests


def receive_parcel(comm: MPI.Intracomm, source: int, tag: int) -> Parcel:
    """Receive the next parcel from `source`."""
    status = MPI.Status()
    message = comm.Mprobe(source, tag, status)
    nbytes = status.Get_elements(MPI.BYTE)
    meta = bytearray(nbytes)
    message.Recv(block(meta, nbytes))
    buffers = empty_buffers(meta)
    if buffers:
        spec, datatype = scattered(list(buffers))
        comm.Recv(spec, source, tag)
        datatype.Free()
    return Parcel(meta, buffers)


OBJECT_VERBS: dict[Kind, Callable[[MpiHost, Call, Range], Any]] = {
    **VERBS,
    Kind.BROADCAST_OBJECT_LIST: broadcast_object_list,
    Kind.ALL_GATHER_OBJECT: all_gather_object,
    Kind.GATHER_OBJECT: gather_object,
    Kind.SCATTER_OBJECT_LIST: scatter_object_list,
    Kind.ALL_TO_ALL_OBJECT: all_to_all_object,
}
