"""Models of arrays on a grid of simulated ranks."""

import hybrid_checks
import pytest
from tiers import first_of

import hpcdist as dist


@pytest.mark.parametrize("check", hybrid_checks.check)
@pytest.mark.parametrize("size", first_of([4, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=20)
