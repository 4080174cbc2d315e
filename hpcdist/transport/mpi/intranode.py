"""`perform`: one collective of a group on one node, through shared memory where that is faster.

The parts are in `shm.node` (whose memory is where), `shm.collectives` (what is taken from where),
`tuning` (which algorithm), and `agreement`, which comes before everything else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from hpcdist.compiled import expect
from hpcdist.errors import TransportError
from hpcdist.transport.call.call import (
    UNEVEN,
    AnyArrays,
    Barrier,
    Collective,
    Distribution,
    Exchange,
    Gathering,
    Objects,
    Reduction,
    Refusal,
    even_blocks,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.call.runs import contribution
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.intranode_boxes import exchange_boxes, read_in_place
from hpcdist.transport.mpi.intranode_objects import (
    by_mpi,
    exchange_agreed,
    exchange_objects,
    objects_go_by_mpi,
    small_up_to,
)
from hpcdist.transport.shm.attached import Attached, unreachable
from hpcdist.transport.shm.collectives import SHARED, Range, Shared, fits, own_block
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.kernel import CODES, Code, address_of, code_of, compiled, divisor_of
from hpcdist.transport.shm.node import NOTHING, SharedNode, slice_bytes
from hpcdist.transport.tuning import STAGED_UP_TO, Algorithm
from hpcdist.transport.waiting.polling import poll

_REDUCED = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER})


def perform(context: MpiContext, node: SharedNode, call: Collective) -> Any:
    """Agree on `call`, then run it."""
    code: Code | None = None
    if isinstance(call, Reduction):
        if node.can_pipeline and call.kind in _REDUCED:
            code = CODES.get((call.op, call.dtype.code)) or code_of(call)
            if code is not None and call.kind is Kind.ALL_REDUCE:
                return _all_reduce(context, node, call, code)
    elif isinstance(call, Objects):
        return exchange_objects(context, node, call)
    elif isinstance(call, Exchange):
        return exchange_boxes(context, node, call)
    elif isinstance(call, (Barrier, Refusal)):
        context.agree(call)  # which raises what a rank refuses
        return None
    row = SHARED[call.kind]
    total, offered = row.total(call, node.size), row.offered(call, node.rank)
    if total <= PAYLOAD:
        if code is not None and isinstance(call, Reduction):
            return _reduce_small(context, node, call, code, offered)
        return _run_small(context, node, call, row, offered)
    node.check_usable()
    detail = context.agree(call, *_address(context, node, call, offered, total))
    return _run_large(context, node, call, detail, row, total)


def _all_reduce(context: MpiContext, node: SharedNode, call: Reduction, code: Code) -> Any:
    """Run the operation that matters most with as few steps as there can be."""
    data, agreement = call.recv, context.agreement
    assert agreement is not None
    total, count = data.nbytes, data.size * code.per_item
    divisor = float(node.size) if call.op is ReduceOp.AVG else 1.0
    if total <= PAYLOAD:
        if not agreement.reduce(node.control, call, data, data, 0, code.number, count, divisor):
            sources = node.payload_addresses[node.control.turn]
            compiled.combine(code.number, sources, data, count, divisor)
        return None
    node.check_usable()
    address, _ = _address(context, node, call, data, total)
    state = agreement.reduce_shared(node, call, address, code.number, count, divisor)
    if state == DONE_HERE:
        node.await_others(node.control.arrived, call)
    if state >= DONE_HERE:
        return node.end()
    return _run_large(context, node, call, (0, 0), SHARED[call.kind], total)


def _reduce_small(
    context: MpiContext, node: SharedNode, call: Reduction, code: Code, offered: Any
) -> None:
    """Like `_all_reduce`, for `reduce` and `reduce_scatter`: not every rank gets all of it."""
    out: Any = None if _only_gives(call, node.rank) else call.recv
    agreement, divisor = context.agreement, divisor_of(call, node.size)
    assert agreement is not None
    first, count = 0, offered.size * code.per_item
    if call.kind is Kind.REDUCE_SCATTER:
        count = call.recv.size * code.per_item
        first = own_block(call, node.rank, node.size) // offered.itemsize * code.per_item
    done = agreement.reduce(node.control, call, offered, out, first, code.number, count, divisor)
    if not done:
        _take_small(node, call, SHARED[call.kind])


def _run_small(
    context: MpiContext, node: SharedNode, call: AnyArrays, row: Shared, offered: Any
) -> Any:
    """Agree on an operation whose data fit into the control block, and copy them with it."""
    moves = row.move is not None and node.can_pipeline and call.detail != UNEVEN
    move = row.move(call, node.rank, node.size) if row.move is not None and moves else None
    if move is None:
        detail = context.agree(call, 0, offered)
    else:
        assert context.agreement is not None
        found = context.agreement.move(node.control, call, offered, *move)
        if found is None:
            if isinstance(call, Gathering) and move.out is not None:
                return even_blocks(move.out, call, node.size)
            return None
        detail = found
    if fits(call, detail):
        return _take_small(node, call, row)
    return by_mpi(context, node, call, detail)


def check_off(node: SharedNode, call: Collective) -> None:
    """Raise where a rank has called the operation off that this one waits in."""
    by = node.control.called_off_by()
    if by >= 0 and _has_second_part(call, node.size):
        raise node.called_off(call, by)


def _has_second_part(call: Collective, size: int) -> bool:
    """Return whether more than the agreement follows; of objects, whether this rank knows so."""
    if isinstance(call, Objects):
        return call.detail > small_up_to(call, size)
    if isinstance(call, AnyArrays):
        return SHARED[call.kind].total(call, size) > PAYLOAD
    return isinstance(call, Exchange)


_IN_PIPE, _DONE, _BROKEN = 1, 2, 4
"""See `shm/native/hot_large.c`."""

expect(compiled, IN_PIPE=_IN_PIPE, DONE=_DONE, BROKEN=_BROKEN)


def end_posted(context: MpiContext, node: SharedNode, call: Collective, state: int) -> Any:
    """End `call`, which the hot path has begun; most often it is to agree on it first."""
    assert context.agreement is not None
    if state < 0:
        assert isinstance(call, Reduction)
        _stop(node, call, unreachable("another process", OSError(-state, os.strerror(-state))))
    if state == _IN_PIPE:
        return node.run_pipe(call)
    if state == _DONE:
        node.await_others(node.control.arrived, call)
        return node.end()
    if state == _BROKEN:
        raise node.broken(call, node.control.broken_by())
    detail = context.agreement.end_posted(call)
    if isinstance(call, Objects):
        return exchange_agreed(context, node, call, detail)
    if not isinstance(call, AnyArrays):
        return None
    row = SHARED[call.kind]
    total = row.total(call, node.size)
    if total > PAYLOAD:
        return _run_large(context, node, call, detail, row, total)
    if fits(call, detail):
        return _take_small(node, call, row)
    return by_mpi(context, node, call, detail)


def _only_gives(call: Reduction, rank: int) -> bool:
    return call.kind is Kind.REDUCE and rank != call.root


def _take_small(node: SharedNode, call: AnyArrays, row: Shared) -> Any:
    """Take what is wanted from the contributions on the control block."""
    places = node.payloads[node.control.turn]
    begin = row.part(call, node.rank, node.size) if row.part else 0
    if begin:
        places = tuple(place._replace(offset=place.offset + begin) for place in places)
    return row.take(node, call, places)


_DYING_S = 1.0
"""Seconds from when the memory of a process is gone until it counts as dead, at most."""

DONE_HERE = 2
"""See `Agreement.reduce_shared`."""


def _address(
    context: MpiContext, node: SharedNode, call: AnyArrays, offered: Any, total: int
) -> tuple[int, Any]:
    """Return what this rank publishes about a large contribution, copied if that pays."""
    way = _way(context, call, total, shared=False)
    if way is Algorithm.ATTACHED and not node.may_attach():
        return 0, None
    if offered is None:
        return _to_be_filled(context, node, call, total), None
    address, payload = 0, None
    if call.sends:
        address, payload = node.shared_list(offered)
    elif not _overlaps(call, node.rank):
        address = node.shared_address(offered)
    if address and _way(context, call, total, shared=True) is Algorithm.DIRECT:
        return address, payload
    if way is Algorithm.ATTACHED:
        if isinstance(call, Reduction) and not _can_attach(node, call):
            return 0, None
        if call.sends:
            return node.attached_list(offered)
        if not isinstance(call, Reduction) and _overlaps(call, node.rank):
            return 0, None
        return node.attached_address(offered), None
    if total <= STAGED_UP_TO and way is Algorithm.STAGED:
        return node.stage(np.concatenate(offered) if call.sends else offered), None
    return 0, None


def _to_be_filled(context: MpiContext, node: SharedNode, call: AnyArrays, total: int) -> int:
    """Return what a rank publishes that contributes nothing: its array, if others may fill it."""
    if not isinstance(call, Distribution) or not SHARED[call.kind].filled:
        return NOTHING
    if _way(context, call, total, shared=True) is Algorithm.DIRECT:
        address = node.shared_address(call.recv)
        if address:
            return address
    if _way(context, call, total, shared=False) is Algorithm.ATTACHED:
        return node.attached_address(call.recv) or NOTHING
    return NOTHING


def _can_attach(node: SharedNode, call: Reduction) -> bool:
    """Return whether a reduction of ordinary arrays can be done where they lie.

    That is, by a compiled loop, and without writing to what others still read, or what this rank
    has yet to read: the place of its own part is read by nobody else.
    """
    if not node.can_pipeline or code_of(call) is None:
        return False
    if call.send is None:
        return not any(np.may_share_memory(each, call.recv) for each in call.sends)
    own = address_of(call.send) + own_block(call, node.rank, node.size)
    return address_of(call.recv) == own or not np.may_share_memory(call.send, call.recv)


def _way(
    context: MpiContext,
    call: AnyArrays,
    total: int,
    *,
    shared: bool,
    but: Algorithm | None = None,
) -> Algorithm:
    short = _needs_passes(call)
    return context.tuning_table.algorithm(call.kind, total, short=short, shared=shared, but=but)


def _needs_passes(call: AnyArrays) -> bool:
    """Return whether MPI needs passes of ours before or after: 16-bit floats, and means."""
    dtype = call.dtype
    is_short = dtype.wide is not None and dtype.family == "float"
    return is_short or (isinstance(call, Reduction) and call.op is ReduceOp.AVG)


def _overlaps(call: AnyArrays, rank: int) -> bool:
    """Return whether a rank's result would overwrite what others still read."""
    send, recv = call.send, call.recv
    if send is None or recv is None or call.receives:
        return False
    if not np.may_share_memory(send, recv):
        return False
    own = address_of(recv) + rank * send.nbytes
    return call.kind is not Kind.ALL_GATHER or address_of(send) != own  # its own block


