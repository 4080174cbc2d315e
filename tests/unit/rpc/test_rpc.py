"""See `rpc_checks`: on simulated ranks."""

import pytest
import rpc_checks
from tiers import first_of

import hpcdist as dist


@pytest.mark.parametrize("check", rpc_checks.check)
@pytest.mark.parametrize("size", first_of([2, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=60)


def test_who_does_not_come_to_shutdown_is_named():
    dist.simulate(2, rpc_checks.who_does_not_come_to_shutdown_is_named, timeout=60)
