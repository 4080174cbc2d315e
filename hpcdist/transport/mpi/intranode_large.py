"""Large arrays between the ranks of a node: published with the agreement, taken where they lie.

What a rank publishes of its contribution is the first of `choose_offers` that works for its memory.
What is done once all have agreed is `choose_end`, of what all have published: so all do the same.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from hpcdist.errors import TransportError
from hpcdist.transport.call.call import AnyArrays, Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.intranode_objects import end_by_mpi
from hpcdist.transport.shm.collectives import SHARED, Range, fits, own_block, reduce_pipelined
from hpcdist.transport.shm.kernel import address_of, code_of, divisor_of
from hpcdist.transport.shm.node import NOTHING, SharedNode, is_attached, lies_in_place
from hpcdist.transport.tuning import Algorithm, TuningTable
from hpcdist.transport.waiting.polling import poll

_DYING_S = 1.0
"""Seconds from when the memory of a process is gone until it counts as dead, at most."""

_DONE_HERE, _DONE = 2, 3
"""See `reduce_shared` in `shm/native/agree.c`."""


def run_large(context: MpiContext, node: SharedNode, call: AnyArrays) -> Any:
    """Agree on `call`, then take what this rank wants from where the others' arrays lie."""
    node.check_usable()
    address, payload = _offer(node, call, context.tuning_table)
    return end_large(context, node, call, context.agree(call, address, payload))


def all_reduce_large(context: MpiContext, node: SharedNode, call: Reduction) -> Any:
    """Run an all_reduce that has a compiled loop: of shared arrays in the call that agrees, too."""
    node.check_usable()
    address, _ = _offer(node, call, context.tuning_table)
    code, agreement = code_of(call), context.agreement
    assert code is not None
    assert agreement is not None
    count, divisor = call.recv.size * code.per_item, divisor_of(call, node.size)
    control, bases = node.control, node.bases
    state = agreement.within(
        call, control.reduce_shared, address, bases, code.number, count, divisor
    )
    if state == _DONE_HERE:
        node.await_others(control.arrived, call)
    if state in (_DONE_HERE, _DONE):
        return node.end()
    return end_large(context, node, call, (0, 0))


def end_large(context: MpiContext, node: SharedNode, call: AnyArrays, detail: Range) -> Any:
    """Run what all ranks have agreed on."""
    node.enter(call)
    addresses = node.control.addresses()
    table = context.tuning_table
    end = choose_end(call, detail, addresses, table, can_pipeline=node.can_pipeline)
    if end is None:
        return end_by_mpi(context, node, call, detail)
    return end(node, call, addresses)


# ---- offering: an address and a payload are published; 0 where that is not possible

Published = tuple[int, Any]
Offer = Callable[[SharedNode, Any, Any], Published]


def _offer(node: SharedNode, call: AnyArrays, table: TuningTable) -> Published:
    """Return what this rank publishes about its contribution, copied if that pays."""
    row = SHARED[call.kind]
    data, total = row.offered(call, node.rank), row.total(call, node.size)
    offers = choose_offers(call, total, table, gives=data is not None)
    if attached in offers and not node.may_attach():
        return 0, None
    nothing = 0 if data is not None else NOTHING
    if row.filled and data is None:
        data = call.recv
    for offer in offers if data is not None else ():
        found = offer(node, call, data)
        if found[0]:
            return found
    return nothing, None


def choose_offers(
    call: AnyArrays, total: int, table: TuningTable, *, gives: bool
) -> tuple[Offer, ...]:
    """Return how a rank may publish its array, in the order in which it tries.

    `total` are the bytes of the largest contribution. Where a rank gives none, its array is one
    that others may fill.
    """
    algorithm = _algorithm(table, call, total, shared=False)
    ordinary = _OFFERS.get(algorithm, ()) if gives or algorithm is Algorithm.ATTACHED else ()
    if _algorithm(table, call, total, shared=True) is Algorithm.DIRECT:
        return in_heap, *ordinary
    return ordinary


def in_heap(node: SharedNode, call: AnyArrays, data: Any) -> Published:
    """Offer an array of the heap, where it is."""
    if call.sends:
        return node.shared_list(data)
    return 0 if _overlaps(call, node.rank) else node.shared_address(data), None


def attached(node: SharedNode, call: AnyArrays, data: Any) -> Published:
    """Offer an ordinary array, where it is."""
    if isinstance(call, Reduction):
        if not _can_attach(node, call):
            return 0, None
    elif _overlaps(call, node.rank):
        return 0, None
    return node.attached_list(data) if call.sends else (node.attached_address(data), None)


