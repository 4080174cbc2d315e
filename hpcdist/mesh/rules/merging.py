"""`merged`: sorted arrays become one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import load
from hpcdist.mesh.rules.dividing import memory

_compiled = load("hpcdist.mesh._native")
_MERGES: dict[str, int] = getattr(_compiled, "MERGES", {})

MANY = 16
"""From so many runs on they are sorted anew: merging would read each element several times."""


def merged(runs: Sequence[NumpyArray], room: NumpyArray) -> NumpyArray:
    """Write the elements of sorted arrays to `room`, in order; return it."""
    runs, merges = [run for run in runs if run.size], can_merge(room.dtype)
    if len(runs) == 1:
        room[...] = runs[0]
    elif runs and len(runs) < MANY and merges:
        _merge(runs, room)
    elif runs:
        np.concatenate(runs, out=room)
        room.sort(kind=None if merges else "stable")  # stable sorting finds the runs
    return room


def can_merge(dtype: np.dtype) -> bool:
    """Return whether there is a compiled loop that merges arrays of a dtype."""
    return dtype.isnative and dtype.name in _MERGES


def merge(to: NumpyArray, first: NumpyArray, second: NumpyArray) -> None:
    """Write two sorted arrays without NaN as one, equal elements of the first one first."""
    _compiled.merge(_MERGES[to.dtype.name], to, first, second)


def _merge(runs: Sequence[NumpyArray], room: NumpyArray) -> None:
    numbers, rest = zip(*map(_without_nan, runs), strict=True)
    end = sum(map(len, numbers))
    if end < room.size:
        np.concatenate(rest, out=room[end:])
    while len(numbers) > 2:
        numbers = tuple(map(_pair, numbers[::2], [*numbers[1::2], numbers[-1][:0]]))
    merge(room[:end], *numbers)


def _pair(first: NumpyArray, second: NumpyArray) -> NumpyArray:
    if not second.size:
        return first
    both = memory(first.size + second.size, first.dtype)
    merge(both, first, second)
    return both


def _without_nan(run: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """Return the numbers of a sorted array, and what is behind them."""
    end = run.size
    if run[-1] != run[-1]:
        end = np.searchsorted(run, run[-1])
    return run[:end], run[end:]
