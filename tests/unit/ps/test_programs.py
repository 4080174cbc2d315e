"""Random programs on tables, on simulated workers and servers; see `table_programs`."""

import pytest
from table_programs import run_programs

import hpcdist as dist
from hpcdist import ps

MODES = [ps.Sync(), ps.Geo(2), ps.Async(3, 2), ps.Ssp(1), ps.Geo(1), ps.Sync(), ps.Geo(3)]
"""In the order of seeds."""


def check(seed):
    ranks = 1 + seed // 2 % 4
    dist.simulate(ranks, run_programs, [seed], seed % 3 % ranks, MODES[seed % len(MODES)])


@pytest.mark.parametrize("seed", range(8))
def test_a_table_does_what_its_model_does(seed):
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8, 60))
def test_a_table_does_what_its_model_does_in_many_programs(seed):
    check(seed)


@pytest.mark.slow
def test_a_table_does_what_its_model_does_in_thousands_of_programs():
    for seed in range(60, 3000):
        check(seed)
