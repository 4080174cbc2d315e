"""`ShardedWeight`: Paddle's record of the part of a weight that one rank has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, final

from hpcdist.checkpoint.boxes import boxes_of_run
from hpcdist.checkpoint.dist_arrays import is_dist_array
from hpcdist.checkpoint.dtensor import is_dtensor
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.mesh.axes import model_line


@final
class ShardedWeight:
    """The part of a weight that this rank has: a box of it, or a run of a flattened box.

    `save_state_dict` and `load_state_dict` take it like a `LocalSlice`, on any number of ranks.

    Args:
        key: the name of the weight.
        local_tensor: the elements; of a flattened box an array of one dimension.
        local_shape: the shape of the box.
        global_shape: the shape of the whole weight.
        global_offset: where the box begins in it, along each dimension.
        is_flattened: whether the box is flattened, and maybe not all here.
        flattened_range: which elements of the flattened box are here; None for all.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> whole = np.arange(12.0).reshape(3, 4)
        >>> dist.ShardedWeight("w", whole[:, 2:], (3, 2), (3, 4), (0, 2))
        ShardedWeight('w', (3, 2) at (0, 2) of (3, 4))

    """

    __slots__ = (
        "flattened_range",
        "global_offset",
        "global_shape",
        "is_flattened",
        "key",
        "local_shape",
        "local_tensor",
    )

    def __init__(
        self,
        key: str,
        local_tensor: Any,
        local_shape: Sequence[int],
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        is_flattened: bool = False,
        flattened_range: slice | None = None,
    ) -> None:
        self.key, self.local_tensor = key, local_tensor
        self.local_shape, self.global_shape = tuple(local_shape), tuple(global_shape)
        self.global_offset = tuple(global_offset)
        self.is_flattened, self.flattened_range = is_flattened, flattened_range
        if not len(self.local_shape) == len(self.global_shape) == len(self.global_offset):
            raise UsageError(
                f"the ShardedWeight {key!r} must have a length and an offset for each dimension, "
                f"got local_shape={self.local_shape}, global_shape={self.global_shape}, "
                f"global_offset={self.global_offset}"
            )

    def __repr__(self) -> str:
        here = f"{self.local_shape} at {self.global_offset} of {self.global_shape}"
        return f"ShardedWeight({self.key!r}, {here})"


ShardedStateDict = dict[str, ShardedWeight]
"""Weights by their names."""


def shard_weight(key: str, weight: Any, axis: int, group: Group) -> ShardedWeight:
    """Declare that the ranks of a group have equal parts of a weight, in their order. Local.

    Args:
        key: the name of the weight.
        weight: this rank's part.
        axis: the dimension along which the weight is cut.
        group: the ranks, in the order of the parts.

    Raises:
        UsageError: the weight has no such dimension.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> part = dist.shard_weight("w", np.ones((2, 3)), axis=0, group=world)
        >>> part.global_shape == (2 * world.nranks, 3)
        True

    """
    return _sharded(key, weight, axis, group.rank, group.nranks)


def build_sharded_state_dict(
    state_dict: Mapping[str, Any],
    shard_rules: Mapping[str, int] | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Mark which weights of a state are parts, for `save_state_dict`. Local.

    Args:
        state_dict: weights by their names.
        shard_rules: for weights of which each rank along the axis ``"mp"`` has an equal part (of
            the current mesh, of the grid of hybrid training, or else of all ranks) the dimension
            that is cut. Weights without a rule are the same on all ranks.
        prefix: put before all names.

    Returns:
        A `ShardedWeight` for each weight; a `DistArray` or DTensor, which knows its parts, as it
        is.

    Raises:
        UsageError: a rule is for no weight, or for a dimension that it does not have.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> weights = {"up.weight": np.ones((4, 3)), "up.bias": np.ones(4)}
        >>> state = dist.build_sharded_state_dict(weights, {"up.weight": 0}, prefix="block.")
        >>> list(state)
        ['block.up.weight', 'block.up.bias']

    """
    rules = shard_rules or {}
    unknown = sorted(rules.keys() - state_dict.keys())
    if unknown:
        raise UsageError(f"shard_rules has {unknown[0]!r}, which the state does not have")
    line = model_line("build_sharded_state_dict") if rules else None
    made: dict[str, Any] = {}
    for name, weight in state_dict.items():
        key = prefix + name
        if is_dist_array(weight) or is_dtensor(weight):
            made[key] = weight
        elif line is not None and name in rules:
            (place,) = line.coordinate or (0,)
            made[key] = _sharded(key, weight, rules[name], place, line.size)
        else:
            shape = tuple(weight.shape)
            made[key] = ShardedWeight(key, weight, shape, shape, (0,) * len(shape))
    return made


def _sharded(key: str, weight: Any, axis: int, part: int, parts: int) -> ShardedWeight:
    local = tuple(weight.shape)
    if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < len(local):
        raise UsageError(f"Shard axis {axis} is invalid for tensor with shape {local}")
    shape, offset = [*local], [0] * len(local)
    shape[axis], offset[axis] = local[axis] * parts, local[axis] * part
    return ShardedWeight(key, weight, local, shape, offset)


# ---- as slices


def is_sharded_weight(value: Any) -> TypeGuard[ShardedWeight]:
    """Return whether `value` is a ShardedWeight."""
    return isinstance(value, ShardedWeight)


def slices_of(weight: ShardedWeight, name: str) -> list[LocalSlice]:
    """Return what this rank has of a weight, in its own memory; at least one slice.

    Raises:
        UsageError: the elements are not as many as are told.

    """
    data, offset = weight.local_tensor, weight.global_offset
    if not weight.is_flattened and weight.flattened_range is None:
        _check_shape(name, tuple(data.shape), weight.local_shape)
        return [LocalSlice(data, weight.global_shape, offsets=offset)]
    start, stop, _ = (weight.flattened_range or slice(None)).indices(math.prod(weight.local_shape))
    _check_shape(name, tuple(data.shape), (stop - start,))
    found, before = [], 0
    for box in boxes_of_run(start, stop, weight.local_shape):
        part = data[before : before + box.size].reshape(box.lengths)
        before += box.size
        begin = [sum(pair) for pair in zip(offset, box.offsets, strict=True)]
        found.append(LocalSlice(part, weight.global_shape, offsets=begin))
    return found or [LocalSlice(data, weight.global_shape, offset=0)]


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise UsageError(
            f"{name!r} is a ShardedWeight whose local_tensor has the shape {found}, but by its "
            f"local_shape and flattened_range it has {wanted}"
        )
