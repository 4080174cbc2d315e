"""Random mixes of operations in which one rank or another is interrupted at any moment."""

import os
import time

import pytest
from interrupted_mixes import mix

import hpcdist as dist

pytestmark = [
    pytest.mark.usefixtures("quick_collections"),
    # an interrupt may come where Python, or what it calls back, collects garbage
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SEEDS = range(4)
STEPS = 60
HOUR_S = float(os.environ.get("HPCDIST_TEST_MIXES_S", "3600"))


@pytest.fixture
def group(size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    made = dist.new_group(timeout=60)
    yield made
    dist.destroy_process_group(made)


@pytest.mark.parametrize(
    "seed", [pytest.param(each, marks=[pytest.mark.thorough] if each else []) for each in SEEDS]
)
def test_mixes_end_as_they_should(seed, group):
    assert mix(seed, group, lambda number: number < STEPS) == []


@pytest.mark.slow
def test_an_hour_of_mixes_ends_as_it_should(group):
    end = time.monotonic() + HOUR_S
    assert mix(99, group, lambda number: time.monotonic() < end) == []
