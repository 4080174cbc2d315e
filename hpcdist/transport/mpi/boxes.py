"""An exchange over MPI: boxes are packed, sent to whom they are for, and unpacked or combined.

Every rank knows how much comes from whom: that the ranks mean the same exchange is all they have
to agree on. Where the boxes for the ranks are runs of memory they are sent, or received, there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.boxes import counts_per_rank, fill, packed, unpacked, view_of
from hpcdist.transport.call import Box, Exchange
from hpcdist.transport.kernel import address_of
from hpcdist.transport.mpi.collectives import Range, alltoall_in_pairs
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import INT_MAX, Spec
from hpcdist.transport.parts import cut


class _Runs(NamedTuple):
    """What is sent to, or received from, each rank: runs of `memory`."""

    memory: NumpyArray
    of_ranks: Sequence[NumpyArray]

    def spec(self) -> Spec:
        start = address_of(self.memory)
        counts = [run.nbytes for run in self.of_ranks]
        places = [address_of(run) - start if run.nbytes else 0 for run in self.of_ranks]
        return [self.memory, counts, places, MPI.BYTE]


def exchange(host: MpiContext, call: Exchange, detail: Range) -> None:
    """Move the boxes of all ranks; a rank's own ones are taken from where they lie."""
    if np.may_share_memory(call.send, call.recv):
        call = call._replace(send=call.send.copy())
    own = [read for read in call.reads if read.rank == host.rank]
    reads = [read for read in call.reads if read.rank != host.rank]
    gives = [give for give in call.gives if give.rank != host.rank]
    given = _in_place(call.send, [(give.rank, give.source) for give in gives], host.size)
    if given is None:
        flat = packed(call, gives)
        given = _Runs(flat, cut(flat, counts_per_rank(call, gives, host.size)))
    taken = None
    if call.rule is None:
        taken = _in_place(call.recv, [(read.rank, read.target) for read in reads], host.size)
    if taken is not None:
        _move(host, given, taken, detail)
        fill(call._replace(reads=own), [view_of(call.send, read.source) for read in own])
        return
    counts = counts_per_rank(call, reads, host.size)
    flat = np.empty(sum(counts), call.recv.dtype)
    _move(host, given, _Runs(flat, cut(flat, counts)), detail)
    others = iter(unpacked(call, reads, flat))
    fill(
        call,
        [
            view_of(call.send, read.source) if read.rank == host.rank else next(others)
            for read in call.reads
        ],
    )


def _move(host: MpiContext, given: _Runs, taken: _Runs, detail: Range) -> None:
    if detail[1] > INT_MAX:  # of some rank: more than one call of MPI counts
        alltoall_in_pairs(host, given.of_ranks, taken.of_ranks)
    elif detail[1]:
        host.comm.Alltoallv(given.spec(), taken.spec())


def _in_place(array: NumpyArray, boxes: Sequence[tuple[int, Box]], size: int) -> _Runs | None:
    """Return boxes where they lie; None where a rank has several, or one that is no run."""
    runs = [array.reshape(-1)[:0]] * size
    for rank, box in boxes:
        view = view_of(array, box)
        if runs[rank].size or not view.flags.c_contiguous:
            return None
        runs[rank] = view.reshape(-1)
    return _Runs(array, runs) if array.nbytes <= INT_MAX else None
