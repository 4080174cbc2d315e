"""Fleet over MPI: the grid, its groups, and what workers do together."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import fleet


@pytest.fixture
def even(size):
    if size % 2:
        pytest.skip("needs an even number of ranks")


@pytest.fixture(autouse=True)
def _ended():
    """Start anew: `fleet.init` is called once in a session."""
    from hpcdist.comm.session import require_session
    from hpcdist.fleet.placement import FLEET
    from hpcdist.parallel.hybrid import set_current_grid

    yield
    require_session()[FLEET] = None
    set_current_grid(None)


def test_the_usual_grid_is_data_parallel(rank, size):
    made = fleet.init(is_collective=True)
    assert (made.worker_index(), made.worker_num()) == (rank, size)
    assert made.grid["dp"].nranks == size
    assert fleet.util.all_reduce([rank, 1]).tolist() == [size * (size - 1) // 2, size]
    assert fleet.util.all_gather(rank) == [*range(size)]
    files = [f"f{each}" for each in range(7)]
    shards = fleet.util.all_gather(fleet.util.get_file_shard(files))
    assert [each for shard in shards for each in shard] == files


def test_groups_along_axes_sum_over_their_ranks(even, rank, size):
    grid = fleet.init(mp=2).grid
    for axis in ("mp", "dp", "pp"):
        x = np.array([float(rank)])
        dist.all_reduce(x, group=grid[axis])
        assert x[0] == sum(grid.ranks(axis))
        assert grid[axis].rank == grid.rank(axis)
    assert f"dp={size // 2} x " in repr(grid)
    assert str(rank) in grid.describe()


def test_a_bare_init_leaves_all_ranks_to_split(size):
    fleet.init(is_collective=True)
    x, weight = np.arange(12.0).reshape(4, 3), np.arange(15.0).reshape(3, 5)
    assert np.allclose(dist.split(x, (3, 5), "linear", 1, size, weight_attr=weight), x @ weight)
    ids = np.array([2, 0])
    found = dist.split(ids, (3, 5), "embedding", num_partitions=size, weight_attr=weight)
    assert np.array_equal(found, weight[ids])
    if size > 1:
        with pytest.raises(dist.UsageError, match=f"num_partitions is {size + 1}"):
            dist.split(x, (3, 5), "linear", 1, size + 1, weight_attr=weight)


@pytest.mark.parametrize("bad", ["degree", "strategy"])
def test_one_wrong_rank_is_an_error_on_all(bad, rank, size):
    strategy = fleet.DistributedStrategy()
    strategy.lamb = bad == "strategy" and rank == size - 1
    wrong = {"mp": size + 1} if bad == "degree" and rank == size - 1 else {}
    if bad == "strategy" and size == 1:
        return
    with pytest.raises(dist.HpcdistError, match=r"would fit|different settings"):
        fleet.init(strategy=strategy, **wrong)
    assert fleet.init().worker_num() == size


def test_ranks_that_list_other_files_all_hear_of_it(rank, size):
    fleet.init()
    if size > 1:
        with pytest.raises(dist.MismatchError, match="different files"):
            fleet.util.get_file_shard(["a", str(rank)])
    shards = fleet.util.all_gather(fleet.util.get_file_shard(["a", "b"]))
    assert [each for shard in shards for each in shard] == ["a", "b"]


def test_a_collective_is_measured(rank, size, capsys):
    fleet.init()
    fleet.collective_perf("allgather", 2, {1 << 12: 1e6})
    assert bool(capsys.readouterr().out) == (rank == 0)


class Line:
    """Two weights that are fitted to a line, by gradients computed by hand."""

    def __init__(self):
        self.w = dist.Parameter(np.zeros(2))

    def named_parameters(self):
        return [("w", self.w)]


def fitted(part, of, line, optimizer):
    """Return the weights after some steps, each on one part of the samples."""
    x = np.stack([np.arange(8.0), np.ones(8)], axis=1)[part::of] / 8
    for _ in range(6):
        error = x @ line.w.data - x @ [3.0, -1.0]
        line.w.grad = 2 * x.T @ error / len(x)
        optimizer.step()
        optimizer.clear_grad()
    return line.w.data.copy()


@pytest.mark.parametrize("axis", ["dp", "sharding"])
def test_a_model_of_arrays_trains_as_one_process_does(axis, rank, size, folder):
    if size == 3:
        pytest.skip("parts of different sizes have other means")
    alone = Line()
    wanted = fitted(0, 1, alone, dist.optim.Adam(alone.named_parameters(), 0.1))
    grid = fleet.init(**{axis: size}).grid
    line = Line()
    model = fleet.distributed_model(line)
    optimizer = fleet.distributed_optimizer(dist.optim.Adam(line.named_parameters(), 0.1))
    found = fitted(grid.rank(axis), size, line, optimizer)
    assert np.allclose(found, wanted, rtol=1e-12)
    assert fleet.util.all_gather(found.tolist()) == [found.tolist()] * size

    fleet.save_persistables(None, folder)
    line.w.data[:] = 0
    dist.checkpoint.load({"model": model, "optimizer": optimizer}, folder)
    assert line.w.data.tolist() == found.tolist()
