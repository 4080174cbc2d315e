"""Pipelines on simulated ranks, which share this process."""

import pytest

torch = pytest.importorskip("torch", minversion="2.11")

from pipeline_checks import CHECKS  # noqa: E402
from tiers import first_of  # noqa: E402

import hpcdist as dist  # noqa: E402


@pytest.mark.parametrize("size", first_of([3, 1]))
@pytest.mark.parametrize("check", CHECKS)
def test_on_simulated_ranks(check, size):
    dist.simulate(size, check, timeout=60)
