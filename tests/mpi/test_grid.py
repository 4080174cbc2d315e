"""Groups that are split, and grids of ranks, beside MPI's own."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")
comm = MPI.COMM_WORLD


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("periodic", [False, True])
def test_everyone_is_where_mpi_would_put_him(axes, periodic, rank, size, world):
    dims = MPI.Compute_dims(size, axes)
    cart = comm.Create_cart(dims, [periodic] * axes)
    grid = world.grid([0] * axes, periodic)
    assert list(grid.dims) == dims
    assert list(grid.coords) == cart.coords
    for other in range(size):
        assert grid.rank_of(cart.Get_coords(other)) == other
    for axis in range(axes):
        for steps in (-2, -1, 0, 1, 3):
            theirs = [None if each == MPI.PROC_NULL else each for each in cart.Shift(axis, steps)]
            ours = [None if each == dist.PROC_NULL else each for each in grid.shift(axis, steps)]
            assert ours == theirs
    cart.Free()


def test_a_split_is_that_of_mpi(rank, size, world):
    for color, key in [(rank % 2, -rank), (rank // 2, rank), (MPI.UNDEFINED, 0), (0, rank % 2)]:
        theirs = comm.Split(color, key)
        ours = world.split(color, key)
        if theirs == MPI.COMM_NULL:
            assert (ours.rank, ours.ranks) == (-1, [])
            continue
        assert ours.ranks == theirs.allgather(rank)
        assert ours.mpi_comm.rank == ours.rank == theirs.rank
        dist.destroy_process_group(ours)
        theirs.Free()


def test_all_operations_keep_the_order_of_the_keys(rank, size, world):
    group = world.split(0, -rank, name="turned", timeout=30)
    assert group.ranks == list(range(size))[::-1]
    assert group.name == "turned"
    out, objects = np.empty((size, 2), int), []
    dist.all_gather_into_tensor(out, np.full(2, rank), group)
    assert out[:, 0].tolist() == group.ranks
    dist.all_gather_object(objects, rank, group)
    assert objects == group.ranks
    x = np.array([rank + 1])
    dist.scan(x, group=group)
    assert x[0] == sum(range(rank + 1, size + 1))
    dist.scatter(
        x, [np.array([10 * each]) for each in group.ranks] if rank == 0 else None, 0, group
    )
    assert x[0] == 10 * rank
    large = np.full(300_000, float(rank))
    dist.broadcast(large, size - 1, group)
    assert (large == size - 1).all()
    dist.destroy_process_group(group)


def test_an_exchange_meets_no_messages_of_the_user(rank, size, world):
    grid = world.grid(-1, periodic=True)
    below, above = grid.shift(0)
    mine = [np.array([7.0]), np.array([8.0])]
    works = [dist.isend(mine[tag], above, tag=tag) for tag in (0, 1)]
    told = []
    grid.neighbor_alltoall(told, [np.array([float(rank)]), np.array([-float(rank)])])
    assert [float(x[0]) for x in told] == [-float(below), float(above)]
    got = np.empty(1)
    for tag in (0, 1):
        dist.recv(got, below, tag=tag)
        assert got[0] == mine[tag][0]
    dist.wait_all(works)


@pytest.mark.parametrize("count", [3, 50_000])
def test_neighbours_exchange_arrays_of_any_size_and_layout(count, rank, size, world):
    grid = world.grid((1, -1), periodic=(False, True))
    x = np.zeros((count, 4), order="F")
    x[:, 1:3] = rank
    for _ in range(3):
        work = grid.neighbor_alltoall(
            [None, None, x[:, 0], x[:, 3]], [None, None, x[:, 1], x[:, 2]], sync_op=False
        )
        work.wait()
        assert work.is_completed()
        left, right = grid.shift(1)
        assert (x == [left, rank, rank, right]).all()
