"""Training arrays on virtual ranks, of which simulated ranks have some each."""

import pytest
import virtual_array_checks
from tiers import first_of

import hpcdist as dist


@pytest.mark.parametrize("check", virtual_array_checks.check)
@pytest.mark.parametrize("size", first_of([3, 1, 4]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=60)
