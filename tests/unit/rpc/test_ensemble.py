"""The example comes to the same on any number of ranks, and to what its model promises."""

import pytest
import rpc_ensemble_checks

import hpcdist as dist


@pytest.mark.parametrize("ranks", [3, 1, pytest.param(5, marks=pytest.mark.thorough)])
def test_an_ensemble_on_simulated_ranks(ranks):
    dist.simulate(ranks, rpc_ensemble_checks.the_ensemble_spreads, timeout=60)
