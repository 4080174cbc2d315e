"""Array collectives over MPI: one function per operation, one row of `VERBS` each.

Every function gets the context of the group, the call, and the range of `Call.detail` over the
ranks, on which all ranks have agreed before. Reductions follow the call's `ReductionRule`, in
pieces: MPI maps its scratch memory anew at every large call, so a few MiB at a time are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.arrays.packing import same_memory
from hpcdist.errors import MismatchError
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.mpi import told_by_all
from hpcdist.runtime.survival import can_recover
from hpcdist.transport.call.call import (
    Barrier,
    Block,
    Distribution,
    Gathering,
    Reduction,
    Shape,
    even_blocks,
    is_apart,
    is_even,
)
from hpcdist.transport.call.kinds import ARRAYS, Family, Kind, table_for
from hpcdist.transport.call.reduction import UFUNCS, ReductionRule
from hpcdist.transport.call.runs import (
    APART_FROM,
    contribution,
    counts_of,
    entries,
    expected_counts,
    from_each,
    misfit,
    new_blocks,
    pieces,
    shapes_to_each,
    to_each,
    unfitting,
    with_room,
    wrong_counts,
)
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import INT_MAX, OPS, block, numbers, starts_of
from hpcdist.transport.mpi.ordered import keeps_order, reduce_in_order
from hpcdist.transport.mpi.tags import Tag

Range = tuple[int, int]


def barrier(context: MpiContext, call: Barrier, _: Range) -> None:
    """Nothing to do: agreeing on the call was the barrier."""


# ---- reductions


def all_reduce(context: MpiContext, call: Reduction, _: Range) -> None:
    data, rule = call.recv, call.rule
    if context.size == 1 and rule.wire.kind != "b":  # of what truth is asked, truth is left
        return
    combine, _wire, encode, decode = rule
    if encode is None and data.nbytes <= context.piece_bytes:
        context.comm.Allreduce(MPI.IN_PLACE, numbers(data), OPS[combine])
        if decode is not None:
            decode(data, data, context.size)
        return
    for part in pieces(data, context.piece_bytes):
        wire = part if encode is None else encode(part)
        context.comm.Allreduce(MPI.IN_PLACE, numbers(wire), OPS[combine])
        if decode is not None:
            decode(wire, part, context.size)


def reduce(context: MpiContext, call: Reduction, _: Range) -> None:
    at_root = context.rank == call.root
    data = call.recv
    for part in pieces(data, context.piece_bytes):
        _reduce_part(context, call, part, call.root, part if at_root else None)


def _reduce_part(
    context: MpiContext, call: Reduction, part: NumpyArray, root: int, out: NumpyArray | None
) -> None:
    """Reduce `part` of every rank to `root`, which gives `out` for the result."""
    rule = call.rule
    wire = part if rule.encode is None else rule.encode(part)
    op = OPS[rule.combine]
    if out is None:
        context.comm.Reduce(numbers(wire), None, op, root)
        return
    if wire is out or rule.encode is not None:
        context.comm.Reduce(MPI.IN_PLACE, numbers(wire), op, root)
    else:
        context.comm.Reduce(numbers(wire), numbers(out), op, root)
        wire = out
    if rule.decode is not None:
        rule.decode(wire, out, context.size)


def reduce_scatter(context: MpiContext, call: Reduction, _: Range) -> None:
    rule, recv = call.rule, call.recv
    out, on_host = recv.reshape(-1), type(recv) is np.ndarray
    counts = None if call.counts is None else list(call.counts[0])
    in_pairs = max(counts or [out.size]) * rule.wire.itemsize > _PAIRS_FROM_BYTES
    in_pairs = in_pairs and context.one_node
    if call.send is not None and np.may_share_memory(call.send, out):
        call = call._replace(send=call.send.copy())
    if in_pairs or (counts is not None and not on_host):
        _reduce_scatter_in_pairs(context, rule, to_each(call, context.size), out)
        return
    flat = contribution(call)
    wire = flat if rule.encode is None else rule.encode(flat)
    wire_out = out if rule.encode is None else np.empty_like(out, rule.wire)
    own, result = numbers(wire), numbers(wire_out)
    if counts is None:
        own[1] = result[1] = out.size
        context.comm.Reduce_scatter_block(own, result, OPS[rule.combine])
    else:
        context.comm.Reduce_scatter(own, result, counts, OPS[rule.combine])
    if rule.decode is not None:
        rule.decode(wire_out, out, context.size)


def _reduce_scatter_in_pairs(
    context: MpiContext, rule: ReductionRule, blocks: Sequence[NumpyArray], out: NumpyArray
) -> None:
    """Exchange blocks rank by rank and combine them here, piece by piece.

    The pairwise-exchange algorithm (Thakur, Rabenseifner, Gropp 2005, section 4.3); NumPy's
    loops and pieces that stay in the cache make it several times faster than MPI's own.
    """
    size, ufunc, encode = context.size, UFUNCS[rule.combine], rule.encode
    step_items = max(1, _PAIR_BYTES // rule.wire.itemsize)
    for start in range(0, max(each.size for each in blocks), step_items):
        part = slice(start, start + step_items)
        mine = blocks[context.rank][part]
        total = mine.copy() if encode is None else encode(mine)
        received = np.empty_like(total)
        for step in range(1, size):
            to, source = (context.rank + step) % size, (context.rank - step) % size
            given = blocks[to][part]
            wire = given if encode is None else encode(given)
            context.comm.Sendrecv(numbers(wire), to, Tag.PART, numbers(received), source, Tag.PART)
            ufunc(total, received, out=total)
        if rule.decode is not None:
            rule.decode(total, out[part], size)
        else:
            out[part] = total


def scan(context: MpiContext, call: Reduction, _: Range) -> None:
    _scan(context, call, context.comm.Scan, context.rank + 1)


def exscan(context: MpiContext, call: Reduction, _: Range) -> None:
    _scan(context, call, context.comm.Exscan, context.rank)


def _scan(context: MpiContext, call: Reduction, verb: Callable[..., None], ranks: int) -> None:
    rule, data = call.rule, call.recv
    for part in pieces(data, context.piece_bytes):
        wire = part.copy() if rule.encode is None else rule.encode(part)
        verb(MPI.IN_PLACE, numbers(wire), OPS[rule.combine])
        if ranks == 0:
            continue  # the first rank of an exscan keeps what it has
        if rule.decode is not None:
            rule.decode(wire, part, ranks)
        else:
            part[...] = wire


# ---- moving data


def broadcast(context: MpiContext, call: Distribution, _: Range) -> None:
    context.comm.Bcast(block(call.recv, call.recv.nbytes), call.root)


def all_gather(context: MpiContext, call: Gathering, detail: Range) -> list[Block]:
    send = call.send
    if not is_even(detail):
        return _all_gather_apart(context, call, exchange_shapes(context, call))
    if is_apart(detail):
        return _all_gather_apart(context, call, [call.shape] * context.size)
    recv = call.recv
    if recv is None:
        recv = np.empty_like(send, shape=(context.size * send.size,))
    into = block(recv, send.nbytes)
    if not np.may_share_memory(send, recv):
        context.comm.Allgather(block(send, send.nbytes), into)
    else:
        own = recv.reshape(-1)[context.rank * send.size : (context.rank + 1) * send.size]
        if type(own) is not np.ndarray or own.ctypes.data != send.ctypes.data:
            own[...] = send.reshape(-1)
        context.comm.Allgather(MPI.IN_PLACE, into)
    return even_blocks(recv, call, context.size)


def _all_gather_apart(context: MpiContext, call: Gathering, shapes: list[Shape]) -> list[Block]:
    """Gather where MPI's Allgather cannot: blocks differ in size, or do not lie together."""
    filled = with_room(call, counts_of(call, shapes))
    send, runs = _apart_from_room(call), from_each(filled, context.size)
    counts = [run.nbytes for run in runs]
    together = max(counts) < APART_FROM  # on every rank, as they are so small
    if together and not can_recover():  # [Note: no Allgatherv]
        into = [filled.recv, counts, starts_of(counts), MPI.BYTE]
        context.comm.Allgatherv([send, send.nbytes, MPI.BYTE], into)
    else:
        _pass_around(context, send, runs)
    return new_blocks(call, filled, shapes)


