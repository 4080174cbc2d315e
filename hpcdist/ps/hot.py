"""`Hot`: which ids of a table are asked for most often, by looking at a few of each call."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter
from typing import final

from hpcdist.arrays.libraries import NumpyArray

SHOWN = 10
"""How many ids `stats` shows."""
_LOOKED_AT = 64
"""Ids of a call that are counted, each for those between it and the next one."""
_KEPT = 4096
"""Ids that have a count; of more the lower half is forgotten."""


@final
class Hot:
    """Counts, about right for ids that are asked for often; microseconds for each call.

    Example:
        >>> import numpy as np
        >>> hot = Hot()
        >>> for step in range(100):
        ...     hot.note(np.array([7, 100 + step]))
        >>> hot.hottest()[0]
        (7, 100)

    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._start = 0

    def note(self, ids: NumpyArray) -> None:
        """Count the ids of a call."""
        step = -(-len(ids) // _LOOKED_AT)
        if not step:
            return
        self._start += 1  # another place in each call, or some ids would never be looked at
        counts = self._counts
        for each in ids[self._start % step :: step].tolist():
            counts[each] = counts.get(each, 0) + step
        if len(counts) > _KEPT:
            self._counts = dict(nlargest(_KEPT // 2, counts.items(), key=itemgetter(1)))

    def hottest(self) -> list[tuple[int, int]]:
        """Return the ids with the highest counts, and these."""
        return hottest([self._counts.items()])


def hottest(found: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the ids with the highest counts of several lists, in none of which are the same."""
    pairs = (pair for each in found for pair in each)
    return nlargest(SHOWN, pairs, key=itemgetter(1))
