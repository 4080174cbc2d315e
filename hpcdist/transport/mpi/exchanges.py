"""An exchange over MPI: boxes are packed, sent to whom they are for, and unpacked or combined.

Every rank knows how much comes from whom: that the ranks mean the same exchange is all they have
to agree on.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from hpcdist.transport.boxes import counts_per_rank, fill, packed, unpacked, view_of
from hpcdist.transport.call import Exchange
from hpcdist.transport.mpi.collectives import Range, alltoall_in_pairs, starts_of
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import INT_MAX
from hpcdist.transport.parts import cut


def exchange(host: MpiContext, call: Exchange, detail: Range) -> None:
    """Move the boxes of all ranks; a rank's own ones are taken from where they lie."""
    send = call.send
    if np.may_share_memory(send, call.recv):
        call = call._replace(send=send.copy())
    reads = [read for read in call.reads if read.rank != host.rank]
    gives = [give for give in call.gives if give.rank != host.rank]
    given = packed(call, gives)
    sent, received = (counts_per_rank(call, each, host.size) for each in (gives, reads))
    taken = np.empty(sum(received), call.recv.dtype)
    if detail[1] > INT_MAX:  # of some rank: more than one call of MPI counts
        alltoall_in_pairs(host, cut(given, sent), cut(taken, received))
    else:
        host.comm.Alltoallv(_spec(given, sent), _spec(taken, received))
    others = iter(unpacked(call, reads, taken))
    fill(
        call,
        [
            view_of(call.send, read.source) if read.rank == host.rank else next(others)
            for read in call.reads
        ],
    )


def _spec(flat: np.ndarray, counts: list[int]) -> list[object]:
    nbytes = [count * flat.itemsize for count in counts]
    return [flat, nbytes, starts_of(nbytes), MPI.BYTE]
