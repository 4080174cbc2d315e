"""The runs of arrays that a rank owns, as `LocalSlice`s by name for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.arrays.transfer import near
from hpcdist.checkpoint.boxes import simplest
from hpcdist.checkpoint.local_slice import LocalSlice, box_of
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.sharding.partition import Unit

State = dict[str, Any]


class OwnedRun(NamedTuple):
    """One run of an array that this rank owns: its name in checkpoints, and where the run is."""

    name: str
    data: NumpyArray
    shape: tuple[int, ...]
    offset: int


def owned_runs(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    unit: Unit,
    rank: int,
    array: NumpyArray,
    suffix: str = "",
) -> list[OwnedRun]:
    """Return the runs that `rank` owns of a unit; `array` is its share of it.

    An array of pairs of real numbers stands for complex ones: shapes get a last axis of 2.
    """
    per = array.size // unit.share if unit.share else 1
    return [
        OwnedRun(
            names[segment.parameter] + suffix,
            array[segment.start * per : segment.stop * per],
            shapes[segment.parameter] if per == 1 else (*shapes[segment.parameter], per),
            segment.offset * per,
        )
        for segment in unit.segments(rank)
    ]


def as_slices(runs: Iterable[OwnedRun]) -> State:
    """Return the runs as a state of `LocalSlice`s, which are views of the runs' memory."""
    return {run.name: LocalSlice(run.data, run.shape, offset=run.offset) for run in runs}


def check_runs(runs: Iterable[OwnedRun], state: Mapping[str, Any]) -> None:
    """Refuse a state that does not have all that the runs need.

    Raises:
        UsageError: a name is missing, has another shape, or a run of it is missing.

    """
    for run in runs:
        if run.name not in state:
            raise UsageError(
                f"the state has no {run.name!r}; load one of the same model and optimizer "
                f"(it has {', '.join(map(str, list(state)[:8]))})"
            )
        _source(run, state[run.name])


def fill_runs(runs: Iterable[OwnedRun], state: Mapping[str, Any]) -> None:
    """Copy what the runs need out of a state of `LocalSlice`s or whole arrays."""
    for run in runs:
        run.data[...] = near(run.data, _source(run, state[run.name]))


def _source(run: OwnedRun, given: Any) -> NumpyArray:
    """Return the elements of a run, flat."""
    is_slice = isinstance(given, LocalSlice)
    data, shape = (given.data, given.global_shape) if is_slice else (given, np.shape(given))
    if tuple(shape) != run.shape:
        raise UsageError(
            f"the state's {run.name!r} has shape {tuple(shape)}, but here it is "
            f"{run.shape}; load a state of the same model"
        )
    flat = view_of(data).reshape(-1)
    offset = _start_of(given, run.name) if is_slice else 0
    start = run.offset - offset
    if start < 0 or start + run.data.size > flat.size:
        raise UsageError(
            f"the state has elements {offset} to {offset + flat.size} of {run.name!r}, but this "
            f"rank needs {run.offset} to {run.offset + run.data.size}; load the state with "
            "hpcdist.checkpoint, which brings each rank what it needs"
        )
    return flat[start : start + run.data.size]


def _start_of(given: LocalSlice, name: str) -> int:
    """Return where a slice begins, if it is a run of elements."""
    shape, box = box_of(given, name, np.shape(given.data))
    box = simplest(box, shape)
    if not box.is_run:
        raise UsageError(
            f"the state has {given} of {name!r}, which is not a run of elements; load the state "
            "with hpcdist.checkpoint, which gives each rank its part"
        )
    return box.offsets[0]
