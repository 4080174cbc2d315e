"""Who writes what: every element of every array exactly once, spread evenly over the ranks.

Pure: ranks say which boxes of arrays they hold (`Held`), `join_holdings` makes sure that nothing
is missing, and `share_out` gives every box, or parts of it, to one of its holders.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from hpcdist.checkpoint.boxes import Box, Shape, row_size, split
from hpcdist.checkpoint.cover import Flaw, flaw_of
from hpcdist.checkpoint.formats import DtypeName, dtype_of_name
from hpcdist.errors import MismatchError, UsageError
from hpcdist.named_tuple import NamedTuple

CUT = 1 << 20
"""Arrays are cut only at multiples of this many bytes, and not into smaller parts."""


class Held(NamedTuple):
    """A rank's part of an array of this shape: a box, the simplest of its elements."""

    name: str
    dtype: DtypeName
    shape: Shape
    box: Box


class Array(NamedTuple):
    """A whole array."""

    dtype: DtypeName
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Shared(NamedTuple):
    """A box of an array, and the ranks that hold it."""

    name: str
    box: Box
    holders: tuple[int, ...]


class Share(NamedTuple):
    """A box of an array that one rank writes."""

    name: str
    box: Box


def join_holdings(
    everyone: Sequence[Sequence[Held]], ranks: Sequence[int]
) -> tuple[dict[str, Array], list[Shared]]:
    """Return all arrays, and who holds which boxes of them.

    Args:
        everyone: for each rank of the group what it holds.
        ranks: their world ranks, for messages.

    Raises:
        MismatchError: two ranks differ about an array's shape or dtype.
        UsageError: elements of an array are held by no rank, or two ranks hold boxes of it that
            overlap without being the same.

    """
    arrays: dict[str, Array] = {}
    first: dict[str, int] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for held, members in _alike(everyone):
        for name, dtype, shape, box in held:
            array = Array(dtype, shape)
            known = arrays.setdefault(name, array)
            rank = first.setdefault(name, members[0])
            if known != array:
                raise MismatchError(
                    f"the ranks have different arrays {name!r}: rank {ranks[rank]} has "
                    f"{_describe_array(known)}, but rank {ranks[members[0]]} has "
                    f"{_describe_array(array)}. Give different arrays different keys"
                )
            if box.size or array.size == 0:
                holders[name][box] += members
    for name, array in arrays.items():
        _check_whole(name, array, holders[name])
    shared = [
        Shared(name, box, tuple(sorted(members)))
        for name in arrays
        for box, members in sorted(holders[name].items())
    ]
    return arrays, shared


def _alike(everyone: Sequence[Sequence[Held]]) -> Iterable[tuple[Sequence[Held], list[int]]]:
    """Group the ranks that hold the same."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank, held in enumerate(everyone):
        members[repr(held)].append(rank)
    return [(everyone[group[0]], group) for group in members.values()]


def _check_whole(name: str, array: Array, boxes: Collection[Box]) -> None:
    flaw = flaw_of(boxes, array.shape)
    if flaw is None:
        return
    if flaw.is_double:
        raise UsageError(
            f"ranks hold overlapping parts of {name!r}: {_elements(flaw)} are in two of them; give "
            "each element to one rank, or the same part to several"
        )
    extent = array.size if flaw.box.is_run else f"the shape {array.shape}"
    raise UsageError(
        f"no rank has the {_elements(flaw)} of {name!r}, which has {extent}; "
        "let all ranks that hold parts of it save together"
    )


def _elements(flaw: Flaw) -> str:
    box = flaw.box
    return f"elements {box.offsets[0]} to {box.ends[0] - 1}" if box.is_run else f"elements {box}"


def _describe_array(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"


def share_out(
    arrays: Mapping[str, Array], shared: Iterable[Shared], size: int
) -> list[list[Share]]:
    """Return what each of `size` ranks writes, so that all write nearly the same number of bytes.

    A box goes to ranks that hold it. Boxes with the fewest holders are given away first.
    """
    itemsizes = {name: dtype_of_name(array.dtype).itemsize for name, array in arrays.items()}
    shares: list[list[Share]] = [[] for _ in range(size)]
    loads = [0] * size
    by_holders: dict[tuple[int, ...], list[Shared]] = defaultdict(list)
    for each in shared:
        by_holders[each.holders].append(each)
    for holders in sorted(by_holders, key=len):
        same = by_holders[holders]
        nbytes = sum(each.box.size * itemsizes[each.name] for each in same)
        rooms = _rooms([loads[rank] for rank in holders], nbytes)
        for rank, share in _deal(same, itemsizes, list(zip(holders, rooms, strict=True))):
            shares[rank].append(share)
            loads[rank] += share.box.size * itemsizes[share.name]
    return shares


def _rooms(loads: Sequence[int], nbytes: int) -> list[int]:
    """Return how many of `nbytes` each rank takes, so that all are filled up to one level."""
    ordered = sorted(loads)
    below = 0
    for count, load in enumerate(ordered, 1):
        below += load
        level = -(-(nbytes + below) // count)
        if count == len(ordered) or level <= ordered[count]:
            break
    return [max(0, level - load) for load in loads]


def _deal(
    shared: Iterable[Shared], itemsizes: Mapping[str, int], rooms: Iterable[tuple[int, int]]
) -> Iterable[tuple[int, Share]]:
    """Give boxes to ranks in turn, to each until its room is full; the last one takes the rest."""
    left = deque(rooms)
    rank, room = left.popleft()
    for name, box, _ in shared:
        itemsize, rest = itemsizes[name], box
        while left and (rows := _rows_for(rest, itemsize, room)) is not None:
            mine, rest = split(rest, rows)
            if rows:
                yield rank, Share(name, mine)
            room -= mine.size * itemsize
            rank, more = left.popleft()
            room += more
        yield rank, Share(name, rest)  # an empty array is written, too
        room -= rest.size * itemsize


def _rows_for(box: Box, itemsize: int, room: int) -> int | None:
    """Return how many rows of a box go to a rank with this room; None for all if near enough."""
    nbytes = box.size * itemsize
    row = row_size(box) * itemsize
    least = max(row, CUT)
    if not nbytes or nbytes <= room + min(nbytes, least) // 2:
        return None
    return max(0, room) // least * least // row