def _run_large(
    context: MpiContext, node: SharedNode, call: AnyArrays, detail: Range, row: Shared, total: int
) -> Any:
    node.enter(call)
    places = _readable(node, call, detail, row)
    if places is not None and (found := _how_taken(node, row, places)) is not None:
        take, waits = found
        result = _take(node, call, take, places)
        if waits is not None:
            node.finish(call, wait=waits)
        return result
    code = _pipe_code(context, node, call, total)
    if code is not None:
        assert isinstance(call, Reduction)
        _run_pipelined(node, call, code)
        return None
    return by_mpi(context, node, call, detail)


def _readable(node: SharedNode, call: AnyArrays, detail: Range, row: Shared) -> list[Any] | None:
    """Return where the contributions lie, or None where some rank cannot be read."""
    addresses = node.control.addresses()
    if not fits(call, detail) or 0 in addresses:
        return None
    return node.places(addresses, row.part(call, node.rank, node.size) if row.part else 0)


def _pipe_code(context: MpiContext, node: SharedNode, call: AnyArrays, total: int) -> Code | None:
    """Return the compiled loop for a reduction through the staging memory; None: not that way."""
    if (
        isinstance(call, Reduction)
        and call.kind in _REDUCED
        and node.can_pipeline
        and call.counts is None
        and _way(context, call, total, shared=False, but=Algorithm.ATTACHED) is Algorithm.PIPELINED
    ):
        return code_of(call)
    return None


