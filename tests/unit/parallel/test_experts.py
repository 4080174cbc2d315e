"""Rows of arrays on their way to experts and back."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.parallel.experts import Route


def test_rows_are_kept_by_expert_in_the_order_of_the_ranks():
    received = np.array([[2, 1], [0, 3]])
    assert Route(received, received).by_expert().tolist() == [0, 1, 2, 3, 4, 5]
    received = np.array([[1, 2], [2, 1]])
    assert Route(received, received).by_expert().tolist() == [0, 3, 4, 1, 2, 5]
    assert Route(received, received[:0]).by_expert().tolist() == []


def test_two_ranks_of_two_experts():
    rows = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], "f4")
    sent = [[2, 1, 1, 1], [1, 1, 2, 1]]

    def check():
        rank = dist.get_rank()
        local = np.array(sent[rank])
        world = np.array([sent[other][2 * rank + expert] for other in (0, 1) for expert in (0, 1)])
        found = dist.utils.global_scatter(rows, local, world)
        wanted = [[0, 1, 0, 2, 1], [3, 2, 3, 4, 4]][rank]
        np.testing.assert_array_equal(found, rows[wanted])
        np.testing.assert_array_equal(dist.utils.global_gather(found, local, world), rows)

    dist.simulate(2, check)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_counts_come_back(size):
    def check():
        rank = dist.get_rank()
        counts = np.random.default_rng(1).integers(0, 3, (size, size, 3))
        local, world = counts[rank].reshape(-1), counts[:, rank].reshape(-1)
        x = np.arange(local.sum() * 2.0).reshape(-1, 2) + 100 * rank
        at_experts = dist.utils.global_scatter(x, local, world)
        assert at_experts.shape == (world.sum(), 2)
        np.testing.assert_array_equal(dist.utils.global_gather(at_experts, local, world), x)

    dist.simulate(size, check)
