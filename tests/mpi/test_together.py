"""What fails on one rank is raised on all, over MPI and in shared memory."""

import pytest
from together_checks import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_mpi(check):
    check()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_between_nodes(check, world_with):
    world_with(ranks_per_node=1)  # no shared memory
    check()
