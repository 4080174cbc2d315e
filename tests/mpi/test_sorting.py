"""Sorting, sets, searching, statistics and random numbers on the ranks of this MPI job."""

import numpy as np
import pytest
from mpi4py import MPI
from sorting_checks import CHECKS, check_permutation, check_random

import hpcdist as dist

pytestmark = pytest.mark.two_ranks
world = MPI.COMM_WORLD


@pytest.fixture(autouse=True, scope="module")
def _started():
    dist.init_parallel_env()


@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CHECKS)
def test_it_comes_to_what_numpy_does(name, seed):
    CHECKS[name](seed)


def test_large_arrays_are_sorted_in_shared_memory():
    x = np.random.default_rng(2).integers(0, 1000, 300_000)
    a = dist.shard_tensor(x, dist.ProcessMesh([*range(world.size)]), [dist.Shard(0)])
    np.testing.assert_array_equal(dist.unshard_dtensor(np.sort(a)), np.sort(x))
    order = dist.unshard_dtensor(np.argsort(a))
    np.testing.assert_array_equal(order, np.argsort(x, kind="stable"))
    found, wanted = np.unique(a, True, True, True), np.unique(x, True, True, True)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(dist.unshard_dtensor(one), other)
    assert np.median(a) == np.median(x)


def test_random_numbers_are_those_of_one_rank():
    check_random()
    check_permutation()
    mine = dist.random.Generator(9).standard_normal(1000, mesh=dist.ProcessMesh([world.rank]))
    assert len({*world.allgather(mine.local.tobytes())}) == 1