def end_left(context: MpiContext, node: SharedNode, call: Collective, before: int) -> None:
    """Do what the others need of this rank in an operation that it leaves, if they are in it.

    MPI waits for all ranks, and nobody tells those inside that this one has left: it takes part.
    Where they read copies they need nothing more.

    Args:
        context: the group.
        node: its memory.
        call: what this rank leaves.
        before: how many operations there were before it.

    """
    control = node.control
    if control.sequence in (before, control.ended) or control.call_off(False):
        return
    assert context.agreement is not None
    detail = context.agreement.end_posted(call)
    if isinstance(call, AnyArrays):
        row = SHARED[call.kind]
        total = row.total(call, node.size)
        places = None if total <= PAYLOAD else _readable(node, call, detail, row)
        found = None if places is None else _how_taken(node, row, places)
        goes_by_mpi = found is None and _pipe_code(context, node, call, total) is None
        reads_copies = found is not None and found[1] is None
    else:
        addresses = node.control.addresses()
        goes_by_mpi = (
            objects_go_by_mpi(node, call, detail) if isinstance(call, Objects) else 0 in addresses
        )
        reads_copies = isinstance(call, Exchange) and not any(
            read_in_place(node, node.places(addresses))
        )
    if goes_by_mpi:
        by_mpi(context, node, call, detail)
    elif reads_copies:
        node.end()


