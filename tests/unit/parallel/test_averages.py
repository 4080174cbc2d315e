"""Means of trees of arrays over the ranks."""

from itertools import permutations

import numpy as np
import pytest

import hpcdist as dist

GIVEN = np.array([[1e16, 3.0], [1.0, 1e-8], [-1e16, -3.0]])
"""What each of three ranks has, of which the order of addition shows."""


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128])
def test_exact_means_have_the_same_bits_in_whatever_order_the_ranks_stand(dtype):
    def averaged(order):
        tree = {"w": [GIVEN[order[dist.get_rank()]].astype(dtype)]}
        return dist.average_gradients(tree, op=dist.ReduceOp.REPRODUCIBLE_SUM)["w"][0]

    exact = np.array([1.0, np.float64(dtype(1e-8).real)]).astype(dtype) / dtype(3)
    for order in permutations(range(3)):
        for mean in dist.simulate(3, averaged, order):
            assert mean.tobytes() == exact.tobytes()


def test_only_means_are_averages():
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        with pytest.raises(dist.UsageError, match="op must be one of"):
            dist.simulate(1, dist.average_gradients, [np.ones(2)], op=op)
