"""`Stream`: the rows of this rank in one pass over the files, also from the middle of it.

[Note: legs] A pass may be made by several jobs, one after the other, on other numbers of ranks.
What each of them took is a `Leg`. The ranks of the first read the files, and each has rows in an
order of its own. Where a leg ends, its ranks leave the rest of their rows to those of the next:
fewer ranks take the rest of several, one after the other; of more ranks several share the rest of
one, in turn. So no leg has to know how many rows there are, and each row comes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np

from hpcdist.data.ahead import Ahead
from hpcdist.data.columns import Columns
from hpcdist.data.order import Keyed, keys_of
from hpcdist.data.reading import Lane
from hpcdist.named_tuple import NamedTuple

_TURN = 256
"""Rows that come from a reader before the next one has its turn."""


class Leg(NamedTuple):
    """A part of a pass that the same ranks made.

    Attributes:
        ranks: how many there were.
        readers: of each rank.
        rows: that each rank took, if it had so many.

    """

    ranks: int
    readers: int
    rows: int = 0

    def then(self, before: Sequence[Leg]) -> tuple[Leg, ...]:
        """Return the legs up to this one; it is none of its own where the ranks are the same."""
        if before and before[-1].ranks == self.ranks:
            last = before[-1]
            return (*before[:-1], last._replace(rows=last.rows + self.rows))
        return (*before, self)


def rows_of(
    legs: Sequence[Leg], rank: int, read: Callable[[int, Leg], Iterator[Columns]]
) -> Iterator[Columns]:
    """Return the rows that are left to a rank after the last leg; see [Note: legs].

    Args:
        legs: from the first on.
        rank: of the last leg.
        read: returns the rows of a rank of the first leg.

    """
    *before, last = legs
    if not before:
        return _without(read(rank, last), last.rows)
    ranks = before[-1].ranks
    sharers = range(rank % ranks, last.ranks, ranks)
    lines = range(rank, ranks, last.ranks) or [rank % ranks]
    rest = (block for line in lines for block in rows_of(before, line, read))
    return _without(_every(rest, sharers.index(rank), len(sharers)), last.rows)


def _without(rows: Iterator[Columns], left_out: int) -> Iterator[Columns]:
    """Leave out the first rows."""
    for block in rows:
        first = min(left_out, len(block))
        left_out -= first
        if first < len(block):
            yield block.slice(first, len(block))


def _every(rows: Iterator[Columns], first: int, step: int) -> Iterator[Columns]:
    """Return each row number `first`, `first` + `step`, ..."""
    for block in rows:
        yield block if step == 1 else block.take(np.arange(first, len(block), step))
        first = (first - len(block)) % step


def in_turn(readers: Sequence[Iterator[Columns]]) -> Iterator[Columns]:
    """Return the rows of readers, some of each in turn, however they come in blocks."""
    left = [_Rows(reader) for reader in readers]
    while left:
        for reader in [*left]:
            rows = _TURN
            while rows and (block := reader.some(rows)) is not None:
                rows -= len(block)
                yield block
            if rows:
                left.remove(reader)


def shuffled(rows: Iterator[Columns], size: int, *numbers: int) -> Iterator[Columns]:
    """Return rows in an order that these numbers decide: of `size` that wait, half leave at random.

    It depends on the order of the rows, but not on the blocks in which they come.
    """
    source, rest, rounds = _Rows(rows), Columns({}), 0
    while True:
        waiting = source.take(size - len(rest))
        if waiting is None and not len(rest):
            return
        pool = Columns.concat([each for each in (rest, waiting) if each is not None and len(each)])
        order = Keyed(len(pool), keys_of(*numbers, rounds)).samples(np.arange(len(pool)))
        leaving = -(-size // 2) if len(pool) == size else len(pool)
        yield pool.take(order[:leaving])
        rest, rounds = pool.take(order[leaving:]), rounds + 1


@final
class _Rows:
    """Rows that come in blocks, taken in any numbers."""

    def __init__(self, blocks: Iterator[Columns]) -> None:
        self._blocks = blocks
        self._block = Columns({})

    def some(self, most: int) -> Columns | None:
        """Return some rows, at most so many; None at the end."""
        while not len(self._block):
            block = next(self._blocks, None)
            if block is None:
                return None
            self._block = block
        taken = self._block.slice(0, min(most, len(self._block)))
        self._block = self._block.slice(len(taken), len(self._block))
        return taken

    def take(self, rows: int) -> Columns | None:
        """Return the next so many rows, or fewer at the end; None if there are none left."""
        taken: list[Columns] = []
        while rows and (block := self.some(rows)) is not None:
            taken.append(block)
            rows -= len(block)
        return Columns.concat(taken) if taken else None


@final
class Stream:
    """The rows of a rank, which threads read ahead while the block is open.

    Args:
        legs: the pass so far, and this rank's part at its end.
        rank: this one.
        lanes: returns what the readers of a rank of the first leg read.
        depth: blocks of rows that wait for each reader.
        shuffle: rows that wait to be mixed, and the numbers that decide how; (0,) for none.

    """

    def __init__(
        self,
        legs: Sequence[Leg],
        rank: int,
        lanes: Callable[[int, Leg], Sequence[Lane]],
        depth: int,
        shuffle: tuple[int, ...],
    ) -> None:
        self._lanes, self._depth, self._shuffle = lanes, depth, shuffle
        self._readers: list[Ahead[Columns]] = []
        self._rows = _Rows(rows_of(legs, rank, self._read))
        self.goes_on = len(legs) > 1 or legs[0].rows > 0
        """Whether rows were taken before."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close(wait=False)  # it may be in a read that takes long

    def take(self, rows: int) -> Columns | None:
        """Return the next so many rows, or fewer at the end; None if there are none left."""
        return self._rows.take(rows)

    def _read(self, rank: int, leg: Leg) -> Iterator[Columns]:
        lanes = [lane for lane in self._lanes(rank, leg) if lane.pieces]
        readers = [Ahead(iter(lane), self._depth, "hpcdist-queue") for lane in lanes]
        self._readers += readers
        size, *numbers = self._shuffle
        rows = in_turn([reader.__enter__() for reader in readers])
        return shuffled(rows, size, *numbers, leg.ranks, rank) if size else rows
