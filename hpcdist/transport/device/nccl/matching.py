"""Batches of messages over NCCL: which message meets which, with plain integers.

NCCL's messages have no tags: the nth one that a rank sends to another meets the nth that the other
receives from it. So before a batch is put on the device, every two ranks that exchange messages in
it tell each other what they mean to send and to receive (`Entry`), and both bring their part into
one order: by tag, then by dtype, then as in the list. This is the matching of messages in host
memory, as far as matching messages are in one batch on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from hpcdist.arrays.device import DeviceArray
from hpcdist.arrays.dtypes import code_in_tag, name_of_code
from hpcdist.errors import MismatchError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Message
from hpcdist.transport.call.kinds import Kind


class Entry(NamedTuple):
    """One message of a batch, as one of its two ranks sees it."""

    sends: bool
    tag: int
    code: int
    nbytes: int


class Transfer(NamedTuple):
    """One message as NCCL moves it; `peer` is a rank of the group."""

    sends: bool
    data: DeviceArray
    peer: int


def entry_of(call: Message) -> Entry:
    """Return what a send or receive is to the rank at its other end."""
    sends = call.kind is Kind.SEND
    return Entry(sends, call.tag, code_in_tag(call.dtype), call.nbytes)


def transfer_of(call: Message) -> Transfer:
    """Return what NCCL is to move for a send or receive."""
    return Transfer(call.kind is Kind.SEND, call.data, call.root)


def by_peer(calls: Sequence[Message]) -> dict[int, list[Message]]:
    """Return the messages of a batch for each rank of the group that they go to or come from."""
    found: defaultdict[int, list[Message]] = defaultdict(list)
    for call in calls:
        found[call.root].append(call)
    return dict(found)


def plan_pair(mine: Sequence[Entry], theirs: Sequence[Entry], ranks: tuple[int, int]) -> list[int]:
    """Return the places in `mine` of what is to be put on the device, in the order of doing so.

    The other rank, which plans with the two lists exchanged, comes to the same order. Messages
    without bytes are matched, too, but nothing is put on the device for them.

    Args:
        mine: what this rank means to do with the other, in the order of its list.
        theirs: what the other means to do with this one; of a rank and itself, `mine` again.
        ranks: the world ranks of this rank and of the other.

    Raises:
        MismatchError: not every message has its counterpart; in the same words on both ranks.

    """
    own, other = _sides(mine), _sides(theirs)
    flows = [
        (ranks, [mine[place] for place in own[0]], [theirs[place] for place in other[1]]),
        (ranks[::-1], [theirs[place] for place in other[0]], [mine[place] for place in own[1]]),
    ]
    for between, sent, received in sorted(flows):
        _check_matches(sent, received, *between)
    return [place for side in own for place in side if mine[place].nbytes]


def _sides(entries: Sequence[Entry]) -> tuple[list[int], list[int]]:
    """Return the places of what is sent and of what is received, in the order of matching."""
    order = sorted(range(len(entries)), key=lambda place: entries[place][1:3])
    sends = [place for place in order if entries[place].sends]
    return sends, [place for place in order if not entries[place].sends]


def _check_matches(
    sent: Sequence[Entry], received: Sequence[Entry], sender: int, receiver: int
) -> None:
    for out, into in zip_longest(sent, received):
        if out is None or into is None or out[1:] != into[1:]:
            raise MismatchError(
                f"the batches of ranks {sender} and {receiver} do not match; nothing was sent "
                f"between these two: rank {sender} sends {_count(sent)} to rank {receiver}, which "
                f"receives {_count(received)} from it. The first that differ, in the order of tag, "
                f"dtype and place in the list: {_words(out)} sent, {_words(into)} received. Let "
                "both ranks have the same messages in one batch_isend_irecv, with equal tags, "
                "dtypes and sizes"
            )


def _count(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} message{'s' if len(entries) != 1 else ''}"


def _words(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    return f"{entry.nbytes} bytes of {name_of_code(entry.code)} with tag {entry.tag}"
