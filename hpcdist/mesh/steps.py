"""Run the steps of a plan: one ordinary collective each, along an axis of the mesh, or none.

Each verb is a function from this rank's part to its part of the next layout. Parts may be empty
and of different sizes: the collectives take lists of views and pack what they have to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.boxes import Box, meet, within
from hpcdist.comm.collectives import all_gather, all_reduce, alltoall, reduce_scatter
from hpcdist.comm.group import Group
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.placements import ReduceType
from hpcdist.mesh.planner import Step
from hpcdist.mesh.process_mesh import Coordinate, ProcessMesh
from hpcdist.mesh.reducing import OPERATORS, neutral_of
from hpcdist.mesh.room import room_for
from hpcdist.mesh.routes import exchange_boxes

LOCAL = frozenset({"slice", "to_partial"})
"""The verbs that need nothing of other ranks."""


def run_steps(local: Any, src: Layout, steps: Sequence[Step], out: Any = None) -> Any:
    """Return this rank's part of the last layout, in `out` if given.

    Collective over the mesh, unless all steps are `LOCAL`.
    """
    if not steps and out is not None:
        out[...] = local
        return out
    last = len(steps) - 1
    for number, step in enumerate(steps):
        room = out if number == last and out is not None else room_for(step.to, local)
        _VERBS[step.verb](local, room, src, step)
        local, src = room, step.to
    return local


# ---- without communication


def _slice(local: Any, room: Any, src: Layout, step: Step) -> None:
    here = _here(src.mesh)
    room[...] = local[within(step.to.box(here), src.box(here))]


def _to_partial(local: Any, room: Any, src: Layout, step: Step) -> None:
    """Write each rank's part along the axis; what all ranks have, the first one writes alone."""
    here = _here(src.mesh)
    have, want = src.box(here), step.to.box(here)
    is_cut = any(step.axis in axes for axes in src.axes)
    is_average = step.to.partial[step.axis] is ReduceType.kRedAvg
    tells = is_cut or is_average or here[step.axis] == 0
    if is_cut or not tells:
        room[...] = neutral_of(step.to, room.dtype)
    if tells:
        room[within(have, want)] = local


# ---- by a collective


def _all_reduce(local: Any, room: Any, src: Layout, step: Step) -> None:
    room[...] = local
    all_reduce(room, _operator(src, step), _line(src.mesh, step.axis)[0])


def _reduce_scatter(local: Any, room: Any, src: Layout, step: Step) -> None:
    group, places = _line(src.mesh, step.axis)
    have = src.box(_here(src.mesh))
    given = [local[within(step.to.box(each), have)] for each in places]
    reduce_scatter(room, given, _operator(src, step), group)


def _all_gather(local: Any, room: Any, src: Layout, step: Step) -> None:
    group, places = _line(src.mesh, step.axis)
    want = step.to.box(_here(src.mesh))
    all_gather([room[within(src.box(each), want)] for each in places], local, group)


def _all_to_all(local: Any, room: Any, src: Layout, step: Step) -> None:
    group, places = _line(src.mesh, step.axis)
    here = _here(src.mesh)
    have, want = src.box(here), step.to.box(here)
    given = [_part(local, have, step.to.box(each)) for each in places]
    taken = [_part(room, want, src.box(each)) for each in places]
    alltoall(taken, given, group)


def _exchange(local: Any, room: Any, src: Layout, step: Step) -> None:
    exchange_boxes(local, src, step.to, room)


_VERBS: dict[str, Callable[[Any, Any, Layout, Step], None]] = {
    "slice": _slice,
    "to_partial": _to_partial,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
}


# ---- parts


def _operator(src: Layout, step: Step) -> int:
    kind = src.partial[step.axis]
    assert kind is not None
    return OPERATORS[kind]


def _here(mesh: ProcessMesh) -> Coordinate:
    place = mesh.coordinate
    assert place is not None, "who is outside the mesh runs no steps"
    return place


def _line(mesh: ProcessMesh, axis: int) -> tuple[Group, list[Coordinate]]:
    """Return the group of the ranks along an axis through this one, and where they are."""
    group = mesh.get_group(axis)
    places = [mesh.coordinate_of(rank) for rank in group.ranks]
    return group, [place for place in places if place is not None]


def _part(array: Any, box: Box, other: Box) -> Any:
    """Show what of an array that holds `box` is in another box, maybe nothing."""
    common = meet(box, other)
    if common is None:
        return np.empty_like(array, shape=(0,))
    return array[within(common, box)]
