"""What this rank holds of the arrays of a state, and the bytes of what it writes or keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import library_of
from hpcdist.checkpoint.boxes import contains, position_in, simplest, whole
from hpcdist.checkpoint.dist_arrays import is_dist_array, slices_of as slices_of_dist_array
from hpcdist.checkpoint.dtensor import is_dtensor, slices_of as slices_of_dtensor
from hpcdist.checkpoint.formats import name_of_dtype
from hpcdist.checkpoint.host_copies import look, to_read
from hpcdist.checkpoint.local_slice import LocalSlice, box_of
from hpcdist.checkpoint.plan import Array, Held, Share
from hpcdist.checkpoint.sharded_weight import (
    is_sharded_weight,
    slices_of as slices_of_sharded_weight,
)
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple


class View(NamedTuple):
    """An array of this rank, or the data of a slice."""

    held: Held
    array: Any


Views = dict[str, list[View]]
"""By the name of the array: what this rank has of it."""


class Part(NamedTuple):
    """A box of an array, and its bytes here."""

    share: Share
    array: Array
    memory: memoryview


_SPREAD: tuple[tuple[Callable[[Any], bool], Callable[[Any, str], list[LocalSlice]]], ...] = (
    (is_dist_array, slices_of_dist_array),
    (is_sharded_weight, slices_of_sharded_weight),
    (is_dtensor, slices_of_dtensor),
)
"""Arrays that know which part of a whole this rank has: how they are told, and their slices."""


def is_array(value: Any) -> bool:
    """Return whether `value` is an array of some library, or a scalar of NumPy's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    if isinstance(value, (str, bytes, dict, list, tuple)) or type(value) in (int, float, complex):
        return False
    if _slicer_of(value) is not None:
        return True
    try:
        library_of(value)
    except UsageError:
        return False
    return True


def is_held(value: Any) -> bool:
    """Return whether `views_of` takes it: an array or a slice."""
    return isinstance(value, LocalSlice) or is_array(value)


def views_of(value: Any, name: str) -> list[View]:
    """Return what this rank has of an array, without reading it: all of it, or slices.

    Raises:
        UsageError: a slice is wrong, or it is an array that cannot be saved.

    """
    slices_of = None if type(value) is np.ndarray else _slicer_of(value)
    parts = [value] if slices_of is None else slices_of(value, name)
    return [_view(name, part) for part in parts]


def _slicer_of(value: Any) -> Callable[[Any, str], list[LocalSlice]] | None:
    return next((slices for is_one, slices in _SPREAD if is_one(value)), None)


def _view(name: str, part: Any) -> View:
    array = part.data if isinstance(part, LocalSlice) else part
    dtype, shape = look(array, name)
    if array is part:
        return View(Held(name, name_of_dtype(dtype), shape, whole(shape)), array)
    shape, box = box_of(part, name, shape)
    return View(Held(name, name_of_dtype(dtype), shape, simplest(box, shape)), array)


def all_held(views: Views) -> list[Held]:
    """Return the description of this rank's holdings, for the other ranks."""
    return [view.held for found in views.values() for view in found]


def part_of(share: Share, views: Sequence[View]) -> Part:
    """Copy the bytes of a share to host memory: the first rows of this rank's part, or others."""
    held, array = next(view for view in views if contains(view.held.box, share.box))
    first = position_in(held.box, share.box)
    memory = to_read(array, share.name, first, first + share.box.size)
    return Part(share, Array(held.dtype, held.shape), memory)
