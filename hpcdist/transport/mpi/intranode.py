"""`perform`: one collective of a group on one node, through shared memory where that is faster.

`choose` says which way it goes. A way is a function that begins with the agreement and is read from
top to bottom: here those of a few bytes, in `intranode_large`, `intranode_objects` and
`intranode_boxes` the others. `end_posted` enters them where the hot path has agreed already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hpcdist.compiled import expect
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
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.intranode_large import (
    End,
    all_reduce_large,
    choose_end,
    copies,
    end_large,
    run_large,
    stop,
)
from hpcdist.transport.mpi.intranode_objects import (
    by_mpi,
    exchange_agreed,
    exchange_objects,
    objects_go_by_mpi,
    small_up_to,
)
from hpcdist.transport.shm.attached import unreachable
from hpcdist.transport.shm.collectives import SHARED, Range, fits, own_block, take_copies
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.kernel import CODES, code_of, combine_rows, compiled
from hpcdist.transport.shm.node import SharedNode, lies_in_place

Way = Callable[[MpiContext, SharedNode, Any], Any]
_WITH_LOOP: dict[Kind, Way] = {
    Kind.ALL_REDUCE: all_reduce_large,
    Kind.REDUCE: run_large,
    Kind.REDUCE_SCATTER: run_large,
}
"""What may be done by a compiled loop; the ways of large arrays."""

_REDUCE, _AVG = Kind.REDUCE, ReduceOp.AVG  # which saves 60 ns each


def perform(context: MpiContext, node: SharedNode, call: Collective) -> Any:
    """Agree on `call`, then run it."""
    return choose(call, node.size, node.can_pipeline)(context, node, call)


def choose(call: Collective, size: int, can_pipeline: bool) -> Way:
    """Return the way of `call` between `size` ranks, before any other rank is asked.

    `can_pipeline` says whether there is the compiled kernel, for so many ranks.
    """
    if can_pipeline and isinstance(call, Reduction):
        large = _WITH_LOOP.get(call.kind)
        if large and (CODES.get((call.op, call.dtype.code)) or code_of(call)):
            data = call.recv if call.send is None else call.send
            return large if call.sends or data.nbytes > PAYLOAD else combine_small
    other = _OTHERS.get(type(call))
    if other is not None:
        return other
    row = SHARED[call.kind]
    if row.total(call, size) > PAYLOAD:
        return run_large
    moves = can_pipeline and row.move is not None and call.detail != UNEVEN
    return move_small if moves else take_small


# ---- the ways of what fits into the control block


def combine_small(context: MpiContext, node: SharedNode, call: Reduction) -> None:
    """Agree on a reduction and do it in the same compiled call; else do it after the wait."""
    code, agreement = CODES[call.op, call.dtype.code], context.agreement
    assert code is not None
    assert agreement is not None
    data: Any = call.recv
    out: Any = data
    count, first, begin = data.size * code.per_item, 0, 0
    if call.send is not None:  # of which a reduce_scatter takes a part
        data, begin = call.send, own_block(call, node.rank, node.size)
        first = begin // data.itemsize * code.per_item
    elif call.kind is _REDUCE and node.rank != call.root:
        out = None
    divisor = float(node.size) if call.op is _AVG else 1.0
    number, control = code.number, node.control
    if call.kind is _REDUCE:
        given = agreement.reduce_eagerly(call, data)
        if given is not None:
            if out is not None:
                combine_rows(call, given.reshape(node.size, -1), out, compiles=True)
            return
    if agreement.reduce(control, call, data, out, first, number, count, divisor) or out is None:
        return
    places = node.payload_addresses[control.turn]
    compiled.combine(number, tuple(place + begin for place in places), out, count, divisor)


def move_small(context: MpiContext, node: SharedNode, call: Distribution | Gathering) -> Any:
    """Agree on what moves data and do it in the same compiled call; else after the wait."""
    row, agreement = SHARED[call.kind], context.agreement
    assert row.move is not None
    assert agreement is not None
    move = row.move(call, node.rank, node.size)
    if isinstance(call, Distribution) and agreement.take_given(call, move.out, move.first):
        return None
    data = row.offered(call, node.rank)
    found = agreement.within(call, node.control.move, call.detail, data, *move)
    if found is not True:
        return _end_small(context, node, call, found)
    if isinstance(call, Gathering) and move.out is not None:
        return even_blocks(move.out, call, node.size)
    return None


def take_small(context: MpiContext, node: SharedNode, call: AnyArrays) -> Any:
    """Agree, then take what is wanted from the control block."""
    offered = SHARED[call.kind].offered(call, node.rank)
    return _end_small(context, node, call, context.agree(call, 0, offered))


def _end_small(context: MpiContext, node: SharedNode, call: AnyArrays, detail: Range) -> Any:
    """Take what is wanted from the contributions on the control block, if they are alike."""
    if not fits(call, detail):
        return by_mpi(context, node, call, detail)
    return take_copies(node, call, node.payloads[node.control.turn])


def agree_only(context: MpiContext, node: SharedNode, call: Barrier | Refusal) -> None:
    """Agree, which raises what a rank refuses."""
    context.agree(call)


def exchange_boxes(context: MpiContext, node: SharedNode, call: Exchange) -> None:
    """Agree on an exchange, then run it."""
    from hpcdist.transport.mpi.intranode_boxes import exchange_boxes

    exchange_boxes(context, node, call)


_OTHERS: dict[type, Way] = {
    Objects: exchange_objects,
    Exchange: exchange_boxes,
    Barrier: agree_only,
    Refusal: agree_only,
}


# ---- in the middle of an operation


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
        stop(node, call, unreachable("another process", OSError(-state, os.strerror(-state))))
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
    is_large = SHARED[call.kind].total(call, node.size) > PAYLOAD
    return (end_large if is_large else _end_small)(context, node, call, detail)


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
    if _goes_by_mpi(context, node, call, detail):
        by_mpi(context, node, call, detail)
    elif _takes_copies(context, node, call, detail):
        node.end()


def _goes_by_mpi(context: MpiContext, node: SharedNode, call: Collective, detail: Range) -> bool:
    if isinstance(call, Objects):
        return objects_go_by_mpi(node, call, detail)
    if isinstance(call, Exchange):
        return 0 in node.control.addresses()
    return isinstance(call, AnyArrays) and _end_of(context, node, call, detail) is None


def _takes_copies(context: MpiContext, node: SharedNode, call: Collective, detail: Range) -> bool:
    if isinstance(call, Exchange):
        return not any(map(lies_in_place, node.control.addresses()))
    return isinstance(call, AnyArrays) and _end_of(context, node, call, detail) is copies


def _end_of(context: MpiContext, node: SharedNode, call: AnyArrays, detail: Range) -> End | None:
    if SHARED[call.kind].total(call, node.size) <= PAYLOAD:
        return copies if fits(call, detail) else None
    addresses, table = node.control.addresses(), context.tuning_table
    return choose_end(call, detail, addresses, table, can_pipeline=node.can_pipeline)
