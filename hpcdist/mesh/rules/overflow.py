"""Products of floating-point numbers: a part may leave their range where the whole does not.

1e-300 * 1e300 * 1e300 is 1e300, but what the last two come to is infinite, and infinity times 0 is
NaN. Each rank multiplies its part, and the parts are combined; if a number has left the range on
the way, the ranks multiply one after the other, as NumPy does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.basis import combined, result_array
from hpcdist.transport.call.reduction import ReduceOp


def may_leave(x: DistArray, dtype: Any) -> bool:
    """Return whether products of an array, in a dtype or its own, are watched: on the host only."""
    kind = np.dtype(x.dtype if dtype is None else dtype).kind
    return kind in "fc" and type(x.local) is np.ndarray


def watched(compute: Callable[[], Any]) -> tuple[Any, bool]:
    """Return a result, and whether any number on the way was too large, too small, or none."""
    left: list[str] = []

    def note(what: str, _: int) -> None:
        left.append(what)

    with np.errstate(over="call", under="call", invalid="call", call=note):
        result = compute()
    return result, bool(left)


def product(
    part: Any, dims: tuple[int, ...], keepdims: bool, dtype: Any, mesh: ProcessMesh, axes: Any
) -> Any:
    """Return the product along some dimensions of the parts that ranks have; the same on all."""
    reduce: Any = np.multiply.reduce
    found, left = watched(lambda: result_array(reduce(part, dims, keepdims=keepdims, dtype=dtype)))
    both = np.stack([found, _words(found, left)])
    result, words = combined(both, mesh, axes, ReduceOp.PROD)
    if _is_in_range(result, words).all():
        return np.array(result)
    kept = [dim for dim in range(part.ndim) if dim not in dims]
    line = part.transpose(*dims, *kept).reshape(-1, *[part.shape[dim] for dim in kept])

    def step(before: Any) -> Any:
        numbers = np.concatenate([before[None], line])
        return np.multiply.accumulate(numbers, axis=0, dtype=found.dtype)[-1]

    start = np.ones([part.shape[dim] for dim in kept], found.dtype)
    return in_turn(start, step, mesh, axes)[1].reshape(found.shape)


def _words(found: Any, left: bool) -> Any:
    """Return what a rank says of its products: 1; 0 of zeros, inf of no numbers, else NaN."""
    if left:
        return np.full_like(found, np.nan)
    words = np.where(found == 0, 0, np.where(np.isfinite(found), 1, np.inf))
    return words.astype(found.dtype)


def _is_in_range(result: Any, words: Any) -> Any:
    """Return where a product is what the words of all ranks, multiplied, say that it must be."""
    is_normal = np.isfinite(result) & (abs(result) >= np.finfo(result.dtype).tiny)
    return np.where(words == 1, is_normal, np.where(words == 0, result == 0, words == np.inf))


def in_turn(
    start: Any, step: Callable[[Any], Any], mesh: ProcessMesh, axes: Sequence[int]
) -> tuple[Any, Any]:
    """Return what the parts before this rank's come to one after the other, and what all come to.

    Collective over the axes of the mesh: as many reductions as there are parts along them.

    Args:
        start: what there is before the first part.
        step: makes of what the parts before come to what they come to with this rank's.
        mesh: the ranks.
        axes: those along which ranks have other parts.

    """
    here = mesh.coordinate
    if here is None:
        return start, start
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + here[axis]
    before = value = start
    for turn in range(math.prod([mesh.shape[axis] for axis in axes])):
        told = np.zeros_like(value)
        if turn == number:
            before = value
            told[...] = step(value)
        combined(told.reshape(-1).view(np.uint8), mesh, axes, ReduceOp.BOR)
        value = told
    return before, value
