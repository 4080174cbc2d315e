"""See `rpc_stress_checks`: on simulated ranks."""

import pytest
import rpc_stress_checks

import hpcdist as dist


@pytest.mark.parametrize(
    ("ranks", "turns"),
    [(3, 60), pytest.param(4, 600, marks=pytest.mark.thorough), pytest.param(1, 60)],
)
def test_nothing_is_lost_or_doubled(ranks, turns):
    dist.simulate(ranks, rpc_stress_checks.everything_at_once, turns, timeout=120)
