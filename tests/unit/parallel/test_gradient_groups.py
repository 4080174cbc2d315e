"""A group per parameter: the order of buckets, and training on simulated ranks."""

import random
from itertools import pairwise

import group_checks
import pytest

import hpcdist as dist
from hpcdist.parallel.gradient_groups import one_order


@pytest.mark.parametrize("check", group_checks.check)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=20)


@pytest.mark.parametrize("check", group_checks.check)
def test_when_buckets_travel_while_the_backward_computes(check, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", "always")
    dist.simulate(4, check, timeout=20)


def test_models_that_are_alike_keep_their_order():
    world, expert, other = ((0, 1, 2, 3), 0), ((0, 2), 1), ((1, 3), 1)
    one = [(expert, 0), (world, 0), (expert, 1), (world, 1)]
    two = [(other, 0), (world, 0), (other, 1), (world, 1)]
    order = one_order([one, two, one, two])
    assert [each for each in order if each in one] == one
    assert [each for each in order if each in two] == two


@pytest.mark.parametrize("seed", range(50))
def test_any_orders_become_one_that_keeps_the_order_within_groups(seed):
    dice = random.Random(seed)
    size = dice.randint(2, 6)
    groups = [
        (tuple(sorted(dice.sample(range(size), dice.randint(1, size)))), number)
        for number in range(dice.randint(1, 5))
    ]
    counts = {group: dice.randint(1, 4) for group in groups}
    orders = []
    for rank in range(size):
        left = {group: list(range(counts[group])) for group in groups if rank in group[0]}
        order = []
        while any(left.values()):
            group = dice.choice([group for group, numbers in left.items() if numbers])
            order.append((group, left[group].pop(0)))
        orders.append(order)
    found = one_order(orders)
    assert sorted(found) == sorted({each for order in orders for each in order})
    assert found == one_order(orders[::-1])  # whoever computes it
    for group in groups:
        numbers = [number for each, number in found if each == group]
        assert all(one < two for one, two in pairwise(numbers))
