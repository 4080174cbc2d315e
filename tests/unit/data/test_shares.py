"""Which samples belong to which rank: for all lengths, numbers of ranks and points of resume."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as some

import hpcdist as dist
from hpcdist.data.shares import TAILS, order_of, plan_shares, samples_at

LENGTHS = some.integers(0, 60)
SIZES = some.integers(1, 9)
STEPS = some.integers(0, 20)
TAIL = some.sampled_from(list(TAILS))


def dealt(length, start, size, tail, order=None):
    """Return the samples of every rank."""
    shares = plan_shares(length, start, size, tail)
    return [
        samples_at(shares.positions(rank), length, order).tolist() for rank in range(shares.size)
    ]


def in_turn(hands):
    """Return the samples in the order in which they were dealt."""
    return [hand[step] for step in range(len(hands[0])) for hand in hands if step < len(hand)]


@given(LENGTHS, SIZES)
def test_kept_shares_hold_every_sample_once(length, size):
    hands = dealt(length, 0, size, "keep", order_of(length, 1, 2))
    assert sorted(chain(*hands)) == list(range(length))
    assert len(hands[0]) - len(hands[-1]) in (0, 1)
    assert len(hands[0]) == max(map(len, hands))


@given(LENGTHS, SIZES)
def test_padded_shares_hold_every_sample_and_are_equally_long(length, size):
    hands = dealt(length, 0, size, "pad")
    assert {*map(len, hands)} == {-(-length // size)}
    assert in_turn(hands) == [position % length for position in range(-(-length // size) * size)]


@given(LENGTHS, SIZES)
def test_dropped_shares_hold_no_sample_twice_and_are_equally_long(length, size):
    hands = dealt(length, 0, size, "drop")
    assert {*map(len, hands)} == {length // size}
    assert in_turn(hands) == list(range(length // size * size))


@given(LENGTHS, SIZES, TAIL)
def test_the_ranks_together_follow_the_order_whatever_their_number(length, size, tail):
    order = order_of(length, 3, 4)
    together = in_turn(dealt(length, 0, size, tail, order))
    common = min(length, len(together))
    assert together[:common] == order[:common].tolist()


@given(LENGTHS, SIZES, SIZES, STEPS, TAIL)
def test_a_resume_with_other_ranks_gives_exactly_the_rest(length, before, after, steps, tail):
    order = order_of(length, 5, 6)
    steps = min(steps, length // before)
    seen = in_turn([hand[:steps] for hand in dealt(length, 0, before, tail, order)])
    rest = dealt(length, steps * before, after, "keep", order)
    assert sorted(chain(seen, *rest)) == list(range(length))
    for name in ("pad", "drop"):
        assert len({len(hand) for hand in dealt(length, len(seen), after, name)}) == 1


@given(LENGTHS, some.integers(0, 2**70), some.integers(0, 1000))
def test_the_order_depends_on_seed_epoch_and_length_only(length, seed, epoch):
    order = order_of(length, seed, epoch)
    assert sorted(order.tolist()) == list(range(length))
    assert np.array_equal(order, order_of(length, seed, epoch))


def test_another_epoch_and_another_seed_are_other_orders():
    orders = {tuple(order_of(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_the_one_of_yesterday():
    assert order_of(8, 0, 0).tolist() == [3, 6, 4, 0, 7, 5, 2, 1]


def test_huge_lengths_cost_what_a_share_costs():
    size, length = 10**9, 10**15
    positions = plan_shares(length, 0, size, "pad").positions(size - 1)
    assert samples_at(positions, length)[[0, -1]].tolist() == [size - 1, length - 1]


def test_a_tail_that_does_not_exist_is_refused():
    with pytest.raises(dist.UsageError, match="'pad', 'drop', 'keep', got 'wrap'"):
        plan_shares(10, 0, 2, "wrap")