def _apart_from_room(call: Gathering) -> NumpyArray:
    """Return what a gather sends as a flat array that does not change while it is received."""
    send = call.send
    if call.recv is not None and np.may_share_memory(send, call.recv):
        send = send.copy()
    return send.reshape(-1)


def _pass_around(context: MpiContext, send: NumpyArray, runs: Sequence[NumpyArray]) -> None:
    """Gather on all ranks, each run where it is to lie: every rank passes on what came last.

    The ring algorithm, as MPI libraries have it for long messages (Thakur, Rabenseifner, Gropp
    2005, section 4.1).
    """
    size, rank = context.size, context.rank
    _copy_own(send, runs[rank])
    to, source = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        given, into = runs[(rank - step) % size], runs[(rank - step - 1) % size]
        context.comm.Sendrecv(_bytes(given), to, Tag.PART, _bytes(into), source, Tag.PART)


def _copy_own(send: NumpyArray, run: NumpyArray) -> None:
    """Copy what a rank sends to itself, unless it is there already."""
    if type(run) is not np.ndarray or not same_memory(send, run):
        run[...] = send


def gather(context: MpiContext, call: Gathering, detail: Range) -> list[Block] | None:
    send, recv, at_root = call.send, call.recv, context.rank == call.root
    if not is_even(detail):
        return _gather_apart(context, call, exchange_shapes(context, call))
    if is_apart(detail):
        return _gather_apart(context, call, [call.shape] * context.size)
    if not at_root:
        context.comm.Gather(block(send, send.nbytes), None, call.root)
        return None
    if recv is None:
        recv = np.empty_like(send, shape=(context.size * send.size,))
    if np.may_share_memory(send, recv):
        send = send.copy()
    context.comm.Gather(block(send, send.nbytes), block(recv, send.nbytes), call.root)
    return even_blocks(recv, call, context.size)


