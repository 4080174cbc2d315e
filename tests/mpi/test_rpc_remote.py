"""See `rpc_remote_checks`: on the ranks of this MPI job."""

import pytest
import rpc_ensemble_checks
import rpc_remote_checks


@pytest.mark.parametrize("check", rpc_remote_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


def test_the_example_of_an_ensemble_comes_to_the_same_on_these_ranks():
    rpc_ensemble_checks.the_ensemble_spreads()
