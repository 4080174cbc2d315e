"""`plan_reshard`: the cheapest steps from one layout to another. Pure.

A step changes what one axis of the mesh does, by an ordinary collective along it, except for
``exchange``, which takes any boxes to any boxes at once where partial values are not concerned.

| verb | the axis was | and becomes | what travels |
|---|---|---|---|
| ``slice`` | the same on all ranks | a cut | nothing |
| ``to_partial`` | the same, or the minor cut of a dimension | partial | nothing |
| ``all_reduce`` | partial | the same on all ranks | parts, twice |
| ``reduce_scatter`` | partial | the minor cut of a dimension | parts |
| ``all_gather`` | the minor cut of a dimension | the same on all ranks | parts of the others |
| ``all_to_all`` | the minor cut of a dimension | another minor cut | what is lacking |
| ``exchange`` | cut, or the same | cut, or the same | what is lacking |

[Note: search] The cheapest path is found by A* (Hart, Nilsson, Raphael 1968): first is looked at
what, with the least that is still to be paid, costs least. What is sure to help is not searched:
an axis that is to cut, and can without moving data, is sliced at once, so that all else is of fewer
bytes; an axis that is as it shall be is left alone, but for a slice before what is reduced; and
contributions are made last, for they are what takes most memory. So the search is from the source
to a layout `_before_partial`, and there are few layouts on its way: none is made but those of the
steps that are returned.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar, final

from hpcdist.errors import UsageError
from hpcdist.mesh.layout import Layout, default_cuts, longest, make_layout, subdivided
from hpcdist.mesh.placements import ReduceType
from hpcdist.mesh.reads import (
    Gift as Gift,
    Piece as Piece,
    gives_of as gives_of,
    reads_of as reads_of,
)
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import LinkCost

T = TypeVar("T")

WHOLE = -1
"""The axis of an exchange: all ranks of the mesh take part."""


class Costs(NamedTuple):
    """What it takes to move data along an axis of a mesh.

    Attributes:
        alpha: seconds a message.
        beta: seconds a byte received.
        gamma: seconds a byte copied or combined.

    """

    alpha: float
    beta: float
    gamma: float


NODE = Costs(alpha=2e-6, beta=1e-10, gamma=1e-10)
"""Between ranks of one node: a small collective in shared memory, and memory that one core copies
at 10 GB/s."""
NETWORK = Costs(alpha=5e-6, beta=4e-10, gamma=1e-10)
"""Between nodes: HDR InfiniBand of 25 GB/s, as in the benchmarks' model, whose port ten ranks of a
node share."""


def costs_of(
    crosses_nodes: Sequence[bool], measured: Mapping[str, LinkCost] = MappingProxyType({})
) -> tuple[Costs, ...]:
    """Return the costs along axes that are between nodes, or not: as measured, where they are."""
    node, network = (
        usual._replace(**measured[nodes]._asdict()) if nodes in measured else usual
        for nodes, usual in (("one", NODE), ("several", NETWORK))
    )
    return tuple([network if crosses else node for crosses in crosses_nodes])


class Step(NamedTuple):
    """One step of a plan.

    Attributes:
        verb: what is done; see the table of the module.
        axis: of the mesh, along which it is done; `WHOLE` for an exchange.
        to: the layout afterwards.

    """

    verb: str
    axis: int
    to: Layout


def plan_reshard(
    src: Layout, dst: Layout, itemsize: int, costs: Sequence[Costs] | None = None
) -> tuple[Step, ...]:
    """Return the cheapest steps from `src` to `dst`, layouts of one shape on one mesh.

    Args:
        src: what there is.
        dst: what is wanted.
        itemsize: bytes of an element.
        costs: for each axis of the mesh; those of one node if not given. All ranks must give the
            same, or their plans differ.

    Raises:
        UsageError: the layouts are of different shapes or on different meshes.

    """
    prices = (NODE,) * src.mesh.ndim if costs is None else tuple(costs)
    key = "plan", dst, itemsize, prices
    found: tuple[Step, ...] | None = src.memo.get(key)
    if found is None:
        if src.mesh != dst.mesh or src.shape != dst.shape:
            raise UsageError(
                f"steps lead from {src} to layouts of the same shape on the same mesh, not to {dst}"
            )
        found = src.remember(key, tuple(_Search(src, dst, itemsize, prices).steps()))
    return found


class _Cut(NamedTuple):
    """How one dimension is cut: by which axes, and where; None is `default_cuts`."""

    axes: tuple[int, ...]
    bounds: tuple[int, ...] | None


class _State(NamedTuple):
    """A layout on the way, without what all of them share."""

    cuts: tuple[_Cut, ...]
    partial: tuple[ReduceType | None, ...]


class _Move(NamedTuple):
    verb: str
    axis: int
    to: _State


@final
class _Search:
    """The search of one plan."""

    def __init__(self, src: Layout, dst: Layout, itemsize: int, costs: tuple[Costs, ...]) -> None:
        self.mesh, self.shape, self.sizes = src.mesh, src.shape, src.mesh.sizes
        self.itemsize, self.costs = itemsize, costs
        self.start, self.end = self._state_of(src), self._state_of(dst)
        self.spare = max(range(len(src.shape)), key=src.shape.__getitem__, default=-1)
        """The dimension that axes cut for a time, so that less travels along others."""
        self.contributions = self._contributions()
        self.goal = self._before_partial()
        self.levels = [self._levels(dim, cut) for dim, cut in enumerate(self.goal.cuts)]
        self.aim = {axis: dim for dim, cut in enumerate(self.goal.cuts) for axis in cut.axes}
        """The dimension that each axis shall cut."""

        self.reduced = [
            axis
            for axis, kind in enumerate(self.start.partial)
            if kind is not None and self.goal.partial[axis] is None
        ]
        self.wanted = self._nbytes(self.goal)
        self.beta = min([each.beta for each in costs])
        self.gamma = min([each.gamma for each in costs])

    def steps(self) -> Iterator[Step]:
        """Return the cheapest steps."""
        for verb, axis, to in itertools.chain(self._path(), self._contributing()):
            axes, bounds = zip(*to.cuts, strict=True) if to.cuts else ((), ())
            yield Step(verb, axis, make_layout(self.mesh, self.shape, axes, bounds, to.partial))

    # ---- the search

    def _path(self) -> list[_Move]:
        """Return the cheapest moves to the goal; see [Note: search]."""
        first = self._sliced(self.start)
        at = first[-1].to if first else self.start
        best, order = {at: 0.0}, itertools.count()
        queue = [(0.0, 0.0, next(order), at, first)]
        while queue:
            _, so_far, _, at, path = heapq.heappop(queue)
            if at == self.goal:
                return path
            if so_far > best[at]:
                continue
            for move, price in self._moves(at):
                slices = self._sliced(move.to)
                to = slices[-1].to if slices else move.to
                total = so_far + price + sum([self._price_of_slice(each) for each in slices])
                if total < best.get(to, math.inf):
                    least = total + self._at_least(to)
                    if least < best.get(self.goal, math.inf):
                        best[to] = total
                        heapq.heappush(
                            queue, (least, total, next(order), to, [*path, move, *slices])
                        )
        raise AssertionError("an exchange leads to the goal wherever nothing is partial")

    def _at_least(self, at: _State) -> float:
        """Return a price below that of any way from here to the goal.

        What the largest part lacks must be received, next to what it has, and partial axes must
        be reduced.
        """
        lacking = self.wanted - self._nbytes(at)
        least = self.beta * lacking + self.gamma * self.wanted if lacking > 0 else 0.0
        for axis in self.reduced:
            if at.partial[axis] is not None:
                least += self.costs[axis].alpha * (_rounds(self.sizes[axis]) + 1)
        return least

    def _moves(self, at: _State) -> Iterator[tuple[_Move, float]]:
        """Return what can be done and may help, with its price."""
        here = self._nbytes(at)
        reduced = [axis for axis in self.reduced if at.partial[axis] is not None]
        for axis in reduced:
            yield from self._reductions(at, axis, here)
        if reduced and self.shape:
            yield from self._detours(at)
        for dim, cut in enumerate(at.cuts):
            if cut.axes and not self._is_settled(dim, cut):
                yield from self._relocations(at, dim, here)
        if at.partial == self.goal.partial:
            yield self._exchange(at)

    def _reductions(self, at: _State, axis: int, here: int) -> Iterator[tuple[_Move, float]]:
        size, (alpha, beta, gamma) = self.sizes[axis], self.costs[axis]
        rounds, others = _rounds(size), here * (size - 1) / size
        whole = _State(at.cuts, _with(at.partial, axis, None))
        price = (2 * rounds + 1) * alpha + (2 * beta + gamma) * others
        yield _Move("all_reduce", axis, whole), price
        price = (rounds + 1) * alpha + (beta + gamma) * others
        for dim in self._scattered_along(axis):
            to = self._with_cut(whole, dim, self._finer(dim, at.cuts[dim], axis))
            yield _Move("reduce_scatter", axis, to), price

    def _detours(self, at: _State) -> Iterator[tuple[_Move, float]]:
        """Return slices along axes that are to hold the same, so that less is to be reduced."""
        for axis in range(len(self.sizes)):
            if axis not in self.aim and _is_free(at, axis):
                to = self._with_cut(
                    at, self.spare, self._finer(self.spare, at.cuts[self.spare], axis)
                )
                move = _Move("slice", axis, to)
                yield move, self._price_of_slice(move)

    def _price_of_slice(self, move: _Move) -> float:
        return self.costs[move.axis].gamma * self._nbytes(move.to)

    def _relocations(self, at: _State, dim: int, here: int) -> Iterator[tuple[_Move, float]]:
        """Return what takes the minor axis off a dimension."""
        cut = at.cuts[dim]
        axis = cut.axes[-1]
        size, (alpha, beta, gamma) = self.sizes[axis], self.costs[axis]
        off = self._with_cut(at, dim, self._coarser(dim, cut))
        aim = self.aim.get(axis)
        if aim is None:
            after = self._nbytes(off)
            price = (_rounds(size) + 1) * alpha + beta * (after - here) + gamma * after
            yield _Move("all_gather", axis, off), price
        elif self._is_next(aim, off.cuts[aim], axis):
            to = self._with_cut(off, aim, self._finer(aim, off.cuts[aim], axis))
            moved = self._nbytes(to) * (size - 1) / size
            price = size * alpha + (beta + 2 * gamma) * moved
            yield _Move("all_to_all", axis, to), price

    def _exchange(self, at: _State) -> tuple[_Move, float]:
        """Return the move to the goal at once; a rank lacks what it does not hold on average."""
        held, moved = 1.0, set[int]()
        for cut, aim in zip(at.cuts, self.goal.cuts, strict=True):
            if cut != aim:
                same = _common(cut.axes, aim.axes) if cut.bounds is aim.bounds is None else 0
                moved.update(cut.axes[same:], aim.axes[same:])
                held /= math.prod([self.sizes[axis] for axis in cut.axes[same:]])
        ranks = math.prod([self.sizes[axis] for axis in moved])
        alpha, beta, gamma = map(max, zip(*[self.costs[axis] for axis in moved], strict=True))
        price = ranks * alpha + ((beta + gamma) * (1 - held) + gamma) * self.wanted
        return _Move("exchange", WHOLE, self.goal), price

    def _sliced(self, at: _State) -> list[_Move]:
        """Return the slices that bring axes to where they shall be, without moving data."""
        slices: list[_Move] = []
        for dim, goal in enumerate(self.goal.cuts):
            for axis in goal.axes[len(at.cuts[dim].axes) :]:
                if not (self._is_next(dim, at.cuts[dim], axis) and _is_free(at, axis)):
                    break
                at = self._with_cut(at, dim, self._finer(dim, at.cuts[dim], axis))
                slices.append(_Move("slice", axis, at))
        return slices

    def _scattered_along(self, axis: int) -> Sequence[int]:
        """Return the dimensions along which an axis that is reduced may cut then."""
        aim = self.aim.get(axis)
        return (self.spare if aim is None else aim,) if self.shape else ()

    # ---- cuts

    def _state_of(self, layout: Layout) -> _State:
        cuts = [
            self._cut(dim, axes, bounds)
            for dim, (axes, bounds) in enumerate(zip(layout.axes, layout.cuts, strict=True))
        ]
        return _State(tuple(cuts), layout.partial)

    def _cut(self, dim: int, axes: tuple[int, ...], bounds: tuple[int, ...]) -> _Cut:
        even = default_cuts(self.shape[dim], self._sizes(axes))
        return _Cut(axes, None if bounds == even else bounds)

    def _levels(self, dim: int, cut: _Cut) -> list[_Cut]:
        """Return a cut without its minor axes: by none of its axes, by the first, by two ..."""
        levels = [cut]
        while levels[-1].axes:
            levels.append(self._coarser(dim, levels[-1]))
        return levels[::-1]

    def _coarser(self, dim: int, cut: _Cut) -> _Cut:
        """Return a cut without its minor axis."""
        axes, bounds = cut
        if bounds is None:
            return _Cut(axes[:-1], None)
        return self._cut(dim, axes[:-1], bounds[:: self.sizes[axes[-1]]])

    def _finer(self, dim: int, cut: _Cut, axis: int) -> _Cut:
        """Return a cut by one axis more: that of the goal, if it comes next there."""
        if self._is_next(dim, cut, axis):
            return self.levels[dim][len(cut.axes) + 1]
        return self._subdivided(dim, cut, axis)

    def _subdivided(self, dim: int, cut: _Cut, axis: int) -> _Cut:
        """Return a cut whose parts are cut evenly by an axis more."""
        axes, bounds = (*cut.axes, axis), cut.bounds
        if bounds is None:
            return _Cut(axes, None)
        return self._cut(dim, axes, subdivided(bounds, self.sizes[axis]))

    def _is_settled(self, dim: int, cut: _Cut) -> bool:
        """Return whether a cut is the goal's, or becomes it by further axes."""
        levels = self.levels[dim]
        return len(cut.axes) < len(levels) and levels[len(cut.axes)] == cut

    def _is_next(self, dim: int, cut: _Cut, axis: int) -> bool:
        """Return whether a cut comes nearer to the goal by an axis."""
        aim, done = self.goal.cuts[dim].axes, len(cut.axes)
        return done < len(aim) and aim[done] == axis and self._is_settled(dim, cut)

    def _with_cut(self, at: _State, dim: int, cut: _Cut) -> _State:
        return _State(_with(at.cuts, dim, cut), at.partial)

    def _nbytes(self, at: _State) -> int:
        """Return how many bytes the largest part has."""
        nbytes = self.itemsize
        for length, (axes, bounds) in zip(self.shape, at.cuts, strict=True):
            if bounds is not None:
                nbytes *= longest(bounds)
            else:
                for axis in axes:
                    length = -(-length // self.sizes[axis])
                nbytes *= length
        return nbytes

    def _sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([self.sizes[axis] for axis in axes])

    # ---- contributions

    def _contributions(self) -> dict[int, int | None]:
        """Return the axes that become partial, and the dimension that each cuts just before.

        None where the ranks along it hold the same: where nothing travels and they did before,
        and for a mean, which the same value of all leaves as it is.
        """
        before, after = (
            {axis: dim for dim, cut in enumerate(state.cuts) for axis in cut.axes}
            for state in (self.start, self.end)
        )
        partial = [*zip(self.start.partial, self.end.partial, strict=True)]
        travels = any(was not in (None, kind) for was, kind in partial) or any(
            after.get(axis) != dim for axis, dim in before.items()
        )
        spare = self.spare if travels and self.shape else None
        return {
            axis: None if kind is ReduceType.kRedAvg else before.get(axis, spare)
            for axis, (was, kind) in enumerate(partial)
            if kind not in (None, was)
        }

    def _before_partial(self) -> _State:
        """Return the end, but for the axes that become partial."""
        partial = [
            None if axis in self.contributions else kind
            for axis, kind in enumerate(self.end.partial)
        ]
        cuts = []
        for dim, (start, end) in enumerate(zip(self.start.cuts, self.end.cuts, strict=True)):
            cut = end
            for axis in self._made_partial(dim):
                cut = self._subdivided(dim, cut, axis)
            if cut.axes == start.axes and end == self._levels(dim, start)[len(end.axes)]:
                cut = start
            cuts.append(cut)
        return _State(tuple(cuts), tuple(partial))

    def _made_partial(self, dim: int) -> list[int]:
        """Return the axes that cut a dimension just before they become partial, major first."""
        axes = [axis for axis, along in self.contributions.items() if along == dim]
        before = self.start.cuts[dim].axes
        return sorted(axes, key=lambda axis: before.index(axis) if axis in before else len(before))

    def _contributing(self) -> Iterator[_Move]:
        """Return the moves from the goal to the end."""
        at = self.goal
        for dim in range(len(self.shape)):
            for axis in reversed(self._made_partial(dim)):
                at = self._with_cut(at, dim, self._coarser(dim, at.cuts[dim]))
                at = at._replace(partial=_with(at.partial, axis, self.end.partial[axis]))
                yield _Move("to_partial", axis, at)
        for axis, along in self.contributions.items():
            if along is None:
                at = at._replace(partial=_with(at.partial, axis, self.end.partial[axis]))
                yield _Move("to_partial", axis, at)


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _rounds(size: int) -> int:
    """Return how many messages follow each other in a tree of ranks; the call is one more."""
    return (size - 1).bit_length()


def _is_free(at: _State, axis: int) -> bool:
    """Return whether the ranks along an axis hold the same."""
    for axes, _ in at.cuts:
        if axis in axes:
            return False
    return at.partial[axis] is None


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return how many axes are the same at the beginning."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
