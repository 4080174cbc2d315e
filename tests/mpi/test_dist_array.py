"""Arrays across the ranks of this MPI job against NumPy; see `array_checks`."""

import numpy as np
import pytest
from array_checks import (
    CREATION,
    FAMILIES,
    check_creation,
    check_default_mesh,
    check_grids,
    check_program,
    check_row,
)
from mpi4py import MPI

import hpcdist as dist

pytestmark = pytest.mark.two_ranks
world = MPI.COMM_WORLD


@pytest.fixture(autouse=True, scope="module")
def _started():
    dist.init_parallel_env()


USUAL = ("pointwise", "reductions", "index", "products")  # in which all that travels does


@pytest.mark.parametrize(
    "family",
    [
        name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough)
        for name in FAMILIES
    ],
)
def test_functions_come_to_what_numpy_does(family):
    for row in FAMILIES[family]:
        check_row(row)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_of_arrays_spread_in_all_ways_come_to_what_numpy_does(family):
    for row in FAMILIES[family]:
        check_row(row, mix=True)


def test_new_arrays_are_those_of_numpy():
    for line in filter(None, map(str.strip, CREATION.splitlines())):
        check_creation(line)
    check_default_mesh()
    check_grids()


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.thorough)]
)
def test_random_programs_end_as_numpy_says(seeds):
    for seed in seeds:
        check_program(seed)


def test_all_ranks_have_the_same_bits_of_what_they_share():
    mesh = dist.ProcessMesh([*range(world.size)])
    x = np.random.default_rng(0).standard_normal((1000, 7))
    a = dist.shard_tensor(x, mesh, [dist.Shard(0)])
    for found in (a.sum(), a.mean(0), a.std(0), a.max(), a.T @ a, a[17], np.cumsum(a, 0)[-1]):
        assert found.layout.is_replicated
        assert len({*world.allgather(found.local.tobytes())}) == 1


def test_factors_and_solutions_have_the_same_bits_on_all_ranks():
    mesh = dist.ProcessMesh([*range(world.size)])
    x = np.random.default_rng(2).standard_normal((200, 30))
    a = dist.shard_tensor(x, mesh, [dist.Shard(0)])
    found = [np.linalg.qr(a)[1], *np.linalg.svd(a, full_matrices=False)[1:]]
    found += [np.linalg.lstsq(a, a[:, 0], rcond=None)[0], np.linalg.svd(a.T, compute_uv=False)]
    for each in found:
        assert each.layout.is_replicated
        assert len({*world.allgather(each.local.tobytes())}) == 1


def test_large_transforms_come_to_what_numpy_does():
    mesh = dist.ProcessMesh([*range(world.size)])
    for shape in ((300, 256), (1 << 16,), (30011,)):
        x = np.random.default_rng(3).standard_normal(shape)
        found = np.fft.fftn(dist.shard_tensor(x, mesh, [dist.Shard(0)]))
        assert found.local.size < x.size or world.size == 1
        np.testing.assert_allclose(dist.unshard_dtensor(found), np.fft.fftn(x), atol=1e-9)


def test_large_arrays_come_to_what_numpy_does():
    mesh = dist.ProcessMesh([*range(world.size)])
    x = np.random.default_rng(1).integers(-9, 9, (600, 500)).astype("f8")
    for placements in ([dist.Shard(0)], [dist.Shard(1)]):
        a = dist.shard_tensor(x, mesh, placements)
        np.testing.assert_array_equal(dist.unshard_dtensor(a @ a.T), x @ x.T)
        np.testing.assert_array_equal(dist.unshard_dtensor((a * 2.0 + a) * a - a), (x * 3) * x - x)
        np.testing.assert_array_equal(dist.unshard_dtensor(a.sum(0)), x.sum(0))
        np.testing.assert_allclose(a.std(), x.std(), rtol=1e-12)
        np.testing.assert_array_equal(
            dist.unshard_dtensor(a.reshape(500, 600)), x.reshape(500, 600)
        )


def test_a_number_out_of_range_on_one_rank_is_an_error_on_all():
    mesh = dist.ProcessMesh([*range(world.size)])
    a = dist.shard_tensor(np.arange(9.0), mesh, [dist.Shard(0)])
    with np.errstate(divide="raise"):
        for compute in (lambda: 1 / a, lambda: np.log(a), lambda: (1 / a).sum()):
            with pytest.raises(FloatingPointError, match="divide by zero"):
                compute()
    assert a.sum() == 36


def test_a_rank_that_computes_something_else_is_named_on_all_ranks():
    mesh = dist.ProcessMesh([*range(world.size)])
    a = dist.shard_tensor(np.ones((4, 6)), mesh, [dist.Shard(0)])
    if world.size == 1:
        return
    with pytest.raises(dist.MismatchError):
        a.sum(0 if world.rank else None)
    assert a.sum() == 24
