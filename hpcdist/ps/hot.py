"""`Hot`: which ids of a table are asked for most often, by looking at a few of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.ps.merging import unique

SHOWN = 10
"""How many ids `stats` shows."""
_LOOKED_AT = 16
"""Ids of a call that are counted, each for those between it and the next one."""
_AT_ONCE = 256
"""Calls whose ids are counted together."""
_KEPT = 4096
"""Ids that have a count; of more the lower half is forgotten."""


@final
class Hot:
    """Counts, about right for ids that are asked for often; microseconds for each call.

    Where several threads count at once, some calls may be lost.

    Example:
        >>> import numpy as np
        >>> hot = Hot()
        >>> for step in range(100):
        ...     hot.note(np.array([7, 100 + step]))
        >>> hot.hottest()[0]
        (7, 100)

    """

    def __init__(self) -> None:
        self._counted = np.empty(0, np.int64), np.empty(0, np.int64)
        self._waiting: list[tuple[NumpyArray, int]] = []
        self._start = 0

    def note(self, ids: NumpyArray) -> None:
        """Count the ids of a call."""
        step = -(-len(ids) // _LOOKED_AT)
        if not step:
            return
        self._start += 1  # another place in each call, or some ids would never be looked at
        self._waiting.append((ids[self._start % step :: step].copy(), step))
        if len(self._waiting) >= _AT_ONCE:
            self._count()

    def hottest(self) -> list[tuple[int, int]]:
        """Return the ids with the highest counts, and these."""
        self._count()
        ids, counts = self._counted
        return hottest([zip(ids.tolist(), counts.tolist(), strict=True)])

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, []
        ids, counts = self._counted
        looked, steps = [each for each, _ in waiting], [step for _, step in waiting]
        more = np.repeat(np.array(steps, np.int64), [len(each) for each in looked])
        found, inverse = unique(np.concatenate([ids, *looked]))
        sums = np.bincount(inverse, np.concatenate([counts, more]), len(found)).astype(np.int64)
        if len(found) > _KEPT:
            most = np.argpartition(sums, -_KEPT // 2)[-_KEPT // 2 :]
            found, sums = found[most], sums[most]
        self._counted = found, sums


def hottest(found: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the ids with the highest counts of several lists, and the sums of these."""
    sums: Counter[int] = Counter()
    for each in found:
        sums.update(dict(each))
    return nlargest(SHOWN, sums.items(), key=itemgetter(1))
