"""Pickled objects as messages: the pickle, then its large buffers, from and to where they lie."""

from __future__ import annotations

from mpi4py import MPI

from hpcdist.arrays.pickled import Pickled, empty_buffers
from hpcdist.transport.mpi.datatypes import block, scattered


def send_pickled(comm: MPI.Intracomm, pickled: Pickled, to: int, tag: int) -> list[MPI.Request]:
    """Begin to send `pickled`: its meta, then its buffers as one message."""
    requests = [comm.Isend(block(pickled.meta, len(pickled.meta)), to, tag)]
    if pickled.buffers:
        requests.append(send_buffers(comm, pickled, to, tag))
    return requests


def send_buffers(comm: MPI.Intracomm, pickled: Pickled, to: int, tag: int) -> MPI.Request:
    """Begin to send the buffers of `pickled` as one message."""
    message, datatype = scattered(list(pickled.buffers))
    request = comm.Isend(message, to, tag)
    datatype.Free()
    return request


def receive_pickled(comm: MPI.Intracomm, source: int, tag: int) -> Pickled:
    """Receive the next pickle from `source`."""
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
    return Pickled(meta, buffers)
