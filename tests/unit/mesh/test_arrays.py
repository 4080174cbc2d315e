"""Arrays across simulated ranks, and what is decided about them without any."""

import tracemalloc

import mesh_checks
import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist import Partial, ProcessMesh, ReduceType, Replicate, Shard
from hpcdist.mesh.layout import layout_of
from hpcdist.mesh.reducing import check_reducible, neutral_of
from hpcdist.mesh.routes import route_of

MESHES = {
    "(4,)": ProcessMesh(range(4)),
    "permuted": ProcessMesh([[3, 1], [0, 2]]),
    "(2, 2)": ProcessMesh([[0, 1], [2, 3]]),
    "(2, 2, 2)": ProcessMesh(np.arange(8).reshape(2, 2, 2)),
}


@pytest.mark.parametrize("check", mesh_checks.check)
@pytest.mark.parametrize("size", first_of([4, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=20)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", mesh_checks.SHAPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_pairs_of_placements(mesh, shape):
    mesh, kinds = MESHES[mesh], [ReduceType.kRedSum, ReduceType.kRedMax]
    dist.simulate(mesh.size, mesh_checks.every_pair, mesh, shape, kinds, 500, timeout=60)


def test_creators_do_not_make_the_whole():
    size, elements = 4, 1 << 18

    def make():
        mesh = ProcessMesh(range(size))
        return dist.dtensor_from_fn(np.full, mesh, [Shard(0)], size * elements, 1.0).nbytes

    tracemalloc.start()
    nbytes = dist.simulate(size, make)[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert nbytes == 8 * size * elements
    assert peak < 1.5 * nbytes  # of all ranks together


# ---- plans


@pytest.mark.parametrize("kind", ReduceType)
@pytest.mark.parametrize("dtype", ["?", "i2", "u8", "f2", "f8", "F", "M8[s]"])
def test_what_is_neutral_changes_nothing(kind, dtype):
    layout = layout_of(MESHES["(4,)"], (3,), [Partial(kind)])
    x = np.array([0, 1, 5]).astype(dtype)
    try:
        check_reducible(layout, x.dtype)
    except dist.UsageError:
        assert (x.dtype.kind, kind) not in ((each, ReduceType.kRedMax) for each in "iuf")
        return
    if kind is not ReduceType.kRedAvg:
        neutral = neutral_of(layout, x.dtype)
        total = mesh_checks.COMBINED[kind](np.array([x, np.full(3, neutral, x.dtype)]))
        np.testing.assert_array_equal(total.astype(dtype), x)


def test_what_one_rank_reads_another_one_gives():
    x, other = MESHES["(2, 2)"], ProcessMesh([5, 3, 1])
    pairs = [
        (layout_of(x, (5, 7), [Shard(0), Partial()]), layout_of(x, (5, 7), [Shard(1), Shard(1)])),
        (layout_of(x, (5, 7), [Shard(0), Shard(0)]), layout_of(other, (5, 7), [Shard(1)])),
        (layout_of(other, (5, 7), [Replicate()]), layout_of(x, (5, 7), [Shard(1), Replicate()])),
    ]
    for src, dst in pairs:
        ranks = sorted({*src.mesh.process_ids, *dst.mesh.process_ids})
        routes = [route_of(src, dst, rank) for rank in ranks]
        assert len({(route.key, route.words) for route in routes}) == 1
        for giver, reader in np.ndindex(len(ranks), len(ranks)):
            taken = [read.source for read in routes[reader].reads if read.rank == giver]
            given = [give.source for give in routes[giver].gives if give.rank == reader]
            assert taken == given