def _how_taken(
    node: SharedNode, row: Shared, places: Sequence[Any]
) -> tuple[Callable[..., Any], bool | None] | None:
    """Return what takes contributions from these places; None: nothing does.

    And whether this rank then waits for others, which read its own; None: they read copies.
    """
    attached = [type(place) is Attached for place in places]
    if row.take_attached is not None and any(attached):
        return (row.take_attached, True) if all(attached) else None
    in_place = read_in_place(node, places)
    if all(in_place) and row.take_direct is not None:
        return row.take_direct, True
    if any(in_place):
        return None if row.in_place else (row.take, in_place[node.rank])
    return row.take, None


def _take(
    node: SharedNode, call: AnyArrays, take: Callable[..., Any], places: Sequence[Any]
) -> Any:
    """Take what is wanted; find out who has died where memory cannot be reached."""
    try:
        return take(node, call, places)
    except TransportError as error:
        _stop(node, call, error)


def _stop(node: SharedNode, call: AnyArrays, error: TransportError) -> NoReturn:
    """Raise why an operation has stopped on its way: who has died, else what the system says."""

    def look() -> bool:
        node.check_alive(call, range(node.size))
        return False

    is_dying = getattr(error.__cause__, "errno", None) == errno.ESRCH
    poll(look, _DYING_S if is_dying else 0.0)
    raise error


def _run_pipelined(node: SharedNode, call: Reduction, code: Code) -> None:
    """Reduce ordinary arrays through the staging memory."""
    data, recv = contribution(call), call.recv
    if call.kind is Kind.REDUCE_SCATTER:
        if np.may_share_memory(data, recv):
            data = data.copy()
        length, stride = recv.size, recv.size
    else:
        length, stride = data.size, 0
    out: Any = 0 if _only_gives(call, node.rank) else recv
    item = data.itemsize // code.per_item
    node.control.begin(
        code.number,
        data,
        out,
        0 if stride else out,
        node.pipe_stages,
        slice_bytes(node.size) // item,
        length * code.per_item,
        stride * code.per_item,
        divisor_of(call, node.size),
    )
    node.run_pipe(call)
