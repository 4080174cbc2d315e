"""Exact sums of a few numbers each, rounded once: the same in any order.

The sum of two doubles, and what rounding took from it, are exactly what was added (Knuth, "The Art
of Computer Programming" 2, 4.2.2, theorem B). So a sum is kept as a total and a rest, as long as
the additions to the rest are exact, too; the few elements of which they are not are added as
fractions.
`shm/native/exact.c` does the same, and has fractions of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hpcdist.arrays.device import on_host, where_is


@np.errstate(over="ignore", invalid="ignore")
def exact_sum(rows: Sequence[Any], to_odd: bool = False) -> Any:
    """Return the sums of the elements of flat arrays of one dtype, float32 or wider or complex.

    Args:
        rows: arrays of one length, on the host or on one device.
        to_odd: numbers that are not exact get an odd last bit, so that they can be rounded again,
            to fewer bits, as if it were the first time (Boldo and Melquiond, "Emulation of a FMA
            and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008).

    """
    dtype = rows[0].dtype
    real = np.empty(0, dtype).real.dtype
    parts = [each.view(real) for each in rows]
    total = parts[0].astype(np.float64)
    rest, lost = np.zeros_like(total), ~np.isfinite(total)
    for each in parts[1:]:
        total, slip = _two_sum(total, each.astype(np.float64))
        rest, more = _two_sum(rest, slip)
        lost |= more != 0  # NaN, too
    total, rest = _two_sum(total, np.where(rest == 0, -0.0, rest))  # which keeps -0.0
    places = np.flatnonzero(lost)
    if places.size:
        columns = [on_host(each[places]).tolist() for each in parts]
        found = np.array([*map(sum_of_fractions, zip(*columns, strict=True))])
        total[places], rest[places] = (where_is(total, each) for each in found.T.copy())
    if real != np.float64:
        wide = _odd(total, rest)
        total = wide.astype(real)
        if to_odd:
            total = _odd(total, wide - total)
    return total.view(dtype)


def sum_of_fractions(numbers: Iterable[float]) -> tuple[float, float]:
    """Return the nearest number to a sum, and a number with the sign of what is missing."""
    numbers = list(numbers)
    odd = {each for each in numbers if not math.isfinite(each)}
    if odd:
        return odd.pop() if len(odd) == 1 else math.nan, 0.0
    exact = sum(map(Fraction, numbers), Fraction())
    try:
        nearest = float(exact)
    except OverflowError:
        return (math.inf if exact > 0 else -math.inf), 0.0
    missing = exact - Fraction(nearest)
    return nearest, float((missing > 0) - (missing < 0))


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _odd(nearest: Any, missing: Any) -> Any:
    """Return of the two numbers around a sum the one with an odd last bit, or the sum itself."""
    bits = nearest.view(f"i{nearest.dtype.itemsize}")
    inexact = (missing != 0) & (bits & 1 == 0) & np.isfinite(nearest)
    away = np.where((missing > 0) == (nearest > 0), 1, -1).astype(bits.dtype)
    return np.where(inexact, bits + away, bits).view(nearest.dtype)
