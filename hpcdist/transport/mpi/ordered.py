"""Reductions over MPI in the order of the ranks: the bits that shared memory gives, too.

MPI recommends that equal calls have equal results, and promises it for no two layouts, algorithms
or libraries (MPI-4.1, 6.9.1). So with ``HPCDIST_REDUCTIONS=ordered`` it only moves: each rank owns
a share, gets what all others have of it, combines that rank after rank, and the shares are put
together. Each byte travels as often as in a ring (Rabenseifner, "Optimization of collective
reduction operations", 2004, section 2). Large arrays of ranks that are numbered node by node go by
the nodes instead (`hierarchical/reductions.py`), which takes less.
"""

from __future__ import annotations

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.config import Config
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import Combine, ReductionRule
from hpcdist.transport.call.runs import contribution, pieces
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import block, of_items, starts_of
from hpcdist.transport.shm.kernel import combine_rows

_AT_ONCE = 64 << 20
"""Bytes that are reduced at a time, which as many again are needed for."""

_SMALL = 128 << 10
"""Bytes of all ranks up to which every rank combines all, in one step instead of two."""

_IN_ORDER = {Combine.ADD, Combine.MULTIPLY}


def keeps_order(config: Config, rule: ReductionRule) -> bool:
    """Return whether a rank is to combine what all have, in their order: MPI's order would count.

    So it is for an exact sum, which MPI has not.
    """
    in_order = config.reductions == "ordered" and rule.combine in _IN_ORDER
    return rule.combine is Combine.EXACT_SUM or (in_order and rule.wire.kind in "fc")


def reduce_in_order(context: MpiContext, call: Reduction) -> None:
    """Run a reduction of floating-point numbers; `keeps_order` says of which."""
    if call.kind is Kind.REDUCE_SCATTER:
        _reduce_scatter(context, call)
        return
    reduce = _scan if call.kind in (Kind.SCAN, Kind.EXSCAN) else _reduce
    for part in pieces(call.recv, _AT_ONCE):
        reduce(context, call, part)


def _reduce(context: MpiContext, call: Reduction, part: NumpyArray) -> None:
    """Reduce to all ranks, or to the root."""
    to_all, here = call.kind is Kind.ALL_REDUCE, context.rank == call.root
    if part.nbytes * context.size <= _SMALL:
        room = np.empty_like(part, shape=(context.size, part.size))
        context.comm.Allgather(block(part, part.nbytes), block(room, part.nbytes))
        if to_all or here:
            _combine(context, call, room, part)
        return
    counts, datatype = _shares(part.size, context.size), of_items(part.itemsize)
    rows = _exchanged(context, part, counts)
    share = _combine(context, call, rows, rows[0])
    whole, own = [part, counts, starts_of(counts), datatype], [share, share.size, datatype]
    if to_all:
        context.comm.Allgatherv(own, whole)
    else:
        context.comm.Gatherv(own, whole if here else None, call.root)


def _reduce_scatter(context: MpiContext, call: Reduction) -> None:
    flat, out = contribution(call), call.recv.reshape(-1)
    counts = [out.size] * context.size if call.counts is None else list(call.counts[0])
    _combine(context, call, _exchanged(context, flat, counts), out)


def _scan(context: MpiContext, call: Reduction, part: NumpyArray) -> None:
    """Reduce over the ranks before this one, and itself where `call` says so."""
    counts, datatype = _shares(part.size, context.size), of_items(part.itemsize)
    rows = _exchanged(context, part, counts)
    for ranks in range(context.size, 0, -1):
        _combine(context, call, rows[:ranks], rows[ranks - 1])
    found, own = np.empty_like(part), [rows.shape[1]] * context.size
    if call.kind is Kind.EXSCAN:
        rows = np.roll(rows, 1, 0)
    context.comm.Alltoallv(
        [rows, own, starts_of(own), datatype], [found, counts, starts_of(counts), datatype]
    )
    if call.kind is Kind.SCAN or context.rank:  # the first rank of an exscan keeps what it has
        part[...] = found


def _exchanged(context: MpiContext, flat: NumpyArray, counts: list[int]) -> NumpyArray:
    """Return what all ranks have of this one's share, a row for each rank."""
    own, datatype = counts[context.rank], of_items(flat.itemsize)
    room = np.empty_like(flat, shape=(context.size, own))
    into = [own] * context.size
    context.comm.Alltoallv(
        [flat, counts, starts_of(counts), datatype], [room, into, starts_of(into), datatype]
    )
    return room


def _combine(context: MpiContext, call: Reduction, rows: NumpyArray, out: NumpyArray) -> NumpyArray:
    """Combine rows of ranks into an array, which may be one of them, and return it."""
    compiles = context.site.config.kernel != "never" and type(rows) is np.ndarray
    combine_rows(call, rows, out, compiles=compiles)
    return out


def _shares(items: int, size: int) -> list[int]:
    """Return how many items each rank owns."""
    return [items // size + (rank < items % size) for rank in range(size)]
