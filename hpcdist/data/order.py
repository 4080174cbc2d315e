"""`Order`: which sample comes at which position of an epoch, without a list of all samples.

An order is a permutation of ``range(total)`` that is computed for the positions that are asked for,
and backwards for samples: what a rank needs of it costs the memory of what it asks for.

[Note: Feistel] A shuffled position is cut into two halves of its bits. In each of `_ROUNDS` rounds
one half is combined, by exclusive or, with a hash of the other one and a key: that can be undone,
whatever the hash. So the numbers of so many bits are permuted. What comes out beyond `total` goes
in again until it does not (cycle walking): fewer than two times on average, for `total` is more
than half of the domain. Of few numbers not all permutations would be equally frequent, for their
halves have too few bits. Up to `_FEW` are sorted by random words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.compiled import expect, load
from hpcdist.data.shares import IndexArray
from hpcdist.named_tuple import NamedTuple

Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_BLOCK = 1 << 15
"""Positions that are worked on at a time: they stay in the cache."""
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_MIDDLE = np.uint64(32)
_FEW = 256
_loops = load("hpcdist.data._native")
expect(_loops, ROUNDS=_ROUNDS)


class Natural(NamedTuple):
    """The order of the files: the sample at a position is the position."""

    total: int

    def samples(self, positions: IndexArray) -> IndexArray:
        """Return the samples at `positions`."""
        return positions

    def positions(self, samples: IndexArray) -> IndexArray:
        """Return where `samples` are."""
        return samples


class Shuffled(NamedTuple):
    """Another order for every `seed` and `epoch`, of all samples; see [Note: Feistel]."""

    total: int
    seed: int
    epoch: int

    def samples(self, positions: IndexArray) -> IndexArray:
        """Return the samples at `positions`."""
        return _walked(positions, self.total, keys_of(self.seed, self.epoch), back=False)

    def positions(self, samples: IndexArray) -> IndexArray:
        """Return where `samples` are."""
        return _walked(samples, self.total, keys_of(self.seed, self.epoch), back=True)


class Blocks(NamedTuple):
    """Samples dealt to `ranks` in blocks as even as can be, and shuffled inside their blocks.

    Block b has the positions that `Shares` deal to rank b of so many.
    """

    total: int
    seed: int
    epoch: int
    ranks: int

    def samples(self, positions: IndexArray) -> IndexArray:
        """Return the samples at `positions`."""
        found = np.empty(len(positions), np.int64)
        blocks = positions % self.ranks
        for block in np.unique(blocks).tolist():
            here = blocks == block
            found[here] = self._start(block) + self._inside(block).samples(
                positions[here] // self.ranks
            )
        return found

    def positions(self, samples: IndexArray) -> IndexArray:
        """Return where `samples` are."""
        found = np.empty(len(samples), np.int64)
        starts = np.array([self._start(block) for block in range(self.ranks + 1)])
        blocks = np.searchsorted(starts, samples, side="right") - 1
        for block in np.unique(blocks).tolist():
            here = blocks == block
            inside = self._inside(block).positions(samples[here] - starts[block])
            found[here] = inside * self.ranks + block
        return found

    def _start(self, block: int) -> int:
        each, more = divmod(self.total, self.ranks)
        return block * each + min(block, more)

    def _inside(self, block: int) -> Keyed:
        length = self._start(block + 1) - self._start(block)
        return Keyed(length, keys_of(self.seed, self.epoch, self.ranks, block))


Order = Natural | Shuffled | Blocks


class Keyed(NamedTuple):
    """The order of `total` samples that belongs to certain keys, from `keys_of`."""

    total: int
    keys: Words

    def samples(self, positions: IndexArray) -> IndexArray:
        """Return the samples at `positions`."""
        return _walked(positions, self.total, self.keys, back=False)

    def positions(self, samples: IndexArray) -> IndexArray:
        """Return where `samples` are."""
        return _walked(samples, self.total, self.keys, back=True)


@lru_cache(maxsize=64)
def keys_of(*numbers: int) -> Words:
    """Return the keys of the rounds that belong to these numbers, the same on every machine."""
    return np.random.SeedSequence(numbers).generate_state(_ROUNDS, np.uint64).astype(np.uint64)


def _walked(numbers: IndexArray, total: int, keys: Words, *, back: bool) -> IndexArray:
    """Return where a permutation of ``range(total)`` takes `numbers`, all of them less."""
    if total <= _FEW:
        return _table(total, keys.tobytes())[int(back)][numbers]
    bits = (total - 1).bit_length()
    found = np.empty(len(numbers), np.int64)
    if _compiled is not None:
        _compiled(np.ascontiguousarray(numbers), found, keys, total, bits, back)
        return found
    for first in range(0, len(numbers), _BLOCK):
        words = numbers[first : first + _BLOCK].astype(np.uint64)
        permuted = _permuted(words, bits, keys, back=back)
        outside = np.flatnonzero(permuted >= total)
        while len(outside):
            again = _permuted(permuted[outside], bits, keys, back=back)
            permuted[outside] = again
            outside = outside[again >= total]
        found[first : first + _BLOCK] = permuted
    return found


@lru_cache(maxsize=64)
def _table(total: int, keys: bytes) -> tuple[IndexArray, IndexArray]:
    """Return a permutation of few numbers, and its inverse."""
    words = np.random.SeedSequence(np.frombuffer(keys, np.uint64).tolist())
    permutation = np.argsort(words.generate_state(total, np.uint64), kind="stable")
    return permutation, np.argsort(permutation)


def _permuted(words: Words, bits: int, keys: Words, *, back: bool) -> Words:
    """Return where the permutation of the numbers of so many bits takes `words`, or back from."""
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits) - low_bits
    high, low = words >> low_bits, words & ((np.uint64(1) << low_bits) - np.uint64(1))
    rounds: Sequence[int] = range(_ROUNDS)
    for each in reversed(rounds) if back else rounds:
        if each % 2:
            high ^= _hashed(low, keys[each], high_bits)
        else:
            low ^= _hashed(high, keys[each], low_bits)
    permuted: Words = (high << low_bits) | low
    return permuted


def _hashed(words: Words, key: np.uint64, bits: np.uint64) -> Words:
    """Return so many bits that depend on all bits of the words and the key."""
    found = words + key
    found *= _FIRST
    found ^= found >> _MIDDLE
    found *= _SECOND
    found >>= np.uint64(64) - bits
    return found


_compiled: Any = getattr(_loops, "permute", None)
