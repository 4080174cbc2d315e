"""`Generator`: random numbers that are the same however an array is spread.

Each element is made of 64 random bits, which are those of its place in the whole array (its index
into the flat one): the output of a counter-based generator, Philox 4x64-10, for a key made of the
seed, at a counter made of the place and of how many arrays the generator has made before. So each
rank makes just its part, and the numbers depend neither on the ranks nor on the placements.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from hpcdist.boxes import Box, lengths, volume
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.basis import make, own_box
from hpcdist.mesh.rules.creation import Placements, new_layout
from hpcdist.mesh.rules.sorting import argsort


@final
class Generator:
    """A generator of random arrays, each rank making its part; the same on all ranks.

    All ranks make the same arrays in the same order. With one seed they are the same for any
    number of ranks and any placements.

    Args:
        seed: a whole number from 0 on, the same on all ranks.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> a = dist.array.random.Generator(7).integers(0, 10, 4, placements=[dist.Shard(0)])
        >>> dist.unshard_dtensor(a)
        array([4, 4, 3, 2])

    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not hasattr(seed, "__index__") or operator.index(seed) < 0:
            raise UsageError(
                "the seed must be an integer of at least 0, the same on every rank; without one "
                f"each rank would make different numbers. Got {seed!r}"
            )
        self._key = np.random.SeedSequence(operator.index(seed)).generate_state(2, np.uint64)
        self._made = 0

    def random(
        self,
        size: Any = (),
        dtype: Any = np.float64,
        *,
        mesh: ProcessMesh | None = None,
        placements: Placements | None = None,
    ) -> DistArray:
        """Return numbers from [0, 1), as float64 or float32.

        Args:
            size: the shape, an integer or a tuple.
            dtype: float64 or float32.
            mesh: the mesh; None for the current one.
            placements: one for each axis of the mesh; None for the usual ones.

        """
        kind = _floating(dtype)
        return self._array(size, mesh, placements, lambda bits: _fractions(bits, kind))

    def uniform(
        self,
        low: float = 0.0,
        high: float = 1.0,
        size: Any = (),
        dtype: Any = np.float64,
        *,
        mesh: ProcessMesh | None = None,
        placements: Placements | None = None,
    ) -> DistArray:
        """Return numbers from [`low`, `high`), up to rounding.

        Args:
            low: the lower limit.
            high: the upper limit.
            size: the shape, an integer or a tuple.
            dtype: float64 or float32.
            mesh: the mesh; None for the current one.
            placements: one for each axis of the mesh; None for the usual ones.

        """
        kind = _floating(dtype)
        start, length = kind.type(low), kind.type(high - low)
        return self._array(
            size, mesh, placements, lambda bits: start + length * _fractions(bits, kind)
        )

    def standard_normal(
        self,
        size: Any = (),
        dtype: Any = np.float64,
        *,
        mesh: ProcessMesh | None = None,
        placements: Placements | None = None,
    ) -> DistArray:
        """Return numbers of the normal distribution of mean 0 and standard deviation 1.

        Args:
            size: the shape, an integer or a tuple.
            dtype: float64 or float32.
            mesh: the mesh; None for the current one.
            placements: one for each axis of the mesh; None for the usual ones.

        """
        return self.normal(0.0, 1.0, size, dtype, mesh=mesh, placements=placements)

    def normal(
        self,
        loc: float = 0.0,
        scale: float = 1.0,
        size: Any = (),
        dtype: Any = np.float64,
        *,
        mesh: ProcessMesh | None = None,
        placements: Placements | None = None,
    ) -> DistArray:
        """Return numbers of the normal distribution of this mean and standard deviation.

        Args:
            loc: the mean.
            scale: the standard deviation, not negative.
            size: the shape, an integer or a tuple.
            dtype: float64 or float32.
            mesh: the mesh; None for the current one.
            placements: one for each axis of the mesh; None for the usual ones.

        """
        kind = _floating(dtype)
        if scale < 0:
            raise ValueError(f"scale must not be negative, got {scale}")
        return self._array(
            size, mesh, placements, lambda *bits: (loc + scale * _normal(*bits)).astype(kind), 2
        )

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Any = (),
        dtype: Any = np.int64,
        endpoint: bool = False,
        *,
        mesh: ProcessMesh | None = None,
        placements: Placements | None = None,
    ) -> DistArray:
        """Return integers from [`low`, `high`); from [0, `low`) without `high`.

        Args:
            low: the smallest integer; without `high`, the limit above.
            high: the limit above.
            size: the shape, an integer or a tuple.
            dtype: of integers.
            endpoint: whether the limit itself is among them.
            mesh: the mesh; None for the current one.
            placements: one for each axis of the mesh; None for the usual ones.

        """
        first, last = (0, low) if high is None else (low, high)
        last = operator.index(last) if endpoint else operator.index(last) - 1
        first, kind = operator.index(first), np.dtype(dtype)
        if kind.kind not in "iu":
            raise UsageError(f"dtype must be one of integers, got {kind}")
        limits = np.iinfo(kind)
        if not limits.min <= first <= last <= limits.max:
            raise ValueError(
                f"there must be integers of {kind} from low to high, got {first} to {last}"
            )
        count = last - first + 1
        start = np.uint64(first % (1 << 64))
        return self._array(
            size,
            mesh,
            placements,
            # Added modulo 2^64, the bits of negative numbers are right.
            lambda bits: (_scaled(bits, count) + start).astype(kind),
        )

    def permutation(
        self, n: int, *, mesh: ProcessMesh | None = None, placements: Placements | None = None
    ) -> DistArray:
        """Return the numbers of ``range(n)`` in random order.

        Args:
            n: how many numbers.
            mesh: the mesh; None for the current one.
            placements: one for each axis of the mesh; None for the usual ones.

        """
        keys = self._array(operator.index(n), mesh, placements, np.array)
        return argsort(keys)  # type: ignore[no-any-return]

    def _array(
        self,
        size: Any,
        mesh: ProcessMesh | None,
        placements: Placements | None,
        convert: Callable[..., Any],
        words: int = 1,
    ) -> DistArray:
        """Return an array made by `convert` from a number of 64-bit words for each element."""
        layout = new_layout(() if size is None else size, mesh, placements)
        box, made = own_box(layout), self._made
        self._made += 1
        bits = np.empty((words, volume(box)), np.uint64)
        philox = _Philox(self._key, made)
        at = 0
        for lo, hi in runs(layout.shape, box):
            drawn = philox.words(lo * words, hi * words)
            bits[:, at : at + hi - lo] = drawn.reshape(-1, words).T
            at += hi - lo
        return make(convert(*bits).reshape(lengths(box)), layout)


