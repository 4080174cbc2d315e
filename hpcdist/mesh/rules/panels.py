"""The product of two matrices of which one is wanted whole on every rank: panel by panel.

A panel is the part that one rank has of it. All ranks take a panel, multiply, and forget it, so
that no rank ever has more of the matrix than a panel.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.rules.basis import make, resharded, uncut

LARGE = 1 << 20
"""Bytes from which on a matrix is taken in panels."""
_ROWS = 256
"""Of the product, which are computed at once, and then added to those of other panels."""


def fit(x: DistArray, y: DistArray, wanted: tuple[Layout, ...]) -> bool:
    """Return whether `y`, cut along its rows, is wanted whole where `x` is, and is large."""
    return (
        y.nbytes >= LARGE
        and bool(y.layout.axes[0])
        and not y.layout.axes[1]
        and wanted[0] is x.layout
        and wanted[1] is uncut(y.layout)
        and x.dtype == y.dtype
        and x.dtype.char in "fdFD"
        and type(x.local) is np.ndarray
        and x.layout.mesh.coordinate is not None
    )


def multiplied(x: DistArray, y: DistArray, layout: Layout) -> DistArray:
    """Return ``x @ y`` in its layout."""
    part, shape = x.local, (x.local.shape[0], y.shape[1])
    result = np.zeros(shape, x.dtype)
    room = np.empty((min(_ROWS, shape[0]), shape[1]), x.dtype)
    bounds = [(lo, hi) for lo, hi in pairwise(y.layout.cuts[0]) if lo < hi]
    for number, (lo, hi) in enumerate(bounds):
        panel = _panel(y, lo, hi)
        if number == 0:
            np.matmul(part[:, lo:hi], panel, out=result)
            continue
        for first in range(0, shape[0], _ROWS):
            rows = result[first : first + _ROWS]
            rows += np.matmul(part[first : first + _ROWS, lo:hi], panel, out=room[: len(rows)])
    return make(result, layout)


def _panel(y: DistArray, lo: int, hi: int) -> Any:
    """Return some rows of `y`, on every rank."""
    rows: DistArray = y[lo:hi]
    return resharded(rows, uncut(rows.layout)).local
