"""A private Slurm with two nodes for all tests of this folder, and the MPI libraries it runs."""

import re
from pathlib import Path

import pytest
from private_slurm import CRASHES, Unavailable, find_mpis, start_cluster
from requirements import missing

MPIS = find_mpis()
LOST = "PRTE has lost communication with a remote daemon"
NOT_STARTED = [*map(re.escape, CRASHES), LOST, r"job \d+ is still RUNNING"]


def pytest_collection_modifyitems(items):
    """Run a test again in which MPI itself did not come up; see `CRASHES`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=NOT_STARTED))


@pytest.fixture(scope="session")
def cluster():
    """Start the Slurm; skip where there can be none, unless HPCDIST_REQUIRE names it."""
    try:
        with start_cluster(nodes=2) as started:
            yield started
    except Unavailable as reason:
        missing("slurm", f"no Slurm: {reason}")


@pytest.fixture(params=MPIS, ids=[mpi.name for mpi in MPIS])
def mpi(request):
    """Return an MPI library; every one that is here has its turn."""
    return request.param


@pytest.fixture
def any_mpi():
    """Return one MPI library, for what takes long and does not depend on it."""
    return MPIS[0] if MPIS else pytest.skip("there is no MPI library")


@pytest.fixture
def other_mpi(mpi):
    """Return an MPI library that is not `mpi`."""
    others = [each for each in MPIS if each is not mpi]
    return others[0] if others else pytest.skip("there is only one MPI library")
