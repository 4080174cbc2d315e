"""Large objects between the ranks of a node: written once, read in place.

A sender writes its pickles into a segment of their own. Receivers map it privately and unpickle
arrays that lie in it: pages are shared until somebody writes to them, and then copied for that
rank alone (copy on write). So an array broadcast to all ranks of a node is in memory once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

from hpcdist.arrays.pickled import EAGER, Pickled, buffer_lengths
from hpcdist.errors import TransportError
from hpcdist.transport.call.call import Collective, Objects, refused
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.verbs import verb_of
from hpcdist.transport.shm.control import EAGER_BYTES, PAYLOAD
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.shm.segment import Segment, open_segment
from hpcdist.transport.waiting.polling import to_the_end

LARGE = 256 << 10
"""Pickles of at least this many bytes go through segments, and with them those of other ranks."""

_PAGE = 4096
_LINE = 64
_PAIR = struct.Struct("2q")
_PLACE = struct.Struct("q")

_ONE_SENDER = frozenset({Kind.BROADCAST_OBJECT_LIST, Kind.SCATTER_OBJECT_LIST})
_PER_RECEIVER = frozenset({Kind.SCATTER_OBJECT_LIST, Kind.ALL_TO_ALL_OBJECT})


def exchange_objects(context: MpiContext, node: SharedNode, call: Objects) -> Any:
    """Agree on `call`, then run it: small pickles by the control block, large ones by segments.

    Very small ones of one sender may lie there before all agree: [Note: eager operations].
    """
    if call.kind in _ONE_SENDER:
        given = bytearray(EAGER_BYTES)
        assert context.agreement is not None
        if context.agreement.take_given(call, given, 0):
            return [_for_rank(call, given, node.rank)]
    try:
        descriptor = _new_segment(call, node.rank)
    except OSError as error:  # no descriptor is left: nobody goes on
        reason = TransportError(f"no memory for a large object: {error}; see `ulimit -n`")
        return context.agree(refused(call, reason))
    try:
        detail = context.agree(call, descriptor + 1, _payload(call, node))
        return exchange_agreed(context, node, call, detail, descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # its memory stays as long as somebody maps it


def exchange_agreed(
    context: MpiContext,
    node: SharedNode,
    call: Objects,
    detail: tuple[int, int],
    descriptor: int = -1,
) -> Any:
    """Run `call`, on which all ranks have agreed; see `exchange_objects`."""
    if _in_segments(call, detail):
        received, failed = to_the_end(_Large(context, node, call, descriptor), of_operation=True)
        return by_mpi(context, node, call, detail) if failed else received
    if objects_go_by_mpi(node, call, detail):
        return by_mpi(context, node, call, detail)
    return _exchange_small(node, call)


def by_mpi(context: MpiContext, node: SharedNode, call: Collective, detail: tuple[int, int]) -> Any:
    """Run what the ranks have agreed on by MPI, where nothing of theirs is used here."""
    node.enter(call)
    return end_by_mpi(context, node, call, detail)


def end_by_mpi(context: MpiContext, node: SharedNode, call: Collective, detail: Any) -> Any:
    """Let MPI end what all ranks have entered.

    It ends here when it begins there: from then on no interrupt keeps this rank from it.
    """

    def perform() -> Any:
        node.end()
        return verb_of(call.kind)(context, call, detail)

    return context.to_its_end(call, perform)


def objects_go_by_mpi(node: SharedNode, call: Objects, detail: tuple[int, int]) -> bool:
    """Say, after the agreement, whether MPI carries the pickles."""
    return detail[1] > small_up_to(call, node.size) and not _in_segments(call, detail)


def small_up_to(call: Objects, size: int) -> int:
    """Return how long the longest pickle may be for all to travel on the control block."""
    if call.kind not in _PER_RECEIVER:
        return EAGER
    return min(EAGER, (PAYLOAD - _PLACE.size * (size + 1)) // size)


def _payload(call: Objects, node: SharedNode) -> Any:
    """Return what this rank publishes on the control block: its small pickles, or None."""
    if not _sends(call, node.rank) or call.detail > small_up_to(call, node.size):
        return None
    if call.kind not in _PER_RECEIVER:
        return call.pickles[0].meta
    metas = [pickled.meta for pickled in call.pickles]
    ends = accumulate(map(len, metas), initial=_PLACE.size * (node.size + 1))
    return b"".join([*map(_PLACE.pack, ends), *metas])


def _sends(call: Objects, rank: int) -> bool:
    return call.kind not in _ONE_SENDER or rank == call.root


def _exchange_small(node: SharedNode, call: Objects) -> list[Pickled] | None:
    if call.kind is Kind.GATHER_OBJECT and node.rank != call.root:
        return None
    if call.kind is Kind.BROADCAST_OBJECT_LIST and node.rank == call.root:
        return [call.pickles[0]]
    senders = [call.root] if call.kind in _ONE_SENDER else range(node.size)
    return [_in_control_block(node, call, rank) for rank in senders]


def _in_control_block(node: SharedNode, call: Objects, sender: int) -> Pickled:
    """Return the pickle of a sender for this rank."""
    memory, _, start = node.payloads[node.control.turn][sender]
    return _for_rank(call, memory[start : start + PAYLOAD], node.rank)


def _for_rank(call: Objects, given: Any, rank: int) -> Pickled:
    """Return the pickle for a rank in what one has given; pickle ignores what follows its end."""
    start, end = 0, EAGER
    if call.kind in _PER_RECEIVER:
        start, end = (
            _PLACE.unpack_from(given, _PLACE.size * place)[0] for place in (rank, rank + 1)
        )
    return Pickled(bytes(given[start:end]))


def _new_segment(call: Objects, rank: int) -> int:
    """Return a new, empty segment's descriptor if this rank has pickles for one, else -1."""
    if not _sends(call, rank) or call.detail <= EAGER:
        return -1
    return os.memfd_create("hpcdist-pickles", os.MFD_CLOEXEC)


