"""Compressed averages of gradients, on the ranks of this MPI job."""

import compressed_checks
import pytest

CHECKS = [*compressed_checks.check, *compressed_checks.of_processes]

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")


@pytest.mark.parametrize("overlap", ["always", pytest.param("never", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("check", CHECKS)
def test_on_the_ranks_of_this_job(check, overlap, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    check()


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
def test_on_nodes_of_two_ranks(check, world_with):
    world_with(ranks_per_node=2, overlap="always")
    check()