def _gather_apart(context: MpiContext, call: Gathering, shapes: list[Shape]) -> list[Block] | None:
    """Gather blocks that differ, or each to its place."""
    send = _apart_from_room(call)
    if context.rank != call.root:
        context.comm.Send(_bytes(send), call.root, Tag.PART)
        return None
    filled = with_room(call, counts_of(call, shapes))
    for rank, run in enumerate(from_each(filled, context.size)):
        if rank == context.rank:
            _copy_own(send, run)
        else:
            context.comm.Recv(_bytes(run), rank, Tag.PART)
    return new_blocks(call, filled, shapes)


def exchange_shapes(context: MpiContext, call: Gathering | Distribution) -> list[Shape]:
    """Exchange all shapes; raise on all ranks where a list of one does not fit. Collective.

    A rank with a list tells what shapes it is for as one number, as they are told by all.
    """
    fitting = entries(call, context.rank, context.size)
    told = told_by_all(context.comm, (call.shape, hash(tuple(fitting)) if fitting else None))
    shapes = [shape for shape, _ in told]
    if any(number not in (None, hash(tuple(shapes))) for _, number in told):
        raise _tell_all(context, call.kind, unfitting(call, context.ranks, context.rank, shapes))
    return shapes


def _tell_all(context: MpiContext, kind: Kind, own: list[str]) -> MismatchError:
    """Collect on all ranks what does not fit on any, and the lines that called."""
    told = told_by_all(context.comm, (own, call_site()))
    error = misfit(kind, [line for lines, _ in told for line in lines])
    error.call_sites = {rank: site for rank, (_, site) in zip(context.ranks, told, strict=True)}
    return error


def scatter(context: MpiContext, call: Distribution, detail: Range) -> None:
    send, recv = call.send, call.recv
    even = is_even(detail)
    if not even:
        exchange_shapes(context, call)
    if send is not None and np.may_share_memory(send, recv):
        send = send.copy()
    if even and not is_apart(detail):
        own = None if send is None else block(send, recv.nbytes)
        context.comm.Scatter(own, block(recv, recv.nbytes), call.root)
    elif context.rank == call.root:
        for rank, part in enumerate(to_each(call._replace(send=send), context.size)):
            if rank == context.rank:
                _copy_own(part, recv.reshape(-1))
            else:
                context.comm.Send(_bytes(part), rank, Tag.PART)
    else:
        context.comm.Recv(_bytes(recv), call.root, Tag.PART)


def alltoall(context: MpiContext, call: Gathering, detail: Range) -> list[Block]:
    size, send, recv = context.size, call.send, call.recv
    if recv is not None and np.may_share_memory(send, recv):
        call = call._replace(send=send.copy())
    if not is_even(detail):
        return _alltoall_uneven(context, call)
    if not is_apart(detail):
        into = np.empty_like(call.send).reshape(-1) if recv is None else recv
        nbytes = into.nbytes // size
        context.comm.Alltoall(block(call.send, nbytes), block(into, nbytes))
        return even_blocks(into, call, size)
    given = to_each(call, size)
    filled = with_room(call, [run.size for run in given])
    alltoall_in_pairs(context, given, from_each(filled, size))
    return new_blocks(call, filled, [call.shape] * size)


