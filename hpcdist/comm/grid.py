"""`Grid`: the ranks of a group as a Cartesian grid, and exchanges between neighbours.

The ranks are laid out in C order, the last axis fastest, as MPI_Cart_create does without
reordering. Everything but `sub` and the exchanges is arithmetic, without communication.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.buffer import as_buffer, wrap_like
from hpcdist.comm.describe_messages import describe_recv, describe_send
from hpcdist.comm.dispatch import BatchEntry, dispatch_batch
from hpcdist.comm.making import group_of
from hpcdist.comm.members import Members
from hpcdist.comm.tensor_lists import check_fillable, is_list
from hpcdist.errors import UsageError
from hpcdist.text import an, counted
from hpcdist.transport.call.call import PROC_NULL
from hpcdist.transport.waiting.work import Work
from hpcdist.transport.waiting.works import Together


@final
class Grid:
    """The ranks of a group on a Cartesian grid; made by `Group.grid`.

    Ranks are world ranks, so that they can be the `src` and `dst` of a message; where there is
    nobody, beyond the edge of an axis that is not periodic, they are `PROC_NULL`.

    Attributes:
        group: the group whose ranks these are.
        dims: how many ranks there are along each axis.
        periodic: for each axis, whether its last rank is next to the first.
        coords: where this rank is.

    Example:
        >>> import hpcdist as dist
        >>> def place():
        ...     grid = dist.init_parallel_env().grid((2, 2))
        ...     return tuple(grid.coords)
        >>> dist.simulate(4, place)
        [(0, 0), (0, 1), (1, 0), (1, 1)]

    """

    def __init__(
        self, group: Members, dims: int | Sequence[int], periodic: bool | Sequence[bool]
    ) -> None:
        if not group.is_member():
            raise UsageError(
                f"rank {group.world_rank} is not in group {group.name} (ranks {group.ranks}), so "
                "it has no place in a grid of it; let the members alone make it"
            )
        self.group: Any = group
        self.dims = _fitting(dims, group)
        self.periodic = _for_each_axis(periodic, len(self.dims))
        self.coords = self.coords_of(group.world_rank)
        self._subs: dict[tuple[int, ...], Grid] = {}
        self._own: Members | None = None

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return where world rank `rank` is (MPI_Cart_coords).

        Args:
            rank: a world rank, of a member of the grid's group.

        """
        place = np.unravel_index(self.group.root_of(rank, "rank"), self.dims)
        return tuple(map(int, place))

    def rank_of(self, coords: Sequence[int]) -> int:
        """Return the world rank at `coords` (MPI_Cart_rank), `PROC_NULL` beyond an edge.

        Along periodic axes any integer is a coordinate.

        Args:
            coords: one integer per axis.

        """
        place = _integers(coords, "coords")
        if len(place) != len(self.dims):
            raise UsageError(f"coords={coords!r} must be {len(self.dims)} integers, one per axis")
        wrapped = [
            each % length if is_periodic else each
            for each, length, is_periodic in zip(place, self.dims, self.periodic, strict=True)
        ]
        if any(not 0 <= each < length for each, length in zip(wrapped, self.dims, strict=True)):
            return PROC_NULL
        rank: int = self.group.ranks[int(np.ravel_multi_index(wrapped, self.dims))]
        return rank

    def shift(self, axis: int, displacement: int = 1) -> tuple[int, int]:
        """Return the ranks to receive from and to send to in a shift (MPI_Cart_shift).

        Args:
            axis: along which the data move.
            displacement: how many places up, down if negative.

        Returns:
            The world ranks ``(src, dst)``; `PROC_NULL` where there is nobody.

        """
        axis, steps = self._axis(axis), _integers([displacement], "displacement")[0]
        return self._at(axis, -steps), self._at(axis, steps)

    @property
    def neighbors(self) -> list[int]:
        """The world ranks next to this one: for each axis the one below, then the one above."""
        return [self._at(axis, step) for axis in range(len(self.dims)) for step in (-1, 1)]

    def sub(self, *axes: int) -> Grid:
        """Return the subgrid along some axes, through this rank (MPI_Cart_sub).

        Its group is made by the first call, which is collective over these ranks; later calls are
        local.

        Args:
            axes: the axes to keep, at least one.

        Example:
            >>> import hpcdist as dist
            >>> grid = dist.init_parallel_env().grid((-1, 1))
            >>> columns, rows = grid.sub(0), grid.sub(1)
            >>> rows.dims
            (1,)

        """
        kept = tuple(sorted({self._axis(axis) for axis in axes}))
        if not kept:
            raise UsageError("sub needs the axes to keep, for example grid.sub(0)")
        if kept not in self._subs:
            steps = np.ndindex(*(self.dims[axis] for axis in kept))
            members = [
                self.rank_of(self._moved(dict(zip(kept, step, strict=True)))) for step in steps
            ]
            self._subs[kept] = Grid(
                group_of(members),
                [self.dims[axis] for axis in kept],
                [self.periodic[axis] for axis in kept],
            )
        return self._subs[kept]

    def neighbor_alltoall(
        self, out_tensor_list: list[Any], in_tensor_list: Sequence[Any], sync_op: bool = True
    ) -> Work:
        """Send each neighbour its own array and receive one from each (MPI_Neighbor_alltoall).

        Both lists are in the order of `neighbors`: for each axis the one below, then the one
        above. Entries for a neighbour that is not there may be None, and are left alone. The
        first exchange of a grid makes a group for the messages: collective over its ranks.

        Args:
            out_tensor_list: arrays that are written, edges of an array for example; an empty
                list is filled with arrays like those sent to the same neighbours.
            in_tensor_list: what is sent.
            sync_op: return when all arrays are there.

        """
        given = self._one_per_neighbor(in_tensor_list, "in_tensor_list")
        if is_list(out_tensor_list) and not out_tensor_list:
            check_fillable(out_tensor_list, "out_tensor_list")
            there = [each != PROC_NULL for each in self.neighbors]
            out = [
                _room_like(x) if is_there else None
                for x, is_there in zip(given, there, strict=True)
            ]
        else:
            out = self._one_per_neighbor(out_tensor_list, "out_tensor_list")
        group, neighbors = self._messages(), list(enumerate(self.neighbors))
        receives = [
            BatchEntry(group, describe_recv, (out[direction], peer, direction ^ 1))
            for direction, peer in neighbors
            if peer != PROC_NULL
        ]
        sends = [
            BatchEntry(group, describe_send, (given[direction], peer, direction))
            for direction, peer in neighbors
            if peer != PROC_NULL
        ]
        work = Together(dispatch_batch([*receives, *sends]))
        if out_tensor_list is not out and not out_tensor_list:
            out_tensor_list.extend(out)
        if sync_op:
            work.wait()
        return work

    def neighbor_all_gather(
        self, tensor_list: list[Any], tensor: Any, sync_op: bool = True
    ) -> Work:
        """Send `tensor` to all neighbours and receive theirs (MPI_Neighbor_allgather).

        Args:
            tensor_list: one entry per neighbour, as `out_tensor_list` of `neighbor_alltoall`.
            tensor: what every neighbour gets.
            sync_op: return when all arrays are there.

        """
        return self.neighbor_alltoall(tensor_list, [tensor] * (2 * len(self.dims)), sync_op)

    def __repr__(self) -> str:
        return (
            f"Grid(dims={self.dims}, periodic={self.periodic}, coords={self.coords}, "
            f"group={self.group.name})"
        )

    # ---- parts

    def _axis(self, axis: Any) -> int:
        number, axes = _integers([axis], "axis")[0], len(self.dims)
        if not -axes <= number < axes:
            raise UsageError(f"axis={axis!r} must be one of 0 to {axes - 1}")
        return number % axes

    def _moved(self, to: dict[int, int]) -> list[int]:
        return [to.get(axis, place) for axis, place in enumerate(self.coords)]

    def _at(self, axis: int, steps: int) -> int:
        return self.rank_of(self._moved({axis: self.coords[axis] + steps}))

    def _messages(self) -> Members:
        """Return the group of the exchanges, whose messages meet no others."""
        if self._own is None:
            self._own = group_of(self.group.ranks)
        return self._own

    def _one_per_neighbor(self, arrays: Any, what: str) -> list[Any]:
        neighbors = self.neighbors
        if not is_list(arrays) or len(arrays) != len(neighbors):
            got = (
                counted(len(arrays), "entry", "entries")
                if is_list(arrays)
                else an(type(arrays).__name__)
            )
            raise UsageError(
                f"{what} must be a list of {len(neighbors)} arrays, for each axis one for the "
                f"neighbour below and one for the neighbour above, got {got}"
            )
        missing = [
            peer
            for x, peer in zip(arrays, neighbors, strict=True)
            if x is None and peer != PROC_NULL
        ]
        if missing:
            raise UsageError(f"{what} is None for the neighbours {missing}, which exist")
        return list(arrays)


