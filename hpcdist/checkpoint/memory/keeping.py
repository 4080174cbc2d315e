"""Which parts of arrays each rank keeps: its own share, and those of the ranks it is a buddy of.

Pure. What several ranks hold is divided among them, as for a checkpoint on disk. A buddy that holds
a part itself takes the copy from there, so only what one rank alone holds is sent. What a rank has
to send stands first among its own parts, and can be sent as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcdist.checkpoint.boxes import contains
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.plan import Array, Held, Share, join_holdings, share_out
from hpcdist.named_tuple import NamedTuple


class Kept(NamedTuple):
    """A part of an array that is kept, and its bytes."""

    share: Share
    array: Array
    nbytes: int


class Copied(NamedTuple):
    """Copies that a rank keeps for another: what it is sent, in a turn, and what it has itself."""

    turn: int
    owner: int
    sent: list[Kept]
    here: list[Kept]


class Sending(NamedTuple):
    """To which rank go how many bytes of one's own parts, from the first one on."""

    buddy: int
    nbytes: int


class Keeping(NamedTuple):
    """What one rank keeps, sends and gets.

    In each turn every rank sends to one buddy. It may get from several, where nodes are unequal, or
    from none; in a turn these are in ascending order.
    """

    own: list[Kept]
    sendings: list[Sending]
    copies: list[Copied]


def plan_keeping(
    everyone: Sequence[Sequence[Held]],
    ranks: Sequence[int],
    buddies: Sequence[Sequence[int]],
) -> list[Keeping]:
    """Return which part of all holdings each rank keeps.

    Args:
        everyone: what each rank of the group holds.
        ranks: their world ranks, for messages.
        buddies: for each rank those that keep copies of its parts; equally many for each.

    Raises:
        MismatchError: two ranks differ about an array's shape or dtype.
        UsageError: elements of an array are held by no rank, or two ranks hold boxes of it that
            overlap without being the same.

    """
    arrays, shared = join_holdings(everyone, ranks)
    shares = share_out(arrays, shared, len(everyone))
    boxes = [_by_name(held) for held in everyone]
    kept = [
        [_kept(share, arrays) for share in _in_order(own, boxes, buddies[rank])]
        for rank, own in enumerate(shares)
    ]
    plans = [Keeping(own, [], []) for own in kept]
    for rank, chosen in enumerate(buddies):
        for buddy in chosen:
            count = _count_to_send(kept[rank], boxes[buddy])
            nbytes = sum(each.nbytes for each in kept[rank][:count])
            plans[rank].sendings.append(Sending(buddy, nbytes))
    for turn in range(len(buddies[0])):
        for rank, chosen in enumerate(buddies):
            buddy = chosen[turn]
            count = _count_to_send(kept[rank], boxes[buddy])
            plans[buddy].copies.append(Copied(turn, rank, kept[rank][:count], kept[rank][count:]))
    return plans


_Boxes = Mapping[str, Sequence[Held]]


def _by_name(held: Sequence[Held]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for each in held:
        found.setdefault(each.name, []).append(each)
    return found


def _holds(boxes: _Boxes, share: Share) -> bool:
    return any(contains(each.box, share.box) for each in boxes.get(share.name, ()))


def _in_order(
    shares: Sequence[Share], boxes: Sequence[_Boxes], buddies: Sequence[int]
) -> list[Share]:
    """Return a rank's shares, first those that most of its buddies do not hold."""
    return sorted(shares, key=lambda share: sum(_holds(boxes[each], share) for each in buddies))


def _count_to_send(own: Sequence[Kept], boxes: _Boxes) -> int:
    """Return how many of a rank's parts, from the first on, have all that its buddy lacks."""
    lacking = [index for index, each in enumerate(own) if not _holds(boxes, each.share)]
    return lacking[-1] + 1 if lacking else 0


def _kept(share: Share, arrays: Mapping[str, Array]) -> Kept:
    array = arrays[share.name]
    return Kept(share, array, share.box.size * dtype_of_name(array.dtype).itemsize)
