"""Models of arrays on a grid, on the ranks of this MPI job."""

import hybrid_checks
import pytest


@pytest.mark.parametrize("check", hybrid_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()
