"""Tests under ``mpiexec -n N python -m pytest --with-mpi``: every rank runs every test.

After each test all ranks compare notes; if one failed, all stop, so that no rank waits for one
that has gone on to the next test.
"""

import os

import numpy as np
import pytest
from mpi4py import MPI

os.environ.setdefault("HPCDIST_TIMEOUT_S", "30")


@pytest.fixture(scope="session", autouse=True)
def world():
    import hpcdist as dist

    return dist.init_parallel_env()


@pytest.fixture
def rank():
    return MPI.COMM_WORLD.rank


@pytest.fixture
def size():
    return MPI.COMM_WORLD.size


@pytest.fixture
def and_the_world_goes_on(rank, size):
    """After the test the ranks are in step: nothing is left over from what was refused."""
    import hpcdist as dist

    yield
    dist.barrier()
    x = np.array([rank + 1])
    dist.all_reduce(x)
    assert x[0] == size * (size + 1) // 2


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, f"failed_in_{call.when}", report.failed)
    return report


@pytest.fixture(autouse=True)
def _all_ranks_pass(request, world):
    yield
    failed = getattr(request.node, "failed_in_call", False)
    failures = MPI.COMM_WORLD.allgather(failed)
    if any(failures):
        ranks = [rank for rank, each in enumerate(failures) if each]
        request.session.shouldfail = f"{request.node.nodeid} failed on ranks {ranks}"
