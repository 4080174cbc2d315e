"""Who writes what: every element of every array exactly once, spread evenly over the ranks.

Pure: ranks say which runs of elements they hold (`Held`), `join_holdings` makes sure that nothing
is missing, and `share_out` gives every run, or parts of it, to one of its holders.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hpcdist.checkpoint.formats import DtypeName, dtype_of_name
from hpcdist.errors import MismatchError, UsageError

CUT = 1 << 20
"""Arrays are cut only at multiples of this many bytes, and not into smaller parts."""


class Held(NamedTuple):
    """What a rank holds of an array: the elements from `start` to before `stop`, flattened."""

    name: str
    dtype: DtypeName
    shape: tuple[int, ...]
    start: int
    stop: int


class Array(NamedTuple):
    """A whole array."""

    dtype: DtypeName
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Run(NamedTuple):
    """Elements of an array that the same ranks hold."""

    name: str
    start: int
    stop: int
    holders: tuple[int, ...]


class Span(NamedTuple):
    """What a rank writes of an array: elements from `start` to before `stop`."""

    name: str
    start: int
    stop: int


def join_holdings(
    everyone: Sequence[Sequence[Held]], ranks: Sequence[int]
) -> tuple[dict[str, Array], list[Run]]:
    """Return all arrays, and who holds which runs of them.

    Args:
        everyone: for each rank of the group what it holds.
        ranks: their world ranks, for messages.

    Raises:
        MismatchError: two ranks differ about an array's shape or dtype.
        UsageError: elements of an array are held by no rank, or two ranks hold runs of it that
            overlap without being the same.

    """
    arrays: dict[str, Array] = {}
    first: dict[str, int] = {}
    holders: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for held, members in _alike(everyone):
        for name, dtype, shape, start, stop in held:
            array = Array(dtype, shape)
            known = arrays.setdefault(name, array)
            rank = first.setdefault(name, members[0])
            if known != array:
                raise MismatchError(
                    f"the ranks have different arrays {name!r}: rank {ranks[rank]} has "
                    f"{_in_words(known)}, but rank {ranks[members[0]]} has {_in_words(array)}. "
                    "Give different arrays different keys"
                )
            if stop > start or array.size == 0:
                holders[name][start, stop] += members
    for name, array in arrays.items():
        _check_whole(name, array.size, sorted(holders[name]))
    runs = [
        Run(name, start, stop, tuple(sorted(members)))
        for name in arrays
        for (start, stop), members in sorted(holders[name].items())
    ]
    return arrays, runs


def _alike(everyone: Sequence[Sequence[Held]]) -> Iterable[tuple[Sequence[Held], list[int]]]:
    """Group the ranks that hold the same."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank, held in enumerate(everyone):
        members[repr(held)].append(rank)
    return [(everyone[group[0]], group) for group in members.values()]


def _check_whole(name: str, size: int, runs: Sequence[tuple[int, int]]) -> None:
    position = 0
    for start, stop in runs:
        if start < position:
            raise UsageError(
                f"ranks hold overlapping parts of {name!r}: elements {start} to {position - 1} are "
                "in two of them; give each element to one rank, or the same part to several"
            )
        if start > position:
            break
        position = stop
    if position < size:
        missing = next((start for start, _ in runs if start > position), size)
        raise UsageError(
            f"no rank has the elements {position} to {missing - 1} of {name!r}, which has {size}; "
            "let all ranks that hold parts of it save together"
        )


def _in_words(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"


def share_out(arrays: Mapping[str, Array], runs: Iterable[Run], size: int) -> list[list[Span]]:
    """Return what each of `size` ranks writes, so that all write nearly the same number of bytes.

    A run goes to ranks that hold it. Runs with the fewest holders are given away first.
    """
    itemsizes = {name: dtype_of_name(array.dtype).itemsize for name, array in arrays.items()}
    spans: list[list[Span]] = [[] for _ in range(size)]
    loads = [0] * size
    by_holders: dict[tuple[int, ...], list[Run]] = defaultdict(list)
    for run in runs:
        by_holders[run.holders].append(run)
    for holders in sorted(by_holders, key=len):
        same = by_holders[holders]
        nbytes = sum((run.stop - run.start) * itemsizes[run.name] for run in same)
        rooms = _rooms([loads[rank] for rank in holders], nbytes)
        for rank, span in _deal(same, itemsizes, list(zip(holders, rooms, strict=True))):
            spans[rank].append(span)
            loads[rank] += (span.stop - span.start) * itemsizes[span.name]
    return spans


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
    runs: Iterable[Run], itemsizes: Mapping[str, int], rooms: Iterable[tuple[int, int]]
) -> Iterable[tuple[int, Span]]:
    """Give `runs` to ranks in turn, each until its room is full; the last one takes the rest."""
    left = deque(rooms)
    rank, room = left.popleft()
    for name, start, stop, _ in runs:
        begun = False
        while start < stop or not begun:  # an empty array is written, too
            begun = True
            cut = _cut(start, stop, itemsizes[name], room) if left else stop
            if cut > start or start == stop:
                yield rank, Span(name, start, cut)
            room -= (cut - start) * itemsizes[name]
            start = cut
            if start < stop:
                rank, more = left.popleft()
                room += more


def _cut(start: int, stop: int, itemsize: int, room: int) -> int:
    """Return up to where a run goes to a rank with this room: all of it if that is near enough."""
    nbytes = (stop - start) * itemsize
    if nbytes <= room + min(nbytes, CUT) // 2:
        return stop
    return start + max(0, room) // CUT * CUT // itemsize
