"""torch's `DTensor`s as `Shard`s: what `fully_shard` makes of parameters, and states of optimizers.

They are found by the name of their class, so that torch is not imported.
"""

from __future__ import annotations

import math
from typing import Any

from hpcdist.checkpoint.shard import Shard
from hpcdist.errors import UsageError


def is_dtensor(value: Any) -> bool:
    """Say whether `value` is a DTensor."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed")


def shard_of(dtensor: Any, name: str) -> Shard:
    """Return what this rank has of a DTensor: its own memory.

    Raises:
        UsageError: it is divided so that a rank's part is no run of elements, or it is a sum that
            is not computed yet.

    """
    shape = tuple(dtensor.shape)
    rows, begin = (shape[0] if shape else 1), 0
    mesh = dtensor.device_mesh
    for axis, placement in enumerate(dtensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard" or placement.dim != 0:
            raise UsageError(
                f"{name!r} is a DTensor with placements {dtensor.placements}, a part of which is "
                "no run of elements; save its full_tensor(), or shard it along its first dimension"
            )
        chunk = -(-rows // mesh.size(axis))
        first = min(rows, mesh.get_local_rank(axis) * chunk)
        begin, rows = begin + first, min(chunk, rows - first)
    return Shard(dtensor.to_local(), shape, begin * math.prod(shape[1:]))
