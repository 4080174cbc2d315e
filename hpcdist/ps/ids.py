"""Ids: 64-bit integers that name rows, and pure functions of them.

The owner of an id and its coin are functions of the id alone, the same in every run, on every
rank and for any order of the ids. Everything starts from `mixed`, the finalizer of splitmix64
(Steele, Lea and Flood 2014): a bijection in which every bit of the input moves every bit of the
output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import on_host
from hpcdist.errors import UsageError

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(each) for each in (27, 30, 31, 32))
_WORD = (1 << 64) - 1
_HALF = 1 << 63

_COIN = 0xC01
"""Keeps coins apart from what else is drawn from the same seed."""


def as_ids(ids: Any) -> tuple[NumpyArray, tuple[int, ...]]:
    """Return ids as a flat, contiguous array of int64, and the shape in which they came.

    The array may be the caller's own memory. Unsigned 64-bit ids are seen as their int64 bits, so
    ``2**64 - 1`` and ``-1`` are the same id.

    Raises:
        UsageError: these are no integers.

    """
    given = _array_of(ids)
    if given.dtype.kind not in "iu":
        raise UsageError(
            f"ids must be integers of up to 64 bits, got dtype {given.dtype}; convert them with "
            ".astype(np.int64), or hash keys that are not numbers"
        )
    flat = np.ascontiguousarray(given).reshape(-1)
    if flat.dtype.kind == "u" and flat.dtype.itemsize == 8:
        flat = flat.astype("=u8", copy=False).view(np.int64)
    return flat.astype(np.int64, copy=False), given.shape


def _array_of(ids: Any) -> NumpyArray:
    """Show ids of any library, or nested lists of Python's integers, as an array of NumPy's."""
    if type(ids) is np.ndarray:
        return ids
    if not isinstance(ids, (list, tuple, range, int)):
        view = view_of(ids)
        return view if isinstance(view, np.ndarray) else on_host(view)
    try:
        made = np.asarray(ids)
        if made.size == 0:
            return made.astype(np.int64)
        if made.dtype.kind in "fO":  # Python's integers beyond int64 become these
            exact = np.asarray(ids, dtype=object)
            if all(type(each) is int and -_HALF <= each <= _WORD for each in exact.flat):
                made = (exact & _WORD).astype(np.uint64)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"these are not ids: {error}; pass integers between -2**63 and 2**64 - 1, as an array "
            "or as lists of equal lengths"
        ) from error
    return made


def mixed(words: NumpyArray) -> NumpyArray:
    """Return the hash of 64-bit words, as new words (uint64)."""
    z: NumpyArray = words.view(np.uint64) + np.uint64(_GOLDEN)
    shifted = z >> _S30
    np.bitwise_xor(z, shifted, out=z)
    np.multiply(z, _FIRST, out=z)
    np.right_shift(z, _S27, out=shifted)
    np.bitwise_xor(z, shifted, out=z)
    np.multiply(z, _SECOND, out=z)
    np.right_shift(z, _S31, out=shifted)
    np.bitwise_xor(z, shifted, out=z)
    return z


def key_of(seed: int, stream: int = 0) -> np.uint64:
    """Return a word that stands for a seed and the purpose that random numbers are drawn for."""
    word: np.uint64 = mixed(np.array([(seed + (stream << 32)) & _WORD], np.uint64))[0]
    return word


def owners(ids: NumpyArray, servers: int) -> NumpyArray:
    """Return which of `servers` owns each id, from 0 on."""
    upper = mixed(ids) >> _S32
    owner: NumpyArray = ((upper * np.uint64(servers)) >> _S32).astype(np.intp)
    return owner


def units(words: NumpyArray) -> NumpyArray:
    """Return float64 numbers in [0, 1) for hashes, of their upper 53 bits."""
    drawn: NumpyArray = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def coins(ids: NumpyArray, seed: int) -> NumpyArray:
    """Return a number in [0, 1) for each id: the same for the same id and seed."""
    return units(mixed(ids.view(np.uint64) ^ key_of(seed, _COIN)))
