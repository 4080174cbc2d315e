"""Windows: a box for each rank that may reach beyond its part, and beyond the array.

What a window has of other parts is read in one exchange, in place inside a node; what it has of
this rank's own part is copied. The plan is pure, and remembered by the layout.

[Note: beyond the array] A window beyond the end of a dimension has the places of the array again:
periodically, or mirrored with or without the last one, or the last one itself. So along each
dimension a window is a list of runs: neighbouring places that are neighbours in the array, too,
onwards or backwards, or one place for all of a run. A rank reads the places of every run in the
order that they have in the array, and turns or repeats them where they are then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from typing import Any

import numpy as np

from hpcdist.boxes import Box, lengths, meet, within
from hpcdist.comm.exchanges import exchange
from hpcdist.errors import UsageError
from hpcdist.mesh.agreement import key_of
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.process_mesh import Coordinate
from hpcdist.mesh.reads import parts_of
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Give, Read

Slices = tuple[slice, ...]


class Edge(Enum):
    """What is beyond the ends of a dimension."""

    NOTHING = auto()
    """Any contents: the caller fills them in, or the window ends where the array does."""
    PERIODIC = auto()
    REFLECT = auto()
    """Mirrored at the last place, which is there once."""
    SYMMETRIC = auto()
    """Mirrored behind the last place, which is there twice."""
    NEAREST = auto()


class Windows(NamedTuple):
    """The windows of all ranks.

    Attributes:
        name: which ones, in words and as a key: ranks that mean the same windows of a layout have
            equal names.
        window: returns the window of the rank at a coordinate, given the layout of the array.
        edges: for each dimension what is beyond its ends.
        moves: the dimensions along which any window is not the part itself.

    """

    name: str
    window: Callable[[Layout, Coordinate], Box]
    edges: tuple[Edge, ...]
    moves: tuple[int, ...]


class How(Enum):
    """How a run goes through the places of the array."""

    ONWARDS = auto()
    BACKWARDS = auto()
    REPEATED = auto()


class Run(NamedTuple):
    """Places of a window along a dimension, from `target` on, and of the array, from `source` on.

    A run that goes backwards begins at the last of its places in the array.
    """

    target: int
    length: int
    source: int
    how: How

    @property
    def end(self) -> int:
        """Where its places in the array end."""
        return self.source + (1 if self.how is How.REPEATED else self.length)


class Piece(NamedTuple):
    """The part of a window at the rank `owner`: its place in the array and in the window."""

    owner: Coordinate
    box: Box
    target: Slices


class Turn(NamedTuple):
    """What is turned around along a dimension, or repeated, when it is there."""

    dim: int
    start: int
    stop: int
    how: How


class Plan(NamedTuple):
    """What one rank does to have its window."""

    shape: tuple[int, ...]
    copies: tuple[tuple[Slices, Slices], ...]
    """Of its own part: from where, to where."""
    reads: tuple[Read, ...]
    gives: tuple[Give, ...]
    turns: tuple[Turn, ...]
    is_local: bool
    """Whether no rank needs anything of another."""
    key: int
    words: str


def read_windows(a: DistArray, windows: Windows) -> Any:
    """Return this rank's window of an array, new memory. Collective, unless all have theirs.

    Raises:
        UsageError: a window goes around an array that has no elements.

    """
    layout, own = a.layout, a.local
    here = layout.mesh.coordinate
    if here is None:
        return np.empty_like(own)
    plan = plan_of(layout, windows, here)
    room = np.empty_like(own, shape=plan.shape, order="C")
    for source, target in plan.copies:
        room[target] = own[source]
    if not plan.is_local:
        exchange(
            own if own.flags.c_contiguous else own.copy(order="C"),
            room,
            plan.reads,
            plan.gives,
            rule_op=None,
            key=plan.key,
            words=plan.words,
            group=layout.mesh.group,
        )
    for turn in plan.turns:
        _turn(room, turn)
    return room


def _turn(room: Any, turn: Turn) -> None:
    """Turn around, or repeat, what has been read in the order of the array."""
    part = np.moveaxis(room, turn.dim, 0)[turn.start : turn.stop]  # a view
    if turn.how is How.REPEATED:
        part[1:] = part[:1]
    else:
        part[...] = part[::-1].copy()


# ---- the plan


def plan_of(layout: Layout, windows: Windows, here: Coordinate) -> Plan:
    """Return what the rank at a coordinate does to have its window."""
    key: Hashable = "windows", windows.name, here
    found: Plan | None = layout.memo.get(key)
    return found or layout.remember(key, _plan(layout, windows, here))


def _plan(layout: Layout, windows: Windows, here: Coordinate) -> Plan:
    _check_edges(layout, windows)
    mesh = layout.mesh
    ranks = sorted(mesh.ranks)
    number = {place: ranks.index(mesh.rank_at(place)) for place in mesh.coordinates()}
    own, window = layout.box(here), windows.window(layout, here)
    copies, reads = [], []
    for owner, box, target in _pieces(layout, windows, here):
        if owner == here:
            copies.append((within(box, own), target))
        else:
            have = layout.box(owner)
            reads.append(Read(number[owner], lengths(have), within(box, have), target))
    gives = [
        Give(number[reader], within(piece.box, own))
        for reader in mesh.coordinates()
        if reader != here
        for piece in _pieces(layout, windows, reader, here)
    ]
    turns = [
        Turn(dim, run.target, run.target + run.length, run.how)
        for dim, runs in enumerate(_runs(layout, windows, here))
        for run in runs
        if run.how is not How.ONWARDS and run.length > 1
    ]
    words = f"{windows.name} of {layout!r}"
    return Plan(
        lengths(window),
        tuple(copies),
        tuple(reads),
        tuple(gives),
        tuple(turns),
        not any(mesh.sizes[axis] > 1 for dim in windows.moves for axis in layout.axes[dim]),
        key_of(f"{words} {layout.cuts}", mesh),
        words,
    )


def _check_edges(layout: Layout, windows: Windows) -> None:
    for dim in windows.moves:
        if not layout.shape[dim] and windows.edges[dim] is not Edge.NOTHING:
            raise UsageError(
                f"{windows.name} takes elements from dimension {dim}, but an array of shape "
                f"{layout.shape} has none; give a value for what is beyond its ends"
            )


def _runs(layout: Layout, windows: Windows, place: Coordinate) -> list[list[Run]]:
    return [
        [*runs_of(lo, hi, length, edge)]
        for (lo, hi), length, edge in zip(
            windows.window(layout, place), layout.shape, windows.edges, strict=True
        )
    ]


def _pieces(
    layout: Layout, windows: Windows, reader: Coordinate, giver: Coordinate | None = None
) -> Iterator[Piece]:
    """Return the parts of which the window of a rank is made, or those that one rank gives.

    Of ranks that hold the same it takes from the one of its own coordinate along their axis.
    """
    cutting = {axis for axes in layout.axes for axis in axes}
    if giver is not None and any(
        giver[axis] != step for axis, step in enumerate(reader) if axis not in cutting
    ):
        return
    along = [
        [
            (span, digits, _target(run, span))
            for run in runs
            for span, digits in parts_of(layout, dim, run.source, run.end)
            if giver is None or all(giver[axis] == digit for axis, digit in digits)
        ]
        for dim, runs in enumerate(_runs(layout, windows, reader))
    ]
    for parts in itertools.product(*along):
        owner = [*reader]
        for _, digits, _ in parts:
            for axis, digit in digits:
                owner[axis] = digit
        box = tuple([span for span, _, _ in parts])
        yield Piece(tuple(owner), box, tuple([target for _, _, target in parts]))


def _target(run: Run, span: tuple[int, int]) -> slice:
    start = run.target + span[0] - run.source
    return slice(start, start + span[1] - span[0])


def runs_of(lo: int, hi: int, length: int, edge: Edge) -> Iterator[Run]:
    """Return the runs of a window from `lo` to before `hi`, along a dimension of a length.

    See [Note: beyond the array].
    """
    inside = meet(((lo, hi),), ((0, length),))
    if inside is not None:
        ((start, stop),) = inside
        yield Run(start - lo, stop - start, start, How.ONWARDS)
    if edge is Edge.NOTHING:
        return
    for start, stop in ((lo, min(hi, 0)), (max(lo, length), hi)):
        if start < stop:
            for run in _beyond(start, stop, length, edge):
                yield run._replace(target=run.target - lo)


def _beyond(lo: int, hi: int, length: int, edge: Edge) -> Iterator[Run]:
    """Return the runs of a window that is beyond the end of a dimension, with targets as `lo`."""
    if edge is Edge.NEAREST or length == 1:
        yield Run(lo, hi - lo, 0 if lo < 0 else length - 1, How.REPEATED)
        return
    tile = length - 1 if edge is Edge.REFLECT else length
    while lo < hi:
        number, first = divmod(lo, tile)
        count = min(hi - lo, tile - first)
        if number % 2 and edge is not Edge.PERIODIC:
            yield Run(lo, count, length - first - count, How.BACKWARDS)
        else:
            yield Run(lo, count, first, How.ONWARDS)
        lo += count