def _room_like(array: Any) -> Any:
    _, data, dtype, shape, _ = as_buffer(array, "in_tensor_list")
    return wrap_like(array, np.empty_like(data), dtype, shape)


# ---- arguments


def _integers(values: Iterable[Any], what: str) -> list[int]:
    try:
        return [operator.index(each) for each in values]
    except TypeError:
        raise UsageError(f"{what} must be integers, got {values!r}") from None


def _for_each_axis(periodic: Any, axes: int) -> tuple[bool, ...]:
    flags = list(periodic) if isinstance(periodic, (list, tuple)) else [periodic] * axes
    if len(flags) != axes or not all(isinstance(each, (bool, np.bool_)) for each in flags):
        raise UsageError(
            f"periodic={periodic!r} must be a bool, or one per axis: there are {axes} axes"
        )
    return tuple(map(bool, flags))


def _fitting(dims: Any, group: Members) -> tuple[int, ...]:
    given = _integers(dims if isinstance(dims, Iterable) else [dims], "dims")
    size, chosen = group.nranks, [each for each in given if each > 0]
    taken, free = math.prod(chosen), len(given) - len(chosen)
    if not given or min(given) < -1 or size % taken or (not free and taken != size):
        raise UsageError(
            f"dims={dims!r} must be positive integers whose product is {size}, the number of ranks "
            f"of group {group.name}; 0 or -1 leaves the choice of one, for example {(-1, -1)}"
        )
    rest = iter(balanced(size // taken, free))
    return tuple(each if each > 0 else next(rest) for each in given)


def balanced(size: int, axes: int) -> tuple[int, ...]:
    """Return `axes` factors of `size`, as equal as can be, the largest first (MPI_Dims_create)."""
    return min(_factors(size, axes, size)) if axes else ()


def _factors(size: int, axes: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all falling sequences of `axes` factors of `size`, none of them above `most`."""
    if axes == 1:
        if size <= most:
            yield (size,)
        return
    for first in range(1, min(size, most) + 1):
        if size % first == 0 and first**axes >= size:
            for others in _factors(size // first, axes - 1, first):
                yield first, *others
