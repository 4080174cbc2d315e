"""`Shares`: which samples of an epoch belong to which rank, in plain integers.

An epoch has an *order*, and the order has *positions*. What is left of an order is dealt out like
cards: `order_of` shuffles, `plan_shares` deals, `samples_at` turns the cards.

[Note: any number of ranks] The order depends on seed, epoch and length only, and after every step
that all ranks have taken, what is consumed is a beginning of the order: its first ``start``
positions. So ``start`` says all about the past, and the rest can be dealt to any number of ranks.
Dealing begins anew with rank 0 at ``start``: were position i always rank ``i % size``'s, a rest
that begins in the middle of a round would give some ranks more than others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

IndexArray = npt.NDArray[np.int64]
Tail = Literal["pad", "drop", "keep"]

TAILS: dict[str, Callable[[int, int], int]] = {
    # how many positions are dealt, of so many left, to so many ranks
    "pad": lambda left, size: -(-left // size) * size,
    "drop": lambda left, size: left // size * size,
    "keep": lambda left, size: left,
}
"""What becomes of samples that do not go evenly into the ranks."""


class Shares(NamedTuple):
    """Positions ``start`` to ``stop`` of an order, dealt to `size` ranks in turn."""

    start: int
    stop: int
    size: int

    def positions(self, rank: int) -> range:
        """Return the positions of `rank`; rank 0 never has fewer than another."""
        return range(self.start + rank, self.stop, self.size)

    def dealt_to(self, ranks: range) -> IndexArray:
        """Return the positions of some ranks, those of one round after those of the other."""
        rounds = np.arange(self.start, self.stop, self.size)
        return np.add.outer(rounds, np.arange(ranks.start, ranks.stop)).reshape(-1)


def plan_shares(length: int, start: int, size: int, tail: str) -> Shares:
    """Deal what is left of an order of `length` samples, from position `start`, to `size` ranks.

    ``stop`` may lie beyond `length` (``tail="pad"``): `samples_at` begins again with the first.

    Raises:
        UsageError: there is no such `tail`.

    """
    if tail not in TAILS:
        raise UsageError(f"tail must be one of {', '.join(map(repr, TAILS))}, got {tail!r}")
    return Shares(start, start + TAILS[tail](length - start, size), size)


def virtual_ranks_of(rank: int, size: int, count: int) -> range:
    """Return which of `count` virtual ranks live on `rank` of `size` real ones: consecutive ones.

    The first ranks have one more where they do not go evenly into the ranks.
    """
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def order_of(length: int, seed: int, epoch: int) -> IndexArray:
    """Return the shuffled order of an epoch: a permutation of `length`, the same on all ranks."""
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return np.random.Generator(bits).permutation(length)


def samples_at(
    positions: range | IndexArray, length: int, order: IndexArray | None = None
) -> IndexArray:
    """Return the samples at `positions` of `order`, or of the natural order for None."""
    if isinstance(positions, range):
        positions = np.arange(positions.start, positions.stop, positions.step)
    wrapped = positions % max(length, 1)
    return wrapped if order is None else order[wrapped]
