"""`Shard`: the part of an array that one rank holds."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from hpcdist.errors import UsageError


class Shard(NamedTuple):
    """A run of consecutive elements of a larger array, flattened in C order.

    In the state given to `save` it says what this rank owns of the array; in the state given to
    `load`, what it wants of it.
    """

    data: Any
    """The elements, in an array of any shape."""
    global_shape: tuple[int, ...]
    """Shape of the whole array."""
    offset: int
    """Where the first of the elements stands in the whole, flattened array."""

    def __repr__(self) -> str:
        data = getattr(self.data, "size", type(self.data).__name__)
        return f"Shard({data} elements from {self.offset} on, of shape {self.global_shape})"


def bounds_of(shard: Shard, name: str, size: int) -> tuple[tuple[int, ...], int, int]:
    """Return the whole shape, and the first element and the one after the last, of a shard.

    Args:
        shard: what a user gave for the array `name`.
        name: for messages.
        size: how many elements its data have.

    Raises:
        UsageError: it does not lie inside the whole array.

    """
    try:
        shape = tuple(map(operator.index, shard.global_shape))
        start = operator.index(shard.offset)
    except TypeError as error:
        raise UsageError(
            f"the Shard {name!r} must have integers as shape and offset: {error}"
        ) from error
    whole = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= start <= whole - size:
        raise UsageError(
            f"the Shard {name!r} has {size} elements from {start} on, which do not lie inside the "
            f"{whole} of an array of shape {shape}; offset counts elements of the flattened array"
        )
    return shape, start, start + size
