"""The product of two matrices of which one is wanted whole on every rank: panel by panel.

A panel is the part that one rank has of it. Inside a node all ranks read the panels where they lie;
else they take a panel, multiply, and forget it. So no rank ever has more of the matrix than a
panel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.comm.lending import lent
from hpcdist.mesh.agreement import key_of
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.rules.basis import line_of, make, resharded, shapes_of, uncut

LARGE = 1 << 20
"""Bytes from which on a matrix is taken in panels."""
_ROWS = 512
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
    lo = 0
    with _panels(y) as panels:
        for panel in panels:
            columns, lo = part[:, lo : lo + len(panel)], lo + len(panel)
            if lo == len(panel):
                np.matmul(columns, panel, out=result)
                continue
            for first in range(0, shape[0], _ROWS):
                rows = result[first : first + _ROWS]
                rows += np.matmul(columns[first : first + _ROWS], panel, out=room[: len(rows)])
    return make(result, layout)


@contextmanager
def _panels(y: DistArray) -> Iterator[Iterable[Any]]:
    """Give the parts of `y` one after the other, without those that are empty."""
    layout, mesh = y.layout, y.layout.mesh
    bounds = [(lo, hi) for lo, hi in pairwise(layout.cuts[0]) if lo < hi]
    if mesh.group.one_node:
        words = f"lend {layout!r}"
        key = key_of(f"{words} {layout.cuts}", mesh)
        with lent(y.local, shapes_of(layout), key=key, words=words, group=mesh.group) as parts:
            if parts is not None:
                yield (parts[rank] for rank in line_of(layout, 0) if parts[rank].size)
                return
    yield (_panel(y, lo, hi) for lo, hi in bounds)


def _panel(y: DistArray, lo: int, hi: int) -> Any:
    """Return some rows of `y`, on every rank."""
    rows: DistArray = y[lo:hi]
    return resharded(rows, uncut(rows.layout)).local
