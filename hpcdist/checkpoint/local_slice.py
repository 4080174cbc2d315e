"""`LocalSlice`: the part of an array that one rank holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, final

from hpcdist.boxes import position_of, strides_of
from hpcdist.checkpoint.boxes import Box, Shape, lies_in, run
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple


class _Fields(NamedTuple):
    data: Any
    global_shape: Sequence[int]
    offsets: tuple[int, ...] | int


@final
class LocalSlice(_Fields):
    """A part of a larger array: a box of it, or a run of elements of the flattened array.

    It says what this rank has of the whole array, or what it wants of it:

    - `data`: the elements; of a box an array of as many dimensions as the whole one has, of a run
      an array of any shape;
    - `global_shape`: shape of the whole array;
    - `offsets`: where the box begins in the whole array, along each dimension; or, as `offset`, one
      number: where the run begins in the array flattened in C order.

    Example:
        >>> import numpy as np
        >>> whole = np.arange(12).reshape(3, 4)
        >>> LocalSlice(whole[:, 2:4], whole.shape, offsets=(0, 2))
        LocalSlice([0:3, 2:4] of shape (3, 4))
        >>> LocalSlice(whole.reshape(-1)[5:], whole.shape, offset=5)
        LocalSlice(7 elements from 5 on, of shape (3, 4))

    """

    __slots__ = ()

    def __new__(
        cls,
        data: Any,
        global_shape: Sequence[int],
        offsets: Iterable[int] | int | None = None,
        *,
        offset: int | None = None,
    ) -> LocalSlice:
        """Take data, the whole shape, and either `offsets` of a box or the `offset` of a run.

        Raises:
            UsageError: both are given, or neither is.

        """
        begin: Any = offsets
        if isinstance(offsets, Iterable):  # an array of no dimensions is one, too
            begin = tuple(begin) if getattr(begin, "ndim", 1) else operator.index(begin)
        if begin is None:
            begin, offset = offset, None
        if begin is None or offset is not None:
            raise UsageError(
                "a LocalSlice begins somewhere: give offsets=, one for each dimension, or offset= "
                "in the flattened array, and not both"
            )
        return super().__new__(cls, data, global_shape, begin)

    @property
    def offset(self) -> int:
        """Where the first element stands in the whole array, flattened."""
        if isinstance(self.offsets, tuple):
            return position_of(self.offsets, strides_of(tuple(self.global_shape)))
        return self.offsets

    def __repr__(self) -> str:
        lengths = tuple(getattr(self.data, "shape", ()))
        if isinstance(self.offsets, tuple) and len(self.offsets) == len(lengths):
            what = f"{Box(self.offsets, lengths)}"
        else:
            what = f"{math.prod(lengths)} elements from {self.offsets} on,"
        return f"LocalSlice({what} of shape {self.global_shape})"


def box_of(given: LocalSlice, name: str, lengths: Shape) -> tuple[Shape, Box]:
    """Return the shape of the whole array, and the part that a slice is of it.

    Args:
        given: what a user gave for the array `name`.
        name: for messages.
        lengths: the shape of its data.

    Raises:
        UsageError: it does not lie inside of the whole array, or its data have another shape.

    """
    offsets = given.offsets if isinstance(given.offsets, tuple) else (given.offsets,)
    is_box = offsets is given.offsets
    try:
        shape = tuple(map(operator.index, given.global_shape))
        start = tuple(map(operator.index, offsets))
    except TypeError as error:
        raise UsageError(
            f"the LocalSlice {name!r} must have integers as global_shape and offsets: {error}"
        ) from error
    if is_box and not len(start) == len(lengths) == len(shape):
        raise UsageError(
            f"the LocalSlice {name!r} has {len(start)} offsets and data of shape {lengths}, but "
            f"the array has {len(shape)} dimensions, of shape {shape}; give one offset and one "
            "dimension of data for each, or offset= for elements of the flattened array"
        )
    box = Box(start, lengths) if is_box else run(start[0], start[0] + math.prod(lengths))
    if min(shape, default=0) < 0 or not lies_in(box, shape):
        part = f"is {box}" if is_box else f"has {box.size} elements from {start[0]} on"
        counted = "" if is_box else "; offset counts elements of the flattened array"
        raise UsageError(
            f"the LocalSlice {name!r} {part}, which do not lie inside the {math.prod(shape)} "
            f"elements of an array of shape {shape}{counted}"
        )
    return shape, box
