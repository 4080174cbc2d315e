"""What this rank holds of the arrays of a state, and the bytes of what it writes or keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcdist.checkpoint.boxes import contains, position_in
from hpcdist.checkpoint.host_copies import to_read
from hpcdist.checkpoint.plan import Array, Held, Share
from hpcdist.checkpoint.state import data_of, extent_of


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


def views_of(arrays: Mapping[str, Sequence[Any]]) -> Views:
    """Return what this rank holds, of the arrays and slices that `describe_state` has found.

    Raises:
        UsageError: a slice is wrong.

    """
    return {name: [_view(name, each) for each in parts] for name, parts in arrays.items()}


def all_held(views: Views) -> list[Held]:
    """Return the description of this rank's holdings, for the other ranks."""
    return [view.held for found in views.values() for view in found]


def part_of(share: Share, views: Sequence[View]) -> Part:
    """Copy the bytes of a share to host memory: the first rows of this rank's part, or others."""
    held, array = next(view for view in views if contains(view.held.box, share.box))
    first = position_in(held.box, share.box)
    memory = to_read(array, share.name, first, first + share.box.size)
    return Part(share, Array(held.dtype, held.shape), memory)


def _view(name: str, part: Any) -> View:
    return View(Held(name, *extent_of(part, name)), data_of(part))
