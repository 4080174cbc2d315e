"""A private Slurm with two nodes for all tests of this folder, and the MPI libraries it runs."""

import pytest
from private_slurm import Unavailable, find_mpis, start_cluster
from requirements import missing

MPIS = find_mpis()


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
def other_mpi(mpi):
    """Return an MPI library that is not `mpi`."""
    others = [each for each in MPIS if each is not mpi]
    return others[0] if others else pytest.skip("there is only one MPI library")
