"""Reductions over MPI in the order of the ranks: the bits that shared memory gives, too.

MPI recommends that equal calls have equal results, and promises it for no two layouts, algorithms
or libraries (MPI-4.1, 6.9.1). So with ``HPCDIST_REDUCTIONS=ordered`` it only moves: each rank owns
a share, gets what all others have of it, combines that rank after rank, and the shares are put
together. Each byte travels as often as in a ring (Rabenseifner, "Optimization of collective
reduction operations", 2004, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.config import Config
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import UFUNCS, Combine, ReductionRule
from hpcdist.transport.call.runs import contribution
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import TYPES, numbers, starts_of

_AT_ONCE = 64 << 20
"""Bytes that are reduced at a time, which as many again are needed for."""

_SMALL = 4 << 10
"""Bytes up to which every rank combines all, in one step instead of two."""

_IN_ORDER = {Combine.ADD, Combine.MULTIPLY}


def keeps_order(config: Config, rule: ReductionRule) -> bool:
    """Return whether a reduction is to be computed in the order of the ranks, and has one."""
    return config.reductions == "ordered" and rule.combine in _IN_ORDER and rule.wire.kind in "fc"


def reduce_in_order(context: MpiContext, call: Reduction) -> None:
    """Run a reduction of floating-point numbers; `keeps_order` says of which."""
    if call.kind is Kind.REDUCE_SCATTER:
        _reduce_scatter(context, call)
        return
    for part in _pieces(call.recv):
        wire = np.ascontiguousarray(part if call.rule.encode is None else call.rule.encode(part))
        if call.kind in (Kind.SCAN, Kind.EXSCAN):
            _scan(context, call, wire, part)
        else:
            _reduce(context, call, wire, part)


def _pieces(data: NumpyArray) -> Iterator[NumpyArray]:
    flat = data.reshape(-1)
    step = max(1, _AT_ONCE // max(1, flat.itemsize))
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def _reduce(context: MpiContext, call: Reduction, wire: NumpyArray, out: NumpyArray) -> None:
    """Reduce to all ranks, or to the root."""
    to_all, here = call.kind is Kind.ALL_REDUCE, context.rank == call.root
    if wire.nbytes <= _SMALL:
        room = np.empty_like(wire, shape=(context.size, wire.size))
        context.comm.Allgather(numbers(wire), [room, wire.size, TYPES[wire.dtype]])
        wire = _combined(call.rule, room)
    else:
        counts = _shares(wire.size, context.size)
        share = _combined(call.rule, _exchanged(context, wire, counts))
        whole = [wire, counts, starts_of(counts), TYPES[wire.dtype]]
        if to_all:
            context.comm.Allgatherv(numbers(share), whole)
        else:
            context.comm.Gatherv(numbers(share), whole if here else None, call.root)
    if to_all or here:
        _decode(call, wire, out, context.size)


def _reduce_scatter(context: MpiContext, call: Reduction) -> None:
    flat, out = contribution(call), call.recv.reshape(-1)
    wire = np.ascontiguousarray(flat if call.rule.encode is None else call.rule.encode(flat))
    counts = [out.size] * context.size if call.counts is None else list(call.counts[0])
    share = _combined(call.rule, _exchanged(context, wire, counts))
    _decode(call, share, out, context.size)


def _scan(context: MpiContext, call: Reduction, wire: NumpyArray, out: NumpyArray) -> None:
    """Reduce over the ranks before this one, and itself where `call` says so."""
    counts = _shares(wire.size, context.size)
    given = _exchanged(context, wire, counts)
    for before, each in pairwise(given):
        UFUNCS[call.rule.combine](before, each, out=each)
    ranks = context.rank + 1
    if call.kind is Kind.EXSCAN:
        given, ranks = np.roll(given, 1, 0), context.rank
    own, datatype, found = [given.shape[1]] * context.size, TYPES[wire.dtype], np.empty_like(wire)
    context.comm.Alltoallv(
        [given, own, starts_of(own), datatype], [found, counts, starts_of(counts), datatype]
    )
    if ranks:  # the first rank of an exscan keeps what it has
        _decode(call, found, out, ranks)


def _exchanged(context: MpiContext, wire: NumpyArray, counts: list[int]) -> NumpyArray:
    """Return what all ranks have of this one's share, a row for each rank."""
    own, datatype = counts[context.rank], TYPES[wire.dtype]
    room = np.empty_like(wire, shape=(context.size, own))
    into = [own] * context.size
    context.comm.Alltoallv(
        [wire, counts, starts_of(counts), datatype], [room, into, starts_of(into), datatype]
    )
    return room


def _combined(rule: ReductionRule, rows: NumpyArray) -> NumpyArray:
    total: NumpyArray = rows[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for each in rows[1:]:
            UFUNCS[rule.combine](total, each, out=total)
    return total


def _decode(call: Reduction, wire: NumpyArray, out: NumpyArray, ranks: int) -> None:
    if call.rule.decode is not None:
        call.rule.decode(wire, out, ranks)
    elif wire is not out:
        out[...] = wire


def _shares(items: int, size: int) -> list[int]:
    """Return how many items each rank owns."""
    return [items // size + (rank < items % size) for rank in range(size)]
