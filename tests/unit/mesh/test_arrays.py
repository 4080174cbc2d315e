"""Arrays across simulated ranks."""

import itertools
import tracemalloc

import mesh_checks
import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist import ProcessMesh, ReduceType, Shard


@pytest.mark.parametrize("check", mesh_checks.check)
@pytest.mark.parametrize("size", first_of([4, 3, 2, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=20)
