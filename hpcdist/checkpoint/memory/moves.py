"""What travels from the ranks that keep parts of arrays to those that want them. Pure.

What a rank keeps itself it takes from there. Otherwise it gets a part from the one of its holders
that has sent least, on its own node if there is one. All travels in rounds, in which no rank sends
or gets much more than `ROUND` bytes, so that little memory is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcdist.checkpoint.boxes import Box
from hpcdist.checkpoint.copies import Copy, copies_between
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.memory.choice import Stored
from hpcdist.checkpoint.plan import Array
from hpcdist.named_tuple import NamedTuple

ROUND = 64 << 20
"""So many bytes a rank sends or gets at once."""


class Wish(NamedTuple):
    """A part of an array that a rank wants."""

    name: str
    box: Box


class Move(NamedTuple):
    """Elements that go from one rank's memory to another's, or stay on a rank.

    Attributes:
        source: the rank that keeps them.
        target: the rank that wants them.
        name: the array.
        box: the part of it that is kept.
        wish: the number of the wish that they fulfil, or a part of it.
        copy: which of the elements of the part, and where to.
        nbytes: how many bytes they are.
        round: when they travel.

    """

    source: int
    target: int
    name: str
    box: Box
    wish: int
    copy: Copy
    nbytes: int
    round: int


class Moves(NamedTuple):
    """What one rank sends, gets, and has itself, and in how many rounds."""

    sent: list[Move]
    received: list[Move]
    here: list[Move]
    rounds: int


def plan_moves(
    stored: Stored,
    wanted: Sequence[Sequence[Wish]],
    arrays: Mapping[str, Array],
    nodes: Sequence[int],
    limit: int = ROUND,
) -> list[Moves]:
    """Return for each rank its sends and receives, so that all get the parts they want.

    Args:
        stored: who keeps what; every element of every array that is wanted.
        wanted: for each rank what it wants.
        arrays: what is kept.
        nodes: for each rank its node.
        limit: bytes that a rank sends or gets in a round.

    """
    plans = [Moves([], [], [], 0) for _ in wanted]
    sent = [0] * len(wanted)
    out, into = _Lane(len(wanted), limit), _Lane(len(wanted), limit)
    rounds = 0
    for target, wishes in enumerate(wanted):
        for number, (name, box) in enumerate(wishes):
            array = arrays[name]
            itemsize = dtype_of_name(array.dtype).itemsize
            for part, holders in stored[name].items():
                copies = copies_between(part, box, array.shape)
                if not copies:
                    continue
                source = _source(holders, target, sent, nodes)
                for copy in copies:
                    nbytes = copy.size * itemsize
                    move = Move(source, target, name, part, number, copy, nbytes, 0)
                    if source == target:
                        plans[target].here.append(move)
                        continue
                    sent[source] += nbytes
                    when = max(out.free(source, nbytes), into.free(target, nbytes))
                    out.fill(source, when, nbytes)
                    into.fill(target, when, nbytes)
                    plans[source].sent.append(move._replace(round=when))
                    plans[target].received.append(move._replace(round=when))
                    rounds = max(rounds, when + 1)
    return [each._replace(rounds=rounds) for each in plans]


def _source(holders: Sequence[int], target: int, sent: Sequence[int], nodes: Sequence[int]) -> int:
    """Return which of the holders of a part gives it."""
    if target in holders:
        return target
    return min(holders, key=lambda rank: (nodes[rank] != nodes[target], sent[rank], rank))


class _Lane:
    """How far the rounds are filled in which each rank sends, or gets."""

    def __init__(self, size: int, limit: int) -> None:
        self._limit = limit
        self._filled = [(0, 0)] * size

    def free(self, rank: int, nbytes: int) -> int:
        """Return the first round that has room for so many bytes."""
        number, filled = self._filled[rank]
        return number if not filled or filled + nbytes <= self._limit else number + 1

    def fill(self, rank: int, number: int, nbytes: int) -> None:
        """Use room of a round, the latest so far."""
        last, filled = self._filled[rank]
        self._filled[rank] = number, nbytes + (filled if number == last else 0)