def _alltoall_uneven(context: MpiContext, call: Gathering) -> list[Block]:
    agreed = agree_on_counts(context, call)
    filled = with_room(call, agreed.received)
    given, runs = to_each(call, context.size), from_each(filled, context.size)
    if agreed.in_pairs:
        alltoall_in_pairs(context, given, runs)
    else:
        out, into = [run.nbytes for run in given], [run.nbytes for run in runs]
        context.comm.Alltoallv(
            [call.send, out, starts_of(out), MPI.BYTE],
            [filled.recv, into, starts_of(into), MPI.BYTE],
        )
    return new_blocks(call, filled, agreed.shapes)


class Agreed(NamedTuple):
    """What the ranks of an uneven alltoall have told each other.

    `received` are the elements that come from each rank, of these `shapes`. `in_pairs` says that
    some rank has more bytes than one MPI call counts, or arrays that lie apart.
    """

    received: list[int]
    shapes: list[Shape]
    in_pairs: bool


def agree_on_counts(context: MpiContext, call: Gathering) -> Agreed:
    """Check that every rank expects what the others send. Collective."""
    size = context.size
    given, expected = to_each(call, size), expected_counts(call, size)
    told = np.empty((size, 2), np.int64)
    told[:, 0], told[:, 1] = [run.size for run in given], expected is None
    incoming = np.empty_like(told)
    context.comm.Alltoall([told, 2, MPI.INT64_T], [incoming, 2, MPI.INT64_T])
    received = incoming[:, 0].tolist()
    unfit = wrong_counts(context.ranks, context.rank, expected, received)
    most = max(sum(run.size for run in given), sum(received)) * given[0].itemsize
    in_pairs = bool(call.sends or call.receives) or most > INT_MAX
    _, worst = context.agree(call._replace(detail=_WRONG if unfit else int(in_pairs)), enters=True)
    if worst == _WRONG:
        raise _tell_all(context, call.kind, unfit)
    shapes: list[Shape] = [()] * size
    if incoming[:, 1].any():  # a rank has an empty list to be filled
        shapes = context.comm.alltoall(shapes_to_each(call, size))
    return Agreed(received, shapes, bool(worst))


_WRONG = 2


def alltoall_in_pairs(
    context: MpiContext, given: Sequence[NumpyArray], runs: Sequence[NumpyArray]
) -> None:
    """Exchange with one rank after the other, each run from and to where it lies."""
    _copy_own(given[context.rank], runs[context.rank])
    for step in range(1, context.size):
        to, source = (context.rank + step) % context.size, (context.rank - step) % context.size
        context.comm.Sendrecv(
            _bytes(given[to]), to, Tag.PART, _bytes(runs[source]), source, Tag.PART
        )


def _bytes(run: NumpyArray) -> Any:
    return block(run, run.nbytes)


_PAIRS_FROM_BYTES = 64 << 10
_PAIR_BYTES = 1 << 20

Verb = Callable[[MpiContext, Any, Range], Any]


def _in_order(otherwise: Verb) -> Verb:
    """Return a reduction that is in the order of the ranks where the settings say so."""

    def verb(context: MpiContext, call: Reduction, detail: Range) -> None:
        if context.size > 1 and keeps_order(context.site.config, call.rule):
            reduce_in_order(context, call)
        else:
            otherwise(context, call, detail)

    return verb


_ROWS: dict[Kind, Verb] = {
    Kind.BARRIER: barrier,
    Kind.ALL_REDUCE: _in_order(all_reduce),
    Kind.REDUCE: _in_order(reduce),
    Kind.REDUCE_SCATTER: _in_order(reduce_scatter),
    Kind.SCAN: _in_order(scan),
    Kind.EXSCAN: _in_order(exscan),
    Kind.BROADCAST: broadcast,
    Kind.ALL_GATHER: all_gather,
    Kind.GATHER: gather,
    Kind.SCATTER: scatter,
    Kind.ALLTOALL: alltoall,
}
VERBS = table_for("VERBS", ARRAYS | {Family.BARRIER}, _ROWS)
