"""torch's `DTensor`s as `LocalSlice`s, by their device mesh and placements.

They are found by the name of their class, so that torch is not imported. Along each dimension a
rank has runs of indices: one, or several where a dimension is divided in strides, as FSDP does with
what tensor parallelism has divided already.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from hpcdist.checkpoint.boxes import Shape
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Runs = list[tuple[int, int]]
"""Indices along a dimension, in order: from the first of each pair to before the second."""


class Division(NamedTuple):
    """How an axis of a device mesh divides a dimension, and which of the parts is a rank's."""

    dim: int
    parts: int
    part: int
    strides: int = 1
    """The dimension is first cut into so many pieces, and then each of them into parts."""


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed")


def slices_of(dtensor: Any, name: str) -> list[LocalSlice]:
    """Return what this rank has of a DTensor, as views of its own memory; at least one.

    Raises:
        UsageError: it is a sum that is not computed yet, or its memory has another shape than its
            placements tell.

    """
    shape, local = tuple(dtensor.shape), dtensor.to_local()
    divisions = _divisions(dtensor, name)
    if divisions is None:
        return [LocalSlice(local.reshape(-1)[:0], shape, offset=0)]
    indices = indices_of(shape, divisions)
    lengths = tuple(sum(stop - start for start, stop in runs) for runs in indices)
    if tuple(local.shape) != lengths:
        raise UsageError(
            f"{name!r} is a DTensor of shape {shape} with placements {dtensor.placements}, of "
            f"which this rank has {lengths}, but its local tensor has the shape "
            f"{tuple(local.shape)}; save a LocalSlice of to_local() that says where it begins"
        )
    return [
        LocalSlice(local[tuple(each.here for each in part)], shape, [each.start for each in part])
        for part in product(*map(_beside_local, indices))
    ]


def _divisions(dtensor: Any, name: str) -> list[Division] | None:
    """Return how a DTensor is divided; None if it is one of other ranks."""
    mesh = dtensor.device_mesh
    place = mesh.get_coordinate()
    found = []
    for axis, placement in enumerate(dtensor.placements):
        kind = type(placement).__name__
        if kind not in _SHARDS:
            if kind == "Replicate":
                continue
            raise UsageError(
                f"{name!r} is a DTensor with placements {dtensor.placements}, which do not say "
                "whose its elements are; save its full_tensor(), or redistribute it first"
            )
        if place is not None:
            dim = placement.dim % max(1, len(dtensor.shape))
            strides = getattr(placement, "split_factor", 1)
            found.append(Division(dim, mesh.size(axis), place[axis], strides))
    return None if place is None else found


_SHARDS = ("Shard", "_StridedShard")


def indices_of(shape: Shape, divisions: Sequence[Division]) -> list[Runs]:
    """Return the indices that a rank has along each dimension: at least one run, maybe empty.

    Divisions follow each other: each divides what the ones before it have left.
    """
    indices: list[Runs] = [[(0, length)] for length in shape]
    for dim, parts, part, strides in divisions:
        indices[dim] = _divided(indices[dim], parts, part, strides)
    return indices


def _divided(runs: Runs, parts: int, part: int, strides: int) -> Runs:
    found: Runs = []
    for first, last in _chunks(sum(stop - start for start, stop in runs), strides):
        begin, end = _chunks(last - first, parts)[part]
        for start, stop in _counted(runs, first + begin, first + end):
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
    return found or [(runs[-1][1],) * 2]


def _chunks(length: int, count: int) -> Runs:
    """Divide so many indices as torch does: into chunks of one length, the last ones shorter."""
    size = -(-length // count)
    return [(min(length, each * size), min(length, each * size + size)) for each in range(count)]


def _counted(runs: Runs, first: int, last: int) -> Runs:
    """Return the indices in runs that have from `first` to before `last` others before them."""
    found, before = [], 0
    for start, stop in runs:
        low, high = max(start, start + first - before), min(stop, start + last - before)
        if low < high:
            found.append((low, high))
        before += stop - start
    return found


class _Located(NamedTuple):
    start: int
    here: slice


def _beside_local(runs: Runs) -> list[_Located]:
    """Return where each run begins, and where it is in the local tensor."""
    found, before = [], 0
    for start, stop in runs:
        found.append(_Located(start, slice(before, before + stop - start)))
        before += stop - start
    return found
