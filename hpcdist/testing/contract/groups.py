"""Groups, grids, and ranks that are no members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    Contract,
)


class Groups(Contract):
    """Groups, grids, and ranks that are no members."""

    def test_split_makes_a_group_for_each_color_in_the_order_of_the_keys(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            world = dist.get_group()
            assert world is not None
            for key, turned in ((None, False), (rank, False), (-rank, True), (7, False)):
                group = world.split(rank % 2, key)
                members = list(range(rank % 2, size, 2))
                assert group.ranks == (members[::-1] if turned else members)
                gathered: list[Any] = []
                dist.all_gather(gathered, np.array([rank]), group)
                assert [int(x[0]) for x in gathered] == group.ranks
                x = np.array([rank])
                dist.broadcast(x, group.ranks[-1], group)
                assert x[0] == group.ranks[-1]
                largest = members[-1]
                half = group.split(None if rank == largest else 0)
                if rank == largest:
                    assert (half.rank, half.ranks, half.is_member()) == (-1, [], False)
                    with self.warned():
                        dist.barrier(half)
                else:
                    assert half.ranks == [each for each in group.ranks if each != largest]
                    dist.barrier(half)
                    dist.destroy_process_group(half)
                dist.destroy_process_group(group)

        self.run(check)

    def test_a_color_that_is_none_is_refused_on_every_rank(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            world, bad = dist.get_group(), rank == size - 1
            assert world is not None
            wrong: list[tuple[Any, Any]] = [(-1, 0), ("red", 0), (1.5, 0), (True, 0), (0, "last")]
            for color, key in wrong:
                error = dist.UsageError if bad else dist.RemoteError
                with pytest.raises(error, match=f"rank {size - 1}.*(color|key) must be"):
                    world.split(*((color, key) if bad else (0, 0)))

        self.run(check)

    def test_neighbours_on_a_grid_exchange_the_edges_of_their_arrays(self) -> None:
        def check() -> None:
            size, world = dist.get_world_size(), dist.get_group()
            assert world is not None
            for dims in ([-1, -1], [0, 1], [1, -1]):
                for periodic in (False, True, (True, False)):
                    grid = world.grid(dims, periodic)
                    assert np.prod(grid.dims) == size
                    self.exchange_edges(grid)
                    self.tell_neighbours(grid)

        self.run(check)

    def exchange_edges(self, grid: dist.Grid) -> None:
        """Fill the halo of a block of a matrix whose numbers say where they are."""
        rows, columns = grid.dims
        height, width = 3, 4
        whole = np.arange(rows * height * columns * width).reshape(rows * height, columns * width)
        whole = np.pad(whole, 1, constant_values=-1)
        for axis, wraps in enumerate(grid.periodic):
            if wraps:
                near, far = (
                    np.moveaxis(whole, axis, 0)[at] for at in (slice(0, 1), slice(-1, None))
                )
                near[...], far[...] = (np.moveaxis(whole, axis, 0)[at].copy() for at in (-2, 1))
        top, left = grid.coords[0] * height, grid.coords[1] * width
        expected = whole[top : top + height + 2, left : left + width + 2].copy()
        x = np.full_like(expected, -1)
        x[1:-1, 1:-1] = expected[1:-1, 1:-1]
        halo = [x[0, 1:-1], x[-1, 1:-1], x[1:-1, 0], x[1:-1, -1]]
        grid.neighbor_alltoall(halo, [x[1, 1:-1], x[-2, 1:-1], x[1:-1, 1], x[1:-1, -2]])
        for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
            expected[corner] = -1
        np.testing.assert_array_equal(x, expected)

    def tell_neighbours(self, grid: dist.Grid) -> None:
        """Compare what neighbours send with who they are."""
        rank = dist.get_rank()
        told: list[Any] = []
        grid.neighbor_all_gather(told, np.array([rank]), sync_op=False).wait()
        ranks = [dist.PROC_NULL if x is None else int(x[0]) for x in told]
        assert ranks == grid.neighbors
        assert ranks == [end for axis in (0, 1) for end in grid.shift(axis)]

    def test_an_axis_of_a_grid_has_a_group_of_its_own(self) -> None:
        def check() -> None:
            rank, size, world = dist.get_rank(), dist.get_world_size(), dist.get_group()
            assert world is not None
            grid = world.split(0, -rank).grid((-1, -1), periodic=True)
            assert grid.rank_of(grid.coords) == rank
            for axis in (0, 1):
                along = grid.sub(axis)
                assert along is grid.sub(axis)
                assert along.dims == (grid.dims[axis],)
                assert along.coords == (grid.coords[axis],)
                x = np.array([grid.coords[1 - axis]])
                dist.all_reduce(x, dist.ReduceOp.MAX, along.group)
                assert x[0] == grid.coords[1 - axis]  # all of them are on one line
                assert along.shift(0, 1) == grid.shift(axis, 1)
            assert grid.sub(1, 0).group.ranks == list(range(size))[::-1]

        self.run(check)

    def test_groups_overlap_and_agree_on_their_ids(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            parts = {range((size + 1) // 2), range(size // 2, size)}
            mine = [dist.new_group(part) for part in sorted(parts, key=min) if rank in part]
            ids: list[Any] = []
            dist.all_gather_object(ids, [(group.ranks, group.id) for group in mine])
            assert len({str(each) for pairs in ids for each in pairs}) == len(parts)
            for group in mine:
                x = np.array([1])
                dist.all_reduce(x, group=group)
                assert x[0] == group.nranks
                assert dist.get_rank(group) == group.ranks.index(rank)
                dist.destroy_process_group(group)
                with pytest.raises(dist.UsageError, match="destroyed"):
                    dist.all_reduce(x, group=group)

        self.run(check)

    def test_a_non_member_is_warned_and_nothing_happens(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group([0])
            if rank == 0:
                x = np.array([5.0])
                dist.all_reduce(x, group=group)
                assert x[0] == 5
            else:
                x = np.array([float(rank)])
                calls: list[Callable[[], Any]] = [
                    lambda: dist.all_reduce(x, group=group),
                    lambda: dist.all_gather([], x, group=group),
                    lambda: dist.barrier(group),
                    lambda: dist.broadcast_object_list([1], 0, group=group),
                    lambda: dist.isend(x, 0, group=group),
                ]
                with self.warned():
                    assert dist.all_reduced(7, group=group) == 7
                for call in calls:
                    with self.warned():
                        assert call().is_completed()
                assert x[0] == rank
                assert dist.get_rank(group) == dist.get_world_size(group) == -1
            assert size == dist.get_world_size()

        self.run(check)
