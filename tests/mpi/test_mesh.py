"""Arrays across the ranks of this MPI job."""

import mesh_checks
import pytest


@pytest.mark.parametrize("check", mesh_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()
