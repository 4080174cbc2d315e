"""`NanWatch`: tells once where NaN begins, before averaging gives it to all ranks.

NaN in a loss reaches nearly every gradient, so looking at some elements of each parameter finds it,
in some microseconds for a bucket. `check_nan` looks at all of them, and refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.group import Group

logger = logging.getLogger("hpcdist")

_EACH = 8
"""Elements of each parameter that are looked at."""


def places_in(sizes: Sequence[int]) -> NumpyArray:
    """Return some places of each parameter in a bucket of parameters of these sizes.

    Example:
        >>> places_in([2, 100]).tolist()
        [0, 1, 2, 16, 30, 44, 58, 72, 86, 101]

    """
    found, start = [], 0
    for size in sizes:
        found.append(start + np.linspace(0, size - 1, min(_EACH, size)).astype(np.int64))
        start += size
    return np.concatenate([np.zeros(0, np.int64), *found])


@final
class NanWatch:
    """Looks at gradients of one model, and tells once.

    Args:
        group: the ranks over which they are averaged.

    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.looks = group.nranks > 1
        """Whether nothing has been found yet."""

    def heard(self) -> None:
        """Be silent: the rank on which NaN has begun tells it."""
        self.looks = False

    def tell(self, names: str) -> None:
        """Say that the gradients of these parameters have NaN here. Local."""
        self.looks = False
        logger.warning(
            "rank %d: the gradient of %s has NaN, which averaging spreads to all ranks; look at "
            "the loss and the batch of this rank. HPCDIST_CHECK_NAN=1 refuses such a backward "
            "pass. (Said only once.)",
            self._group.world_rank,
            names,
        )
