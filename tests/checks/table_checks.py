"""What tests of tables share: a model of a table, and programs of pulls and pushes."""

import contextlib

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import fleet, ps

RATE = 0.5
SGD = ("sgd", {"learning_rate": RATE})


def initial(ids, dim):
    """Return the first rows of ids: powers of two divide them, so that sums have no rounding."""
    return ((ids % 64)[:, None] + np.arange(dim)).astype(np.float32)


class Rows:
    """A table of mode "sync" and SGD: a dict of rows."""

    def __init__(self, dim):
        self.dim, self.rows = dim, {}

    def pull(self, ids):
        ids = np.asarray(ids)
        flat = [self.row(int(each)) for each in ids.reshape(-1)]
        return np.array(flat, np.float32).reshape(*ids.shape, self.dim)

    def row(self, id):
        return self.rows.get(id, initial(np.array([id]), self.dim)[0])

    def push(self, pushes):
        """Apply what all workers push: pairs of ids and gradients."""
        sums = {}
        for ids, grads in pushes:
            for id, grad in zip(ids.reshape(-1), grads.reshape(-1, self.dim), strict=True):
                sums[int(id)] = sums.get(int(id), np.float32(0)) + grad
        for id, grad in sums.items():
            self.rows[id] = self.row(id) - np.float32(RATE) * grad


def batch(seed, worker, dim):
    """Return ids, some of them twice, of some shape, and gradients without rounding."""
    rng = np.random.default_rng([seed, worker])
    shape = [(0,), (5,), (2, 3), (40,)][rng.integers(4)]
    ids = rng.integers(-8, 8, shape) * rng.choice([1, 2**40, 2**59])
    return ids, rng.integers(-4, 5, (*shape, dim)).astype(np.float32)


def run_program(table, workers, worker, steps, seed=0, model=None):
    """Pull and push, and compare each pull with the model; return the model."""
    model = Rows(table.dim) if model is None else model
    for step in range(steps):
        batches = [batch(seed + step, each, table.dim) for each in range(workers)]
        ids, grads = batches[worker]
        assert np.array_equal(table.pull(ids), model.pull(ids))
        table.push(ids, grads)
        model.push(batches)
        assert np.array_equal(table.pull(ids), model.pull(ids))
    return model


def check_programs(group):
    """Check a table against the model, on the ranks of `group`."""
    options = {"optimizer": SGD, "initializer": initial, "group": group}
    table = ps.SparseTable(f"rows {group.nranks}", 3, **options)
    run_program(table, group.nranks, group.rank, 8)


def check_saves(group, folder):
    """Check that what was saved comes back: all rows, then what has changed since."""
    options = {"optimizer": SGD, "initializer": initial, "group": group}
    table = ps.SparseTable("saved", 3, **options)
    model = run_program(table, group.nranks, group.rank, 3)
    table.save(folder)
    model = run_program(table, group.nranks, group.rank, 2, 10, model)
    table.save(folder, mode=1)
    ids = np.array(sorted(model.rows))
    expected = model.pull(ids)
    table.push(ids, np.ones((len(ids), 3), np.float32))
    table.load(folder)
    assert np.array_equal(table.pull(ids), expected)
    dist.barrier(group)


def check_worlds(server_num):
    """Check what workers, servers and both do together by `fleet.util`."""
    fleet.init(server_num=server_num)
    util, rank, size = fleet.util, dist.get_rank(), dist.get_world_size()
    workers = size - server_num
    own, ranks = (
        ("server", range(workers, size)) if fleet.is_server() else ("worker", range(workers))
    )
    other = "worker" if own == "server" else "server"

    def works():
        assert util.all_reduce([1, rank], "sum", "all").tolist() == [size, sum(range(size))]
        assert util.all_reduce(rank, "max", own) == ranks[-1]
        assert util.all_gather(rank, "all") == [*range(size)]
        assert util.all_gather(rank, own) == [*ranks]
        util.barrier("all")
        util.barrier(own)
        for wrong in (other, "nobody"):
            with pytest.raises(dist.UsageError, match="comm_world"):
                util.all_reduce(1, "sum", wrong)
        refused = contextlib.nullcontext()
        if fleet.is_server():
            refused = pytest.raises(dist.UsageError, match="this is for workers")
        with refused:
            assert fleet.all_reduce(1) == workers
        with refused:
            assert util.get_file_shard(["a"]) in (["a"], [])

    works()
    if fleet.is_server():
        fleet.run_server()
    else:
        fleet.init_worker()
        if server_num:
            with pytest.raises(dist.UsageError, match="the servers are serving"):
                util.all_reduce(1, "sum", "all")
        fleet.stop_worker()
    works()
