"""Initializers: the first value of a row, a function of the seed, the id and the length of rows.

No state, no order: whoever asks for the row of an id, and when, gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import UsageError
from hpcdist.ps.ids import key_of, mixed, units

Initializer = Callable[[NumpyArray, int], Any]

_VALUES, _ANGLES = 0x1D1, 0x1D2
"""Streams of the random numbers of initial values."""

_AT_A_TIME = 1 << 15
"""Numbers that are drawn at a time: their arrays stay in the cache."""


def initializer_of(given: Any, seed: int, dtype: np.dtype) -> Initializer:
    """Return a function of ids and the length of rows, which gives rows of `dtype`.

    Args:
        given: ``("uniform", bound)`` between ``-bound`` and ``bound``, ``("normal", deviation)``,
            ``("constant", value)``, or a function of ids (int64) and the length of rows.
        seed: what random numbers start from.
        dtype: that of the rows.

    """
    if callable(given):
        return _of_user(given, dtype)
    if not (isinstance(given, tuple) and len(given) == 2 and given[0] in _DRAWN):
        raise UsageError(
            f"initializer={given!r} is not an initializer: pass ('uniform', bound), "
            "('normal', deviation), "
            "('constant', value), or a function of ids and the length of rows"
        )
    kind, scale = given
    if not isinstance(scale, (int, float)) or not np.isfinite(scale):
        raise UsageError(f"initializer={given!r}: {scale!r} is not a finite number; pass one")
    draw = _DRAWN[kind]

    def initial(ids: NumpyArray, dim: int) -> NumpyArray:
        rows = np.empty((ids.size, dim), dtype)
        step = max(1, _AT_A_TIME // max(1, dim))
        for start in range(0, ids.size, step):
            part = slice(start, start + step)
            rows[part] = draw(ids[part], dim, seed, float(scale))
        return rows

    return initial


def _of_user(function: Initializer, dtype: np.dtype) -> Initializer:
    def initial(ids: NumpyArray, dim: int) -> NumpyArray:
        rows = np.asarray(function(ids.copy(), dim))
        if rows.shape != (ids.size, dim):
            raise UsageError(
                f"the initializer returned shape {rows.shape} for {ids.size} ids and rows of "
                f"length {dim}; return a row for each id"
            )
        return rows.astype(dtype, copy=False)

    return initial


def _words(ids: NumpyArray, dim: int, seed: int, stream: int) -> NumpyArray:
    """Return a hash for each number of each row: splitmix64 that starts from the id's hash."""
    starts = mixed(ids.view(np.uint64) ^ key_of(seed, stream))
    steps = np.arange(dim, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed(starts[:, None] + steps)


def _uniform(ids: NumpyArray, dim: int, seed: int, bound: float) -> NumpyArray:
    return (units(_words(ids, dim, seed, _VALUES)) * 2 - 1) * bound


def _normal(ids: NumpyArray, dim: int, seed: int, deviation: float) -> NumpyArray:
    """Draw normal numbers (Box and Muller 1958)."""
    lengths = np.sqrt(-2 * np.log1p(-units(_words(ids, dim, seed, _VALUES))))
    angles = 2 * np.pi * units(_words(ids, dim, seed, _ANGLES))
    drawn: NumpyArray = lengths * np.cos(angles) * deviation
    return drawn


def _constant(ids: NumpyArray, dim: int, seed: int, value: float) -> NumpyArray:
    return np.full((ids.size, dim), value)


_DRAWN = {"uniform": _uniform, "normal": _normal, "constant": _constant}
