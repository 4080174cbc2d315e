"""Boxes between the ranks of a node: published with the agreement, and read where they lie.

Where a rank's array lies is for itself to say, as the others see what it has published: it is
in the heap, or small enough for the control block or the staging memory, or copied to the heap for
this operation. One rank that finds no room for it is enough, and all send their boxes by MPI.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.boxes import bounds, volume, volume_of
from hpcdist.errors import TransportError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Exchange, Give, Read, refused
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.intranode_objects import end_by_mpi
from hpcdist.transport.shm.boxes import copy_box, fill, view_of
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.node import (
    IN_PAYLOAD,
    IN_STAGE,
    NOTHING,
    Place,
    SharedNode,
    lies_in_place,
)
from hpcdist.transport.tuning import STAGED_UP_TO


class _Offer(NamedTuple):
    """What a rank publishes; `memory` is where its boxes were copied to, to be kept for others.

    `placed` is what this rank has taken of itself already.
    """

    address: int
    payload: NumpyArray | None = None
    memory: NumpyArray | None = None
    placed: Read | None = None


def exchange_boxes(context: MpiContext, node: SharedNode, call: Exchange) -> None:
    """Agree on `call`, take what this rank reads, and wait for those who read its own array."""
    node.check_usable()
    try:
        call = send_apart(node, call)
        offer = _offer(node, call)
    except Exception as error:  # no memory, or a warning that the program makes an error
        reason = TransportError(f"an array cannot be copied for other ranks: {error}")
        reason.__cause__ = error
        context.agree(refused(call, reason))
        return
    detail = context.agree(call, offer.address, offer.payload, enters=True)
    addresses = node.control.addresses()
    if 0 in addresses:
        end_by_mpi(context, node, call, detail)
        return
    places = node.places(addresses)
    try:
        if offer.placed is not None:
            call = call._replace(reads=[read for read in call.reads if read is not offer.placed])
        fill(call, [_piece(node, call, read, places[read.rank]) for read in call.reads])
    finally:  # where this rank fails, too: others read its array, and wait for it
        read_in_place = [*map(lies_in_place, addresses)]
        if any(read_in_place):
            node.finish(call, wait=read_in_place[node.rank])


def send_apart(node: SharedNode, call: Exchange) -> Exchange:
    """Copy what is sent where filling `recv` would change it."""
    send = call.send
    if not np.may_share_memory(send, call.recv):
        return call
    room = node.heap.empty(send.nbytes)
    copied = np.empty_like(send) if room is None else room.view(send.dtype).reshape(send.shape)
    copy_box(copied, send)
    return call._replace(send=copied)


def _offer(node: SharedNode, call: Exchange) -> _Offer:
    """Find, or make, a place where the others can read this rank's array."""
    send = call.send
    gives = [give for give in call.gives if give.rank != node.rank]
    if not gives:
        return _Offer(NOTHING)
    if send.nbytes <= PAYLOAD:
        return _Offer(IN_PAYLOAD, send)
    address = node.shared_address(send)
    if address:
        return _Offer(address)
    if send.nbytes <= STAGED_UP_TO:
        copy_given(send, gives, node.staged(node.rank, 1 - node.control.turn, send.nbytes))
        return _Offer(IN_STAGE)
    placed = _placed(node, call)
    if placed is not None:
        return placed
    room = node.heap.empty(send.nbytes)
    if room is None:
        return _Offer(0)
    copy_given(send, gives, room)
    return _Offer(node.shared_address(room), memory=room)


def _placed(node: SharedNode, call: Exchange) -> _Offer | None:
    """Copy this rank's array to where it wants it itself, if that is whole and others see it."""
    for read in call.reads:
        own = read.rank == node.rank and volume_of(read.source) == math.prod(call.shape)
        target = view_of(call.recv, read.target)
        if own and call.rule is None and target.flags.c_contiguous:
            address = node.shared_address(target)
            if address:
                copy_box(target, call.send)
                return _Offer(address, placed=read)
    return None


def copy_given(send: NumpyArray, gives: list[Give], room: NumpyArray) -> None:
    """Copy the boxes that others take to their places in `room`, each once."""
    copied = room.view(send.dtype).reshape(send.shape)
    boxes = {bounds(give.source): give for give in gives}
    if sum(map(volume, boxes)) >= send.size:
        copy_box(copied, send)
        return
    for give in boxes.values():
        copy_box(view_of(copied, give.source), view_of(send, give.source))


def _piece(node: SharedNode, call: Exchange, read: Read, place: Place | None) -> Any:
    """Return what `read` takes, where it lies."""
    if read.rank == node.rank:
        return view_of(call.send, read.source)
    if place is None:
        raise TransportError(
            f"rank {node.ranks[read.rank]} gives nothing in {call.words}, of which rank "
            f"{node.ranks[node.rank]} takes {read.source}: this is a mistake in hpcdist"
        )
    return view_of(whole_at(call, read, place), read.source)


def whole_at(call: Exchange, read: Read, place: Place) -> Any:
    """Return the array of which `read` takes a box, as it lies in another rank's memory."""
    shape = (*read.shape, *call.send.shape[len(call.shape) :])
    return np.ndarray(shape, call.recv.dtype, place.memory, place.offset)
