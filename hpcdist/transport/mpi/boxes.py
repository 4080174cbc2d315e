"""An exchange over MPI: boxes are packed, sent to whom they are for, and unpacked or combined.

Every rank knows how much comes from whom: that the ranks mean the same exchange is all they have
to agree on. Where the boxes for the ranks are runs of memory they are sent, or received, there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.boxes import Slices
from hpcdist.errors import TransportError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Exchange, Read, refused
from hpcdist.transport.call.runs import cut
from hpcdist.transport.mpi.collectives import Range, alltoall_in_pairs
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import INT_MAX, Spec
from hpcdist.transport.shm.boxes import counts_per_rank, fill, packed, unpacked, view_of
from hpcdist.transport.shm.kernel import address_of

T = TypeVar("T")

CHECKED_FROM = 64 << 10
"""Bytes that a rank gives or takes from which on the ranks agree that all have memory for them."""


class _Runs(NamedTuple):
    """What is sent to, or received from, each rank: runs of `memory`."""

    memory: NumpyArray
    of_ranks: Sequence[NumpyArray]

    def spec(self) -> Spec:
        start = address_of(self.memory)
        counts = [run.nbytes for run in self.of_ranks]
        places = [address_of(run) - start if run.nbytes else 0 for run in self.of_ranks]
        return [self.memory, counts, places, MPI.BYTE]


class _Ready(NamedTuple):
    """What a rank has prepared: memory for what goes to and comes from others."""

    send: NumpyArray
    given: _Runs
    taken: _Runs
    in_place: bool
    """Whether what comes is where it belongs; otherwise it is unpacked then."""


def exchange(context: MpiContext, call: Exchange, detail: Range) -> None:
    """Move the boxes of all ranks; a rank's own ones are taken from where they lie."""
    own = [read for read in call.reads if read.rank == context.rank]
    reads = [read for read in call.reads if read.rank != context.rank]

    def prepare() -> _Ready:
        return _prepared(context, call, reads)

    ready = on_all_ranks(context, call, prepare) if detail[1] >= CHECKED_FROM else prepare()
    call = call._replace(send=ready.send)
    _move(context, ready.given, ready.taken, detail)
    if ready.in_place:
        fill(call._replace(reads=own), [view_of(call.send, read.source) for read in own])
        return
    others = iter(unpacked(call, reads, ready.taken.memory))
    fill(
        call,
        [
            view_of(call.send, read.source) if read.rank == context.rank else next(others)
            for read in call.reads
        ],
    )


def on_all_ranks(context: MpiContext, call: Exchange, prepare: Callable[[], T]) -> T:
    """Return what `prepare` makes; where it fails on a rank, fail on all. Agrees once more."""
    try:
        ready = prepare()
    except Exception as error:  # no memory, or a warning that the program makes an error
        reason = TransportError(f"an array cannot be copied for other ranks: {error}")
        reason.__cause__ = error
        context.agree(refused(call, reason))
        raise reason from error
    context.agree(call, enters=True)
    return ready


def _prepared(context: MpiContext, call: Exchange, reads: Sequence[Read]) -> _Ready:
    send = call.send
    if np.may_share_memory(send, call.recv):
        send = send.copy()
        call = call._replace(send=send)
    gives = [give for give in call.gives if give.rank != context.rank]
    runs = in_place(send, [(give.rank, give.source) for give in gives], context.size)
    given = _Runs(send, runs or [])
    if runs is None:
        flat = packed(call, gives)
        given = _Runs(flat, cut(flat, counts_per_rank(call, gives, context.size)))
    runs = None
    if call.rule is None:
        runs = in_place(call.recv, [(read.rank, read.target) for read in reads], context.size)
    if runs is not None:
        return _Ready(send, given, _Runs(call.recv, runs), in_place=True)
    counts = counts_per_rank(call, reads, context.size)
    flat = np.empty(sum(counts), call.recv.dtype)
    return _Ready(send, given, _Runs(flat, cut(flat, counts)), in_place=False)


def _move(context: MpiContext, given: _Runs, taken: _Runs, detail: Range) -> None:
    if detail[1] > INT_MAX:  # of some rank: more than one call of MPI counts
        alltoall_in_pairs(context, given.of_ranks, taken.of_ranks)
    elif detail[1]:
        context.comm.Alltoallv(given.spec(), taken.spec())


def in_place(
    array: NumpyArray, boxes: Sequence[tuple[int, Slices]], size: int
) -> list[NumpyArray] | None:
    """Return boxes where they lie; None where a rank has several, or one that is no run."""
    runs = [array.reshape(-1)[:0]] * size
    for rank, box in boxes:
        view = view_of(array, box)
        if runs[rank].size or not view.flags.c_contiguous:
            return None
        runs[rank] = view.reshape(-1)
    return runs if array.nbytes <= INT_MAX else None
