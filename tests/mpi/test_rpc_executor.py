"""See `rpc_executor_checks`: on the ranks of this MPI job."""

import pytest
import rpc_executor_checks
import rpc_stress_checks


@pytest.mark.parametrize("check", rpc_executor_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_everything_at_once():
    rpc_stress_checks.everything_at_once()
