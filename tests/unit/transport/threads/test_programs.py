"""Random programs of collectives, on ranks that are threads, against NumPy."""

import numpy as np
import pytest
from collective_programs import programs, run_program
from hypothesis import given, settings, strategies as st

import hpcdist as dist

worlds = st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), programs(size)))


@given(worlds)
@settings(max_examples=100, deadline=None)
def test_random_programs_end_as_numpy_says(world):
    size, program = world
    dist.simulate(size, run_program, program, timeout=20)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions_of_random_floats_have_the_same_bits_on_all_ranks(size):
    def reduce_random(op, dtype):
        x = np.random.default_rng(dist.get_rank()).normal(size=1001).astype(dtype)
        dist.all_reduce(x, op)
        return x.tobytes()

    for op in list(dist.ReduceOp)[:5]:
        for dtype in ("f2", "f4", "f8"):
            assert len(set(dist.simulate(size, reduce_random, op, dtype))) == 1