def _in_segments(call: Objects, detail: tuple[int, int]) -> bool:
    """Say, after the agreement, whether parcels go through segments (some are large)."""
    all_in_segments = call.kind is not Kind.ALL_TO_ALL_OBJECT or detail[0] > EAGER
    return detail[1] >= LARGE and all_in_segments


@final
class _Large:
    """An exchange of large pickles on which all have agreed.

    Called, it returns what this rank has received, and whether a rank could not: then nothing is
    changed. The others wait for this rank at every step, so a call goes on where an interrupt has
    left the one before: what has been done is noted in the same moment.
    """

    def __init__(
        self, context: MpiContext, node: SharedNode, call: Objects, descriptor: int
    ) -> None:
        self._context, self._node, self._call, self._descriptor = context, node, call, descriptor
        self._agreed = node.control.sequence
        self._written, self._read = list[bool](), list[bool]()
        self._received: list[Pickled] | None = None
        self._failed = False

    def __call__(self) -> tuple[list[Pickled] | None, bool]:
        node, call = self._node, self._call
        if not self._written:
            node.enter(call)
            self._failed = self._descriptor >= 0 and not _is_written(self._descriptor, call.pickles)
        node.step(call, self._written)
        if not self._read and not self._failed:
            self._receive()
        node.step(call, self._read)
        node.end()
        return self._received, self._has_failed(call._replace(detail=int(self._failed)))

    def _receive(self) -> None:
        node, call = self._node, self._call
        kind, rank, root = call.kind, node.rank, call.root
        if kind is Kind.GATHER_OBJECT and rank != root:
            return
        index = rank if kind in _PER_RECEIVER else 0
        senders = [root] if kind in _ONE_SENDER else range(node.size)
        try:
            self._received = [
                _own(call, index) if sender == rank else _receive(node, call, sender, index)
                for sender in senders
            ]
        except OSError:  # no room, or this process may not look into that of a sender any more
            self._failed = True

    def _has_failed(self, call: Objects) -> bool:
        """Return whether a rank has; nobody goes on before all have told."""
        assert self._context.agreement is not None
        if self._node.control.sequence == self._agreed:
            return bool(self._context.agree(call)[1])
        return bool(self._context.agreement.end_posted(call)[1])


def _is_written(descriptor: int, pickles: Sequence[Pickled]) -> bool:
    """Write the pickles; whoever opens a segment that could not be written finds it empty."""
    try:
        _write(descriptor, pickles)
    except OSError:
        os.truncate(descriptor, 0)
        return False
    return True


def _receive(node: SharedNode, call: Objects, sender: int, index: int) -> Pickled:
    segment = node.pickle_segment(sender)
    if segment is None:  # a small one, on the control block
        return _in_control_block(node, call, sender)
    return _read(segment, index)


def _own(call: Objects, index: int) -> Pickled:
    pickled = call.pickles[index]
    return pickled if call.kind is Kind.BROADCAST_OBJECT_LIST else pickled.copy()


def _write(descriptor: int, pickles: Sequence[Pickled]) -> None:
    """Write a table of (where, length of the pickle), then pickles and buffers, aligned."""
    table = bytearray(_PAIR.size * len(pickles))
    end = _rounded(len(table), _PAGE)
    for number, pickled in enumerate(pickles):
        _PAIR.pack_into(table, number * _PAIR.size, end, len(pickled.meta))
        for part in (pickled.meta, *pickled.buffers):
            end = _rounded(_write_at(descriptor, part, end), _LINE)
        end = _rounded(end, _PAGE)
    os.truncate(descriptor, max(end, _PAGE))
    _write_at(descriptor, table, 0)


def _write_at(descriptor: int, data: Any, start: int) -> int:
    """Write all of `data` from `start` on and return where it ends."""
    raw = memoryview(data).cast("B")
    while raw.nbytes:
        written = os.pwrite(descriptor, raw, start)
        raw, start = raw[written:], start + written
    return start


def _read(segment: Segment, index: int) -> Pickled:
    """Map a pickle; its buffers keep the mapping alive."""
    whole = open_segment(segment, private=True).data
    start, length = _PAIR.unpack_from(whole, index * _PAIR.size)
    meta = whole[start : start + length]
    start = _rounded(start + length, _LINE)
    buffers = []
    for nbytes in buffer_lengths(meta):
        buffers.append(whole[start : start + nbytes])
        start = _rounded(start + nbytes, _LINE)
    return Pickled(meta, buffers)


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
