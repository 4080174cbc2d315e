"""Linear algebra of stacks and of powers: `numpy.linalg.eig`, `matrix_power` and their like.

`tall`, `systems` and `elimination` have what is computed of one matrix that is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.rules.basis import make, settled
from hpcdist.mesh.rules.creation import diagonal_mask
from hpcdist.mesh.rules.elimination import inv
from hpcdist.mesh.rules.matrices import LinAlgError, per_matrix
from hpcdist.mesh.rules.products import matmul
from hpcdist.mesh.rules.table import rule


def _of_stacks(name: str) -> Callable[..., Any]:
    numpys = getattr(np.linalg, name)

    def computed(x: Any, /, *args: Any, **options: Any) -> Any:
        return per_matrix(name, lambda part: numpys(part, *args, **options), x)

    computed.__name__, computed.__doc__ = name, f"Return what `numpy.linalg.{name}` does."
    return rule(f"linalg.{name}")(computed)


for _name in ("eigh", "eigvalsh", "eig", "eigvals"):
    _of_stacks(_name)


@rule("linalg.matrix_power")
def matrix_power(x: Any, n: int, /) -> Any:
    """Return the product of a matrix with itself, `n` times."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise LinAlgError(f"a power is for square matrices, not for an array of shape {x.shape}")
    if n < 0:
        return matrix_power(inv(x), -n)
    x = settled(x)
    if n == 0:
        mask = np.broadcast_to(diagonal_mask(x.layout, 0), x.local.shape)
        return make(mask.astype(x.dtype), x.layout)
    result = None
    while n:
        if n % 2:
            result = x if result is None else matmul(result, x)
        n //= 2
        x = matmul(x, x) if n else x
    return result
