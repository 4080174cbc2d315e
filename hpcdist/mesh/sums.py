"""Sums without an order: the same bits for any cut of an array, and any number of ranks.

[Note: reproducible sums] Floating-point sums depend on the order of the additions. Here each number
is first rounded to a multiple of one power of two, as far below the largest of all numbers as the
sum is to be accurate, and multiples of one power are added exactly, as integers, in any order. The
largest number is known only at the end. So numbers are cut at fixed places, multiples of `WIDTH`
bits, into slices; the slices of each bin are added; and of all bins the highest `BINS` count, from
that of the largest number downwards. What falls out when a larger number comes had not counted if
it had come first. (Demmel and Nguyen, "Parallel reproducible summation", IEEE Transactions on
Computers 64(7), 2015; bins of integers as in `shr_reprosum` of CESM.)

Of `n` numbers of which the largest is `m` the sum is wrong by less than ``n * m * 2**-80``, before
it is rounded once to the nearest number of its dtype; a pairwise sum may be by
``log2(n) * 2**-53`` of the sum of the absolute values.

A sum is eight integers, of which others make one with all ranks' by MAX and SUM, so any transport
can carry it: the grid, which says what the highest bin counts; how many infinities there were; and
the bins, each as a higher and a lower half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from hpcdist.arrays.device import on_host, where_is
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import expect, load
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import ReduceOp

WIDTH, BINS, LOWEST, WORDS = 40, 3, -25, 8
"""Bits of a bin, how many count, the grid of the smallest numbers, and the integers of a sum."""

_compiled = load("hpcdist.mesh._native")
expect(_compiled, WIDTH=WIDTH, BINS=BINS, LOWEST=LOWEST, WORDS=WORDS)


class Everywhere(NamedTuple):
    """The ranks that have parts of one array: how many they are, and which this one is.

    `reduce` combines integers of all by an operator; it may write to what it is given.
    """

    ranks: int
    rank: int
    reduce: Callable[[NumpyArray, ReduceOp], NumpyArray]


_AT_ONCE = 4 << 10
"""Bytes up to which all ranks get the words of each, by one reduction in place of two."""

_GRID, _ODD, _FIRST_BIN = 0, 1, 2
_ONE_BELOW = 1 << 31
_MOST_AT_ONCE = 1 << 20
"""Numbers whose slices are added as integers of 64 bits without leaving their range."""


class _Format(NamedTuple):
    """Of a dtype: the bits of a number, and the power of two of the last bit of the least."""

    digits: int
    least: int


_FORMATS = {
    "float64": _Format(53, -1074),
    "float32": _Format(24, -149),
    "float16": _Format(11, -24),
    "bfloat16": _Format(8, -133),
}


@lru_cache(maxsize=64)
def _format_of(dtype: np.dtype) -> _Format:
    """Return the format of the real numbers of a dtype; raise `UsageError` if they have none."""
    found = _FORMATS.get(_real(dtype).name)
    if found is None:
        raise UsageError(
            f"there are no reproducible sums of {dtype.name}; convert the array to float64 or "
            "complex128, or leave array_policy(sums='reproducible')"
        )
    return found


def check_summable(dtype: Any) -> None:
    """Raise `UsageError` where there are no reproducible sums of a dtype of floats."""
    _format_of(np.dtype(dtype))


@lru_cache(maxsize=64)
def is_floating(dtype: Any) -> bool:
    """Return whether the sum of numbers of a dtype depends on their order."""
    return dtype_row(np.dtype(dtype)).family in ("float", "complex")


def reproducible_sum(
    part: Any,
    dims: tuple[int, ...],
    everywhere: Everywhere | None,
    *,
    keepdims: bool = False,
    dtype: Any = None,
) -> Any:
    """Return the sum of an array over dimensions, and over the ranks that `everywhere` combines.

    Args:
        part: the array of this rank, of floats or complex numbers.
        dims: the dimensions that are summed, not negative.
        everywhere: the ranks that have parts of one array; None: this rank has all.
        keepdims: keep the dimensions, of length 1.
        dtype: of the result; None: that of `part`.

    Raises:
        UsageError: the numbers are long doubles.

    """
    dtype = part.dtype if dtype is None else np.dtype(dtype)
    form = _format_of(dtype)
    told = [1 if dim in dims else length for dim, length in enumerate(part.shape)]
    shape = told if keepdims else [n for dim, n in enumerate(told) if dim not in dims]
    if dtype.kind == "c":
        real = _real(dtype)
        pairs = part.astype(dtype, copy=False)[..., None].view(real)
        found = reproducible_sum(pairs, dims, everywhere, keepdims=True, dtype=real)
        return found.view(dtype).reshape(shape)
    words = _words_of(part, dims)
    if everywhere is not None:
        words = _combined(words, everywhere)
    values = _nearest(words, form)
    if dtype != np.float64:
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
    return where_is(part, values.reshape(shape))


def _real(dtype: np.dtype) -> np.dtype:
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype


# ---- the words of a sum


def _words_of(part: Any, dims: tuple[int, ...]) -> NumpyArray:
    """Return the words of the sums over dimensions of an array: `WORDS` of each sum."""
    if part.dtype not in (np.float64, np.float32):  # nor of the other byte order
        part = part.astype(np.float32 if part.dtype.itemsize < 4 else np.float64)
    if len(dims) == part.ndim and part.flags.c_contiguous:
        return _words_between(part, 1, part.size, 1)
    first, count = (dims[0], len(dims)) if dims else (part.ndim, 0)
    if dims != tuple(range(first, first + count)) or not part.flags.c_contiguous:
        kept = [dim for dim in range(part.ndim) if dim not in dims]
        if dims != tuple(range(first, first + count)):
            part, first = np.transpose(part, [*kept, *dims]), len(kept)
        part = part.copy(order="C")
    outer, length = part.shape[:first], part.shape[first : first + count]
    inner = part.shape[first + count :]
    return _words_between(part, math.prod(outer), math.prod(length), math.prod(inner))


def _words_between(part: Any, outer: int, length: int, inner: int) -> NumpyArray:
    """Return the words of sums of `length` elements, of contiguous float32 or float64."""
    if _compiled is None or not isinstance(part, np.ndarray):
        return _sliced(part.reshape(outer, length, inner))
    words = np.empty((WORDS, outer * inner), np.int64)
    _compiled.sums_of(part, part.itemsize == 4, outer, length, inner, words)
    return words


def _sliced(part: Any) -> NumpyArray:
    """Return the words of the sums along the middle one of three dimensions."""
    x = part.astype(np.float64)
    above, below = np.isposinf(x) | np.isnan(x), np.isneginf(x) | np.isnan(x)
    odd = above.any(1).astype(np.int64) + below.any(1) * _ONE_BELOW
    x[above | below] = 0
    _, exponents = np.frexp(largest(np.abs(x), (1,)))
    grid = np.maximum(exponents // WIDTH, LOWEST)
    x *= np.ldexp(1.0, -grid * WIDTH)
    words = [grid[:, 0].astype(np.int64), odd]
    for number in range(BINS):
        unit = 2.0 ** (-WIDTH * number)
        slices = np.rint(_odd(x / unit))
        x -= slices * unit
        words += _added(slices)
    flat = [on_host(each).reshape(-1) for each in words]
    empty = flat[0].size and part.shape[1] == 0
    if empty:
        flat[0][:] = LOWEST
    return np.stack(flat)


def _odd(x: Any) -> Any:
    """Return numbers with the last bit set, so that none is in the middle between integers."""
    return (x.view(np.int64) | 1).view(np.float64)


def largest(sizes: Any, dims: tuple[int, ...]) -> Any:
    """Return the largest elements along dimensions, which are kept; 0 where there are none."""
    if 0 in [sizes.shape[dim] for dim in dims]:
        told = [1 if dim in dims else length for dim, length in enumerate(sizes.shape)]
        return np.zeros_like(sizes, shape=tuple(told))
    return sizes.max(dims, keepdims=True)


def _added(slices: Any) -> list[Any]:
    """Return the higher and lower halves of sums of whole numbers along the middle dimension."""
    high, low = 0, 0
    for at in range(0, slices.shape[1], _MOST_AT_ONCE):
        total = slices[:, at : at + _MOST_AT_ONCE].astype(np.int64).sum(1)
        high, low = high + (total >> 32), low + (total & 0xFFFFFFFF)
    if slices.shape[1] == 0:
        high = low = slices.sum(1).astype(np.int64)
    return [high, low]


def _combined(words: NumpyArray, everywhere: Everywhere) -> NumpyArray:
    """Return the words of the sums of all ranks, or those of each rank."""
    if everywhere.ranks * words.nbytes <= _AT_ONCE:
        told = np.zeros((everywhere.ranks, *words.shape), np.int64)
        told[everywhere.rank] = words
        return everywhere.reduce(told, ReduceOp.SUM)
    _raise_to(words, everywhere.reduce(words[_GRID].copy(), ReduceOp.MAX))
    words[1:] = everywhere.reduce(words[1:], ReduceOp.SUM)
    return words


def _raise_to(words: NumpyArray, grids: NumpyArray) -> None:
    """Move the bins of sums to higher grids, in place."""
    if _compiled is not None:
        _compiled.raise_to(words, grids)
        return
    by, bins = grids - words[_GRID], words[_FIRST_BIN:].reshape(BINS, 2, -1)
    moved = np.zeros_like(bins)
    for down in range(BINS):
        here = by == down
        moved[down:, :, here] = bins[: BINS - down, :, here]
    bins[...], words[_GRID] = moved, grids


# ---- the number that is nearest to a sum


def _nearest(words: NumpyArray, form: _Format) -> NumpyArray:
    """Return the numbers of so many bits nearest to sums; of two equally near ones the even one.

    The words are those of the sums, or of parts of them, one after the other.
    """
    if _compiled is not None:
        values = np.empty(words.shape[-1])
        _compiled.nearest_to(words, *form, values)
        return values
    if words.ndim > 2:
        words = _added_up(words)
    return np.array([_nearest_to(*map(int, each), form=form) for each in words.T], np.float64)


def _added_up(parts: NumpyArray) -> NumpyArray:
    grids = parts[:, _GRID].max(0)
    for each in parts:
        _raise_to(each, grids)
    total: NumpyArray = parts.sum(0)
    total[_GRID] = grids
    return total


def _nearest_to(grid: int, odd: int, *bins: int, form: _Format) -> float:
    above, below = odd % _ONE_BELOW, odd // _ONE_BELOW
    if above or below:
        return math.nan if above and below else math.inf if above else -math.inf
    total = 0
    for high, low in zip(bins[::2], bins[1::2], strict=True):
        total = (total << WIDTH) + (high << 32) + low
    unit, size = WIDTH * (grid - BINS + 1), abs(total)
    last = max(size.bit_length() - form.digits, form.least - unit, 0)
    kept, rest = size >> last, size & ((1 << last) - 1)
    half = (1 << last) >> 1
    kept += last > 0 and (rest > half or (rest == half and kept & 1))
    try:
        value = math.ldexp(kept, unit + last)
    except OverflowError:
        value = math.inf
    return -value if total < 0 else value