def staged(node: SharedNode, call: AnyArrays, data: Any) -> Published:
    """Offer a copy in the staging memory."""
    return node.stage(np.concatenate(data) if call.sends else data), None


_OFFERS = {Algorithm.ATTACHED: (attached,), Algorithm.STAGED: (staged,)}


def _can_attach(node: SharedNode, call: Reduction) -> bool:
    """Return whether a reduction of ordinary arrays can be done where they lie.

    That is, by a compiled loop, and without writing to what others still read, or what this rank
    has yet to read: the place of its own part is read by nobody else. Not beside a program that
    computes: what it allocates and frees then, and the kernel's copies, wait for each other.
    """
    if not node.can_pipeline or call.beside or code_of(call) is None:
        return False
    if call.send is None:
        return not any(np.may_share_memory(each, call.recv) for each in call.sends)
    own = address_of(call.send) + own_block(call, node.rank, node.size)
    return address_of(call.recv) == own or not np.may_share_memory(call.send, call.recv)


def _algorithm(
    table: TuningTable, call: AnyArrays, total: int, *, shared: bool, but: Algorithm | None = None
) -> Algorithm:
    return table.algorithm(call.kind, total, short=_needs_passes(call), shared=shared, but=but)


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


# ---- what is done once all have agreed

End = Callable[[SharedNode, Any, Sequence[int]], Any]


def choose_end(
    call: AnyArrays,
    detail: Range,
    addresses: Sequence[int],
    table: TuningTable,
    *,
    can_pipeline: bool,
) -> End | None:
    """Return how ranks end an operation that they have agreed on, all alike; None: by MPI.

    `detail` and `addresses` are what they have told each other.
    """
    row, in_place = SHARED[call.kind], [*map(lies_in_place, addresses)]
    if fits(call, detail) and 0 not in addresses:
        if row.take_attached is not None and any(map(is_attached, addresses)):
            if all(map(is_attached, addresses)):
                return attached_reduced
        elif row.take_direct is not None and all(in_place):
            return all_in_place
        elif not any(in_place):
            return copies
        elif not row.in_place:
            return some_in_place
    if can_pipeline and isinstance(call, Reduction) and _is_piped(call, len(addresses), table):
        return pipelined
    return None


def _is_piped(call: Reduction, size: int, table: TuningTable) -> bool:
    total = SHARED[call.kind].total(call, size)
    way = _algorithm(table, call, total, shared=False, but=Algorithm.ATTACHED)
    return way is Algorithm.PIPELINED and call.counts is None and code_of(call) is not None


def attached_reduced(node: SharedNode, call: Any, addresses: Sequence[int]) -> Any:
    """Reduce ordinary arrays where they lie."""
    return _take(node, call, SHARED[call.kind].take_attached, addresses, waits=True)


def all_in_place(node: SharedNode, call: Any, addresses: Sequence[int]) -> Any:
    """Let all ranks work on the arrays of all, which lie in shared memory or are only read."""
    return _take(node, call, SHARED[call.kind].take_direct, addresses, waits=True)


def some_in_place(node: SharedNode, call: Any, addresses: Sequence[int]) -> Any:
    """Take what this rank wants; whose own array is read waits until the others have, too."""
    waits = lies_in_place(addresses[node.rank])
    return _take(node, call, SHARED[call.kind].take, addresses, waits=waits)


def copies(node: SharedNode, call: Any, addresses: Sequence[int]) -> Any:
    """Take what this rank wants from copies, for which nobody waits: see [Note: two turns]."""
    return _take(node, call, SHARED[call.kind].take, addresses, waits=None)


def pipelined(node: SharedNode, call: Any, addresses: Sequence[int]) -> None:
    """Reduce through the staging memory, part by part."""
    reduce_pipelined(node, call)


def _take(
    node: SharedNode, call: AnyArrays, take: Any, addresses: Sequence[int], *, waits: bool | None
) -> Any:
    """Take what is wanted; find out who has died where memory cannot be reached."""
    row = SHARED[call.kind]
    places = node.places(addresses, row.part(call, node.rank, node.size) if row.part else 0)
    try:
        result = take(node, call, places)
    except TransportError as error:
        stop(node, call, error)
    if waits is not None:
        node.finish(call, wait=waits)
    return result


def stop(node: SharedNode, call: AnyArrays, error: TransportError) -> NoReturn:
    """Raise why an operation has stopped on its way: who has died, else what the system says."""

    def look() -> bool:
        node.check_alive(call, range(node.size))
        return False

    is_dying = getattr(error.__cause__, "errno", None) == errno.ESRCH
    poll(look, _DYING_S if is_dying else 0.0)
    raise error
