"""Whether arrays are equal: one answer, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.mesh.rules.basis import broadcast
from hpcdist.mesh.rules.pointwise import isclose, pointwise
from hpcdist.mesh.rules.reductions import all as all_of
from hpcdist.mesh.rules.table import rule


@rule("array_equal")
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same shape and elements."""
    if np.shape(a1) != np.shape(a2):
        return False

    def same(x: Any, y: Any) -> Any:
        return (x == y) | ((x != x) & (y != y)) if equal_nan else x == y

    return bool(all_of(pointwise(same, a1, a2)))


@rule("array_equiv")
def array_equiv(a1: Any, a2: Any) -> bool:
    """Return whether two arrays are equal where they are broadcast."""
    try:
        broadcast(np.shape(a1), np.shape(a2))
    except ValueError:
        return False
    return bool(all_of(pointwise(np.equal, a1, a2)))


@rule("allclose")
def allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> bool:
    """Return whether two arrays are equal within a tolerance."""
    return bool(all_of(isclose(a, b, rtol, atol, equal_nan)))
