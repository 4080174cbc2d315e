"""See `rpc_remote_checks`: on simulated ranks."""

import pytest
import rpc_remote_checks
from tiers import first_of

import hpcdist as dist


@pytest.mark.parametrize("check", rpc_remote_checks.check)
@pytest.mark.parametrize("size", first_of([3, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=60)
