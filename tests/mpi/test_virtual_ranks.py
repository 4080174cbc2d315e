"""Training on virtual ranks has the same bits on groups of any number of ranks of this job."""

import pytest
import virtual_array_checks
import virtual_checks


@pytest.mark.parametrize("check", [*virtual_checks.check, *virtual_array_checks.check])
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()
