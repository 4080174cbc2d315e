"""Boxes of a group that spans nodes: read where they lie inside a node, sent between nodes.

Each rank of a node tells the others there where they find its array, as `intranode_boxes` does.
While they read it, what crosses nodes is under way, in one message for each pair of ranks that
have anything for each other. A rank whose memory the others do not see sends messages to them, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Exchange, Give, Read
from hpcdist.transport.call.runs import cut
from hpcdist.transport.mpi.boxes import in_place, on_all_ranks
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.datatypes import block
from hpcdist.transport.mpi.intranode_boxes import copy_given, send_apart, whole_at
from hpcdist.transport.mpi.patience import finish
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.shm.boxes import counts_per_rank, fill, packed, unpacked, view_of
from hpcdist.transport.shm.node import NOTHING, Place, SharedNode
from hpcdist.transport.tuning import STAGED_UP_TO

WORTH_IT = 64 << 10
"""Bytes that a rank gives or takes from which on it pays to meet the ranks of the node."""
_ADDRESS = np.dtype(np.int64)
_STAGED = 1 << 62
_BY_MESSAGE = 0
_TOLD, _GIVEN = 0, 1
"""The turns of the staging memory: where addresses are, and small arrays."""


class _Messages(NamedTuple):
    """What crosses nodes, and the memory for it: for each rank a run that is sent, and taken."""

    given: Sequence[NumpyArray]
    taken: Sequence[NumpyArray]
    arrived: NumpyArray | None
    """Where boxes come to that are unpacked then; None where all come to where they belong."""
    reads: list[Read]


def exchange_between(context: MpiContext, node: SharedNode, call: Exchange) -> None:
    """Move the boxes of all ranks, which have agreed on `call`.

    They agree once more when every rank has the memory for it.
    """
    node.check_usable()
    near = {context.ranks.index(world): number for number, world in enumerate(node.ranks)}
    problem: Exception | None = None
    address, kept = NOTHING, None
    try:
        call = send_apart(node, call)
        address, kept = _offered(node, call, [give for give in call.gives if give.rank in near])
    except Exception as error:  # no memory, or a warning that the program makes an error
        problem = error
    _told(node, node.rank)[0] = address
    node.step(call)
    try:
        places = {
            rank: _place(node, number, int(_told(node, number)[0]))
            for rank, number in near.items()
            if rank != context.rank
        }
        seen_by = near if address != _BY_MESSAGE else ()

        def prepare() -> _Messages:
            if problem is not None:
                raise problem
            return _messages(context, call, places, seen_by)

        messages = on_all_ranks(context, call, prepare)
        _fill(context, call, places, messages)
    finally:  # where this rank fails, too: others read its array, and wait for it
        node.step(call)
        del kept


def _messages(
    context: MpiContext, call: Exchange, places: dict[int, Place | None], seen_by: Container[int]
) -> _Messages:
    """Return what is sent to ranks that do not see this one's array, and taken from such."""
    reads = [
        each for each in call.reads if each.rank != context.rank and places.get(each.rank) is None
    ]
    gives = [each for each in call.gives if each.rank != context.rank and each.rank not in seen_by]
    given = in_place(call.send, [(give.rank, give.source) for give in gives], context.size)
    if given is None:
        given = cut(packed(call, gives), counts_per_rank(call, gives, context.size))
    taken = None
    if call.rule is None:
        taken = in_place(call.recv, [(read.rank, read.target) for read in reads], context.size)
    if taken is not None:
        return _Messages(given, taken, None, reads)
    counts = counts_per_rank(call, reads, context.size)
    arrived = np.empty(sum(counts), call.recv.dtype)
    return _Messages(given, cut(arrived, counts), arrived, reads)


def _fill(
    context: MpiContext, call: Exchange, places: dict[int, Place | None], messages: _Messages
) -> None:
    """Take what lies on this node, while messages carry the rest."""
    requests = [
        *_started(context.comm.Irecv, messages.taken),
        *_started(context.comm.Isend, messages.given),
    ]
    far = {read.rank for read in messages.reads}
    here = [read for read in call.reads if read.rank not in far]
    try:
        pieces = [_piece(context, call, places, read) for read in here]
        if call.rule is None:
            fill(call._replace(reads=here), pieces)
    finally:  # where this rank fails, too: others wait for what it sends
        finish(context, context.named(call), requests)
    if messages.arrived is None:
        return
    others = unpacked(call, messages.reads, messages.arrived)
    if call.rule is None:
        fill(call._replace(reads=messages.reads), others)
        return
    sources = iter(pieces), iter(others)
    fill(call, [next(sources[read.rank in far]) for read in call.reads])


def _started(start: Any, runs: Sequence[NumpyArray]) -> Iterator[MPI.Request]:
    for rank, run in enumerate(runs):
        if run.size:
            yield start(block(run, run.nbytes), rank, Tag.PART)


def _piece(context: MpiContext, call: Exchange, places: dict[int, Place | None], read: Read) -> Any:
    if read.rank == context.rank:
        return view_of(call.send, read.source)
    place = places[read.rank]
    assert place is not None
    return view_of(whole_at(call, read, place), read.source)


# ---- what the ranks of a node tell each other


def _told(node: SharedNode, rank: int) -> NumpyArray:
    """Return where a rank says where its array is."""
    return node.staged(rank, _TOLD, _ADDRESS.itemsize).view(_ADDRESS)


def _offered(node: SharedNode, call: Exchange, gives: list[Give]) -> tuple[int, NumpyArray | None]:
    """Find, or make, a place where the ranks of the node can read this rank's array; see `_place`.

    Returns:
        What is told, and memory to be kept.

    """
    send = call.send
    if not gives:
        return NOTHING, None
    address = node.shared_address(send)
    if address:
        return address, None
    if send.nbytes <= STAGED_UP_TO:
        copy_given(send, gives, node.staged(node.rank, _GIVEN, send.nbytes))
        return _STAGED, None
    room = node.heap.empty(send.nbytes)
    if room is None:
        return _BY_MESSAGE, None
    copy_given(send, gives, room)
    return node.shared_address(room), room


def _place(node: SharedNode, rank: int, address: int) -> Place | None:
    """Return where the array of a rank of the node lies; None if it is sent, or nowhere."""
    if address in (_BY_MESSAGE, NOTHING):
        return None
    if address == _STAGED:
        memory = node.staged(rank, _GIVEN, STAGED_UP_TO)
        return Place(memory, 0, 0)
    return Place(node.heap_of(rank), 0, address - 1)