class _Philox:
    """The words of one array; ascending runs of them are drawn."""

    PER_BLOCK = 4

    def __init__(self, key: Any, array: int) -> None:
        self._bits = np.random.Philox(key=key, counter=[0, 0, array, 0])
        self._block = 0

    def words(self, start: int, stop: int) -> Any:
        """Return the words from one to before another."""
        block, skipped = divmod(start, self.PER_BLOCK)
        self._bits.advance(block - self._block)
        self._block = -(-stop // self.PER_BLOCK)
        return self._bits.random_raw(skipped + stop - start)[skipped:]


def runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Return which elements of the flat array a box has, as runs in ascending order."""
    if not volume(box):
        return
    whole = len(shape)
    while whole and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    # Everything after this dimension is whole, so that each row of it is one run.
    rows, inner = box[: max(whole - 1, 0)], math.prod(shape[whole:])
    lo, hi = box[whole - 1] if whole else (0, 1)
    steps = [math.prod(shape[dim + 1 : whole]) for dim in range(len(rows))]
    for place in itertools.product(*[range(*span) for span in rows]):
        start = sum(index * step for index, step in zip(place, steps, strict=True))
        yield (start + lo) * inner, (start + hi) * inner


# ---- what is made of the bits


def _floating(dtype: Any) -> Any:
    kind = np.dtype(dtype)
    if kind not in (np.float64, np.float32):
        raise UsageError(f"dtype must be float64 or float32, got {kind}")
    return kind


def _fractions(bits: Any, kind: Any) -> Any:
    """Return the first bits, as many as a number has, as numbers from 0 to below 1."""
    digits = np.finfo(kind).nmant + 1
    return (bits >> np.uint64(64 - digits)).astype(kind) * kind.type(0.5**digits)


def _normal(bits: Any, more: Any) -> Any:
    """Return numbers of the standard normal distribution, by Box and Muller's method."""
    distance = np.sqrt(-2.0 * np.log1p(-_fractions(bits, np.dtype(float))))
    return distance * np.cos(2.0 * np.pi * _fractions(more, np.dtype(float)))


def _scaled(bits: Any, count: int) -> Any:
    """Return bits / 2^64 * count, rounded down: each of the numbers below `count` is as likely."""
    if count == 1 << 64:
        return bits
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    b_high, b_low = bits >> half, bits & low
    c_high, c_low = np.uint64(count >> 32), np.uint64(count & 0xFFFFFFFF)
    one, two = b_high * c_low, b_low * c_high
    carried = (b_low * c_low >> half) + (one & low) + (two & low)
    return b_high * c_high + (one >> half) + (two >> half) + (carried >> half)
