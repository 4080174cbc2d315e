"""Buckets: which gradients travel together, and in which order.

`plan_buckets` groups the gradients of a model as Paddle's ``Eager_AssignGroupBySize`` does. It
computes with integers only.

[Note: bucket order] A backward pass computes the gradients of the parameters registered last
first. So the buckets are reversed: the last registered gradients are sent first, and the bucket
with the first registered ones, for which nothing is left to hide behind, is the small one.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

from hpcdist.errors import UsageError


def plan_buckets(
    nbytes: Sequence[int],
    dtypes: Sequence[Hashable],
    limits: Sequence[int],
    sparse: Sequence[int] = (),
) -> list[list[int]]:
    """Return the buckets in the order in which they are sent, each a list of gradient indices.

    A bucket holds gradients of one dtype, in order of registration, and is closed as soon as it
    has reached its limit: it may exceed the limit by its last gradient.

    Args:
        nbytes: bytes of each gradient, in order of registration.
        dtypes: anything that is equal for gradients that may share a bucket.
        limits: bytes; of each dtype, the first bucket has the first limit, the next the second,
            and so on; the last limit repeats. Usually ``[last, usual]``, see [Note: bucket order].
        sparse: gradients that travel alone: their indices, or one bool per gradient.

    Raises:
        UsageError: no limit or a negative one, a negative size, arguments of different lengths,
            an index that does not exist.

    Example:
        >>> plan_buckets([4, 4, 4, 4], ["float32"] * 4, limits=[4, 8])
        [[3], [1, 2], [0]]

    """
    alone = _indices(sparse, len(nbytes))
    _check_sizes(nbytes, dtypes, limits)
    closed: list[list[int]] = []
    unfilled: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    stage: dict[Hashable, int] = {}
    for index, (size, dtype) in enumerate(zip(nbytes, dtypes, strict=True)):
        if index in alone:
            closed.append([index])
            continue
        unfilled.setdefault(dtype, []).append(index)
        filled[dtype] = filled.get(dtype, 0) + size
        if filled[dtype] >= limits[min(stage.get(dtype, 0), len(limits) - 1)]:
            closed.append(unfilled.pop(dtype))
            filled[dtype] = 0
            stage[dtype] = stage.get(dtype, 0) + 1
    return sorted([*closed, *unfilled.values()], reverse=True)


def _check_sizes(nbytes: Sequence[int], dtypes: Sequence[Hashable], limits: Sequence[int]) -> None:
    if len(nbytes) != len(dtypes):
        raise UsageError(
            f"nbytes and dtypes must have one entry per gradient, got {len(nbytes)} and "
            f"{len(dtypes)}"
        )
    if not limits or min(limits) < 0:
        raise UsageError(
            f"limits must hold at least one number of bytes and none below 0, got {list(limits)}; "
            "give for example [1 << 20, 25 << 20]"
        )
    if nbytes and min(nbytes) < 0:
        raise UsageError(f"nbytes must not be negative, got {min(nbytes)}")


def _indices(sparse: Sequence[int], count: int) -> set[int]:
    """Turn flags or indices into a set of indices."""
    if any(flag is True or flag is False for flag in sparse):
        if len(sparse) != count:
            raise UsageError(
                f"sparse must have one bool per gradient, got {len(sparse)} for {count} gradients"
            )
        return {index for index, flag in enumerate(sparse) if flag}
    indices = {operator.index(index) for index in sparse}
    unknown = sorted(index for index in indices if not 0 <= index < count)
    if unknown:
        raise UsageError(
            f"sparse names gradient {unknown[0]}, but there are {count}, counted from 0"
        )
    return indices
