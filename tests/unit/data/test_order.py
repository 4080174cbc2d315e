"""Orders of samples: permutations that can be undone, as even as chance, without a list of all."""

import tracemalloc
from collections import Counter
from math import factorial

import numpy as np
import pytest

from hpcdist.data import order as order_module
from hpcdist.data.order import Blocks, Natural, Shuffled
from hpcdist.data.shares import plan_shares

KERNEL = order_module._compiled
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the kernel is not compiled here")


@pytest.fixture(params=["numpy"] + ["compiled"] * (KERNEL is not None), autouse=True)
def _both_ways(request, monkeypatch):
    monkeypatch.setattr(order_module, "_compiled", KERNEL if request.param == "compiled" else None)


TOTALS = [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4097]


def orders(total):
    return [
        Natural(total),
        Shuffled(total, 3, 1),
        *(Blocks(total, 3, 1, ranks) for ranks in (1, 2, 3, 7)),
    ]


@pytest.mark.parametrize("total", TOTALS)
def test_an_order_is_a_permutation_and_its_inverse_undoes_it(total):
    places = np.arange(total)
    for order in orders(total):
        samples = order.samples(places)
        assert sorted(samples.tolist()) == places.tolist()
        assert order.positions(samples).tolist() == places.tolist()
        assert order.positions(places)[samples].tolist() == places.tolist()


def test_a_sample_is_found_without_the_others():
    order = Shuffled(1 << 60, 1, 2)
    places = np.array([0, 1, (1 << 60) - 1, 12345678901234567])
    tracemalloc.start()
    samples = order.samples(places)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert samples.min() >= 0
    assert samples.max() < 1 << 60
    assert order.positions(samples).tolist() == places.tolist()


def test_the_samples_at_some_places_are_those_of_the_whole_order():
    whole = Shuffled(100_003, 5, 6).samples(np.arange(100_003))
    some = np.random.default_rng(0).integers(0, 100_003, 70_000)
    assert (Shuffled(100_003, 5, 6).samples(some) == whole[some]).all()


@needs_kernel
@pytest.mark.parametrize("total", [*TOTALS, 10**9, (1 << 62) + 5])
@pytest.mark.parametrize("way", ["samples", "positions"])
def test_the_kernel_and_numpy_give_the_same(total, way, monkeypatch):
    numbers = np.random.default_rng(1).integers(0, total, 999)[::3]
    found = []
    for implementation in (KERNEL, None):
        monkeypatch.setattr(order_module, "_compiled", implementation)
        found.append(getattr(Shuffled(total, 5, 6), way)(numbers).tolist())
    assert found[0] == found[1]


@needs_kernel
@pytest.mark.parametrize("wrong", [-1, 10, 1 << 40])
def test_numbers_that_an_order_has_not_are_refused_by_the_kernel(wrong):
    keys, two = order_module.keys_of(1), np.zeros(2, np.int64)
    for numbers, found, some in [
        (np.array([1, wrong]), two, keys),
        (two, np.zeros(3, np.int64), keys),
        (two, two.copy(), keys[1:]),
    ]:
        with pytest.raises(ValueError, match="the arrays do not fit"):
            KERNEL(numbers, found, some, 10, 4, False)


def test_the_order_is_the_same_on_every_machine():
    assert Shuffled(10, 1, 2).samples(np.arange(10)).tolist() == [8, 5, 1, 7, 4, 6, 9, 2, 0, 3]
    found = Shuffled(10**9, 7, 0).samples(np.arange(3))
    assert found.tolist() == [396200906, 687256829, 240234165]


def test_seeds_and_epochs_have_orders_of_their_own():
    found = {
        tuple(Shuffled(50, seed, epoch).samples(np.arange(50)).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(found) == 25


def chi_square(counts, expected):
    """Return the chi-square of counts in units of its standard deviation, around its mean."""
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("kind", "total"), [(Shuffled, 2), (Shuffled, 3), (Shuffled, 4), (Shuffled, 5), (Blocks, 4)]
)
def test_all_orders_of_a_few_samples_are_as_frequent(kind, total):
    if order_module._compiled is not None:
        pytest.skip("so few samples are not the kernel's")
    places, epochs, orders = np.arange(total), 8000, factorial(total)
    more, places = ((), places) if kind is Shuffled else ((3,), 3 * places)
    all_samples = total * (more or (1,))[0]
    found = Counter(tuple(kind(all_samples, 7, e, *more).samples(places)) for e in range(epochs))
    counts = np.array([*found.values(), *[0] * (orders - len(found))])
    assert len(counts) == orders
    assert abs(chi_square(counts, epochs / orders)) < 4


@pytest.mark.parametrize("total", [7, 8, 9, 10, 17, 257])
def test_all_pairs_of_samples_come_first_as_often(total):
    epochs, bins = 4000, min(total, 16)
    first = [Shuffled(total, 7, epoch).samples(np.arange(2)) for epoch in range(epochs)]
    one, two = (np.array(first) * bins // total).T
    sizes = np.bincount(np.arange(total) * bins // total)
    pairs = (np.outer(sizes, sizes) - np.diag(sizes)).ravel() / (total * (total - 1))
    counts = np.bincount(one * bins + two, minlength=bins * bins)
    assert counts[pairs == 0].sum() == 0
    assert abs(chi_square(counts[pairs > 0], epochs * pairs[pairs > 0])) < 4.5


def test_samples_land_everywhere_as_often_over_many_epochs():
    total, epochs, bins = 10**6, 2000, 40
    samples = np.array([0, 1, 2, 499_999, 524_288, 999_999])
    counts = np.zeros((len(samples), bins))
    for epoch in range(epochs):
        landed = Shuffled(total, 11, epoch).positions(samples) * bins // total
        counts[np.arange(len(samples)), landed] += 1
    for each in counts:
        assert abs(chi_square(each, epochs / bins)) < 4.5


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_million_rows_are_spread_evenly_and_neighbours_part(epoch):
    total, bins = 10**6, 32
    places = np.arange(total)
    samples = Shuffled(total, 11, epoch).samples(places)
    pairs = np.bincount(places * bins // total * bins + samples * bins // total)
    assert abs(chi_square(pairs, total / bins**2)) < 5
    steps = np.bincount(np.diff(samples) % total * bins // total, minlength=bins)
    assert abs(chi_square(steps, total / bins)) < 5
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 5e-3


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_blocks_shuffle_each_rank_s_samples_among_themselves(ranks):
    order = Blocks(101, 4, 0, ranks)
    shares = plan_shares(101, 0, ranks, "keep")
    first = 0
    for rank in range(ranks):
        places = shares.positions(rank)
        samples = order.samples(np.arange(places.start, places.stop, places.step))
        assert sorted(samples.tolist()) == list(range(first, first + len(places)))
        first += len(places)
