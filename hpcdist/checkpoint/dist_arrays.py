"""`DistArray`s as `LocalSlice`s, by their layouts."""

from __future__ import annotations

from typing import Any, TypeGuard

from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray


def is_dist_array(value: Any) -> TypeGuard[DistArray]:
    """Return whether `value` is a DistArray."""
    return isinstance(value, DistArray)


def slices_of(array: DistArray, name: str) -> list[LocalSlice]:
    """Return what this rank has of an array, in its own memory: one slice, maybe empty.

    Raises:
        UsageError: its contributions are not reduced yet.

    """
    if array.layout.is_partial:
        raise UsageError(
            f"{name!r} is a DistArray with placements {[*array.placements]}, of which each rank "
            "has contributions only; dist.reshard it first, with Shard(dim) or Replicate() in the "
            "place of Partial"
        )
    box = array._box()
    if box is None:
        return [LocalSlice(array.local, array.shape, offset=0)]
    return [LocalSlice(array.local, array.shape, offsets=[begin for begin, _ in box])]
