"""`reads_of`, `gives_of`: who takes which boxes from whom, to have another layout. Pure.

[Note: contributions] Along an axis of the mesh that both layouts have partial in the same way
nothing is reduced: a rank reads from ranks of its own coordinate there. Other partial axes of the
source are reduced: each element is combined of one piece for each of their coordinates, in
ascending order. Along other partial axes of the destination every element is contributed by one
rank, or, where contributions are of the same kind, each rank takes a share of them; what no piece
covers is the neutral element. Means have no such element: each rank takes the whole.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator

from hpcdist.boxes import Box, meet
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.placements import ReduceType
from hpcdist.mesh.process_mesh import Coordinate
from hpcdist.named_tuple import NamedTuple


class Piece(NamedTuple):
    """A box that a rank takes from the part of another one, or from its own.

    Attributes:
        coordinate: where on the mesh of the source the other one is.
        box: of the whole array.
        first: whether nothing is there yet that it has to be combined with.
        reduce: how it is combined with what is there; None where nothing is combined. A mean is
            the sum of all contributions to an element, divided by their number.

    """

    coordinate: Coordinate
    box: Box
    first: bool
    reduce: ReduceType | None


class Gift(NamedTuple):
    """A `Piece` seen from its owner: the box that the rank at a coordinate takes."""

    coordinate: Coordinate
    box: Box


def reads_of(src: Layout, dst: Layout, coordinate: Coordinate) -> tuple[Piece, ...]:
    """Return the pieces of `src` that make the part of `dst` at a coordinate of its mesh.

    A rank takes from itself what it has; otherwise ranks that hold the same share the load.
    """
    key = "reads", dst, coordinate
    found: tuple[Piece, ...] | None = src.memo.get(key)
    if found is None:
        found = src.remember(key, tuple(_pieces(src, dst, coordinate, dst.box(coordinate))))
    return found


def gives_of(src: Layout, dst: Layout, coordinate: Coordinate) -> tuple[Gift, ...]:
    """Return what ranks take from the part of `src` at a coordinate of its mesh.

    What one rank takes is in the order in which it reads.
    """
    key = "gives", dst, coordinate
    found: tuple[Gift, ...] | None = src.memo.get(key)
    if found is None:
        own = src.box(coordinate)
        gifts = [
            Gift(reader, piece.box)
            for reader in dst.mesh.coordinates()
            if (common := meet(dst.box(reader), own)) is not None
            for piece in _pieces(src, dst, reader, common, coordinate)
            if piece.coordinate == coordinate
        ]
        found = src.remember(key, tuple(gifts))
    return found


class _Roles(NamedTuple):
    """What the partial axes of two layouts are for; see [Note: contributions]."""

    reduced: tuple[int, ...]
    """Of the source."""
    kind: ReduceType | None
    """How these are reduced."""
    owned: tuple[int, ...]
    """Of the destination, cutting the source: the element's owner contributes it."""
    shared: tuple[int, ...]
    """Of the destination, others."""
    divides: bool
    """Whether the ranks along the shared axes divide the contributions among them."""
    contributions: tuple[Coordinate, ...]
    """The coordinates along the reduced axes."""


def _roles(src: Layout, dst: Layout) -> _Roles:
    same = src.mesh == dst.mesh
    kept = {
        axis
        for axis, kind in enumerate(src.partial)
        if same and kind is not None and kind == dst.partial[axis]
    }
    reduced = [
        axis for axis, kind in enumerate(src.partial) if kind is not None and axis not in kept
    ]
    fresh = [
        axis
        for axis, kind in enumerate(dst.partial)
        if kind not in (None, ReduceType.kRedAvg) and axis not in kept
    ]
    cutting = {axis for axes in src.axes for axis in axes} if same else set()
    kind = src.partial[reduced[0]] if reduced else None
    return _Roles(
        tuple(reduced),
        kind,
        tuple(axis for axis in fresh if axis in cutting),
        tuple(axis for axis in fresh if axis not in cutting),
        all(dst.partial[axis] == kind for axis in fresh),
        tuple(itertools.product(*[range(src.mesh.sizes[axis]) for axis in reduced])),
    )


def _pieces(
    src: Layout, dst: Layout, coordinate: Coordinate, want: Box, giver: Coordinate | None = None
) -> Iterator[Piece]:
    """Return the pieces of what a rank wants of its part; of contributions only the giver's."""
    key = "roles", dst
    roles: _Roles = src.memo.get(key) or src.remember(key, _roles(src, dst))
    contributions = _contributions(dst, coordinate, roles)
    if giver is not None:
        own = tuple([giver[axis] for axis in roles.reduced])
        contributions = (own,) if own in contributions else ()
    if not contributions:
        return
    near = _near(src, dst, coordinate, roles)
    along = [[*parts_of(src, dim, lo, hi)] for dim, (lo, hi) in enumerate(want)]
    for parts in itertools.product(*along):
        owner = [*near]
        for _, digits in parts:
            for axis, digit in digits:
                owner[axis] = digit
        if any(owner[axis] != coordinate[axis] for axis in roles.owned):
            continue
        box, first = tuple([span for span, _ in parts]), True
        for steps in contributions:
            for axis, step in zip(roles.reduced, steps, strict=True):
                owner[axis] = step
            yield Piece(tuple(owner), box, first, roles.kind)
            first = False


def _contributions(dst: Layout, coordinate: Coordinate, roles: _Roles) -> tuple[Coordinate, ...]:
    """Return the coordinates along the reduced axes that this rank combines."""
    share, shares = _number(coordinate, dst.mesh.sizes, roles.shared)
    if roles.divides or not roles.reduced:
        return roles.contributions[share::shares]
    return () if share else roles.contributions


def _near(src: Layout, dst: Layout, coordinate: Coordinate, roles: _Roles) -> Coordinate:
    """Return the coordinate from which a rank takes what all have: its own, if it has one."""
    own = src.mesh.coordinate_of(dst.mesh.rank_at(coordinate))
    if own is not None:
        return own
    number, _ = _number(coordinate, dst.mesh.sizes, tuple(range(dst.mesh.ndim)))
    held = [axis for axes in src.axes for axis in axes]
    near = [0] * src.mesh.ndim
    for axis in range(src.mesh.ndim):
        if axis not in held and axis not in roles.reduced:
            number, near[axis] = divmod(number, src.mesh.sizes[axis])
    return tuple(near)


def parts_of(
    layout: Layout, dim: int, lo: int, hi: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Return what parts along a dimension have between `lo` and `hi`, and whose they are.

    Whose: pairs of an axis of the mesh and a coordinate along it.
    """
    cuts, axes, sizes = layout.cuts[dim], layout.axes[dim], layout.mesh.sizes
    part = bisect_right(cuts, lo) - 1
    while lo < hi:
        end = min(hi, cuts[part + 1])
        if lo < end:
            rest, digits = part, []
            for axis in reversed(axes):
                rest, digit = divmod(rest, sizes[axis])
                digits.append((axis, digit))
            yield (lo, end), digits
        lo, part = end, part + 1


def _number(
    coordinate: Coordinate, sizes: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, int]:
    """Return which of the coordinates along some axes this one is, and how many there are."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + coordinate[axis]
    return number, math.prod([sizes[axis] for axis in axes])
