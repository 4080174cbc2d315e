"""Data-parallel training of plain arrays on simulated ranks."""

import averaging_checks
import pytest
import training_checks
from tiers import first_of

import hpcdist as dist

CHECKS = [*training_checks.check, *averaging_checks.check]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", first_of([3, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=20)


@pytest.mark.parametrize("check", CHECKS)
def test_when_buckets_travel_while_the_backward_computes(check, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", "always")
    dist.simulate(2, check, timeout=20)
