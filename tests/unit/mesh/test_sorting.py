"""Sorting, sets, statistics and random numbers, on simulated ranks; see `sorting_checks`."""

import numpy as np
import pytest
from sorting_checks import CHECKS, check_permutation, check_random

import hpcdist as dist
from hpcdist.mesh.random import Generator, _scaled, runs
from hpcdist.mesh.rules.dividing import counts_told
from hpcdist.mesh.rules.merging import merged
from hpcdist.mesh.rules.sorting import in_order

MORE = pytest.mark.thorough


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=MORE)])
@pytest.mark.parametrize("name", CHECKS)
def test_it_comes_to_what_numpy_does(name, ranks):
    dist.simulate(ranks, CHECKS[name], 0)


@MORE
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", CHECKS)
def test_it_comes_to_what_numpy_does_for_other_arrays(name, seed):
    dist.simulate(2 + seed % 3, CHECKS[name], seed)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sorted_elements_are_in_parts_of_equal_length_at_once(ranks):
    # Uneven parts, few values, values that are in order already.
    def check(x):
        mesh, here = dist.ProcessMesh([*range(ranks)]), dist.get_rank()
        bounds = [0, *sorted(x.size * part // 7 for part in (1, 1, 6)[: ranks - 1]), x.size]
        part = x[bounds[here] : bounds[here + 1]]
        layout = dist.dtensor_from_local(part, mesh, [dist.Shard(0)]).layout
        places = np.array([0, x.size // 3, x.size, x.size])[: ranks - 1]
        counts = counts_told(np.sort(part), layout, np.sort(places))
        assert counts.sum(0).cumsum()[:-1].tolist() == np.sort(places).tolist()
        assert counts.sum(1).tolist() == np.diff(layout.cuts[0]).tolist()
        a = dist.dtensor_from_local(part, mesh, [dist.Shard(0)])
        found = in_order(a)
        assert found.layout.is_even
        np.testing.assert_array_equal(dist.unshard_dtensor(found), np.sort(x))

    draw = np.random.default_rng(0)
    for x in (
        draw.random(20_000),
        np.arange(20_000) % 3,
        np.zeros(20_000),
        np.arange(20_000.0),
        np.arange(20_000.0)[::-1],
        np.where(draw.random(20_000) < 0.5, np.nan, 1.0),
        np.array(["b", "a", ""] * 40),
        np.zeros(0),
    ):
        dist.simulate(ranks, check, x)


@pytest.mark.parametrize("dtype", ["i1", "i4", "u8", "f2", "f4", "f8", "c16", "M8[s]"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 20])
def test_runs_become_one(dtype, count):
    draw = np.random.default_rng(count)
    runs = [np.sort(draw.integers(0, 50, draw.integers(0, 90)).astype(dtype)) for _ in range(count)]
    if dtype[0] in "fc":
        ends = ([np.nan] * (number % 3) for number in range(count))
        runs = [np.append(run, end).astype(dtype) for run, end in zip(runs, ends, strict=True)]
    whole = np.concatenate([np.zeros(0, dtype), *runs])
    np.testing.assert_array_equal(merged(runs, np.empty_like(whole)), np.sort(whole))


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=MORE)])
def test_random_numbers_are_the_same_for_any_ranks_and_placements(ranks):
    dist.simulate(ranks, check_random)
    dist.simulate(ranks, check_permutation)


def test_the_bits_of_random_numbers_are_promised():
    def check():
        g = Generator(5)
        assert g.random(3).local.tolist() == RANDOM
        assert g.integers(-100, 100, 5).local.tolist() == INTEGERS
        assert Generator(6).random(3).local.tolist() != RANDOM

    dist.simulate(1, check)


RANDOM = [0.8575790745355746, 0.9250921171973682, 0.4213716729569317]
INTEGERS = [-11, 89, -84, 93, 22]


def test_numbers_are_of_their_distributions():
    def check():
        g, n = Generator(1), 100_000
        z, u, i = g.normal(3, 2, n).local, g.uniform(-1, 3, n).local, g.integers(6, None, n).local
        assert abs(z.mean() - 3) < 0.04
        assert abs(z.std() - 2) < 0.04
        assert abs((z < 1).mean() - 0.1587) < 0.006
        assert -1 <= u.min() < -0.99
        assert 2.99 < u.max() < 3
        assert abs(u.mean() - 1) < 0.02
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
        assert abs(np.bincount(i) - n / 6).max() < 600

    dist.simulate(1, check)


@pytest.mark.parametrize("count", [1, 7, 2**31 + 5, 2**32, 2**33 + 1, 2**63 + 11, 2**64 - 1, 2**64])
def test_bits_are_scaled_as_whole_numbers(count):
    bits = np.array([0, 1, 2**63, 12345678901234567890, 2**64 - 1], np.uint64)
    wanted = [int(each) * count >> 64 for each in bits]
    assert _scaled(bits, count).tolist() == wanted


@pytest.mark.parametrize(
    ("shape", "box", "found"),
    [
        ((), (), [(0, 1)]),
        ((9,), ((2, 5),), [(2, 5)]),
        ((4, 5), ((1, 3), (0, 5)), [(5, 15)]),
        ((4, 5), ((1, 3), (2, 4)), [(7, 9), (12, 14)]),
        ((2, 3, 4), ((0, 2), (1, 3), (0, 4)), [(4, 12), (16, 24)]),
        ((2, 3), ((0, 2), (1, 1)), []),
    ],
)
def test_the_runs_of_a_box(shape, box, found):
    assert [*runs(shape, box)] == found


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda a: Generator(None), dist.UsageError, "seed must be an integer"),
        (lambda a: Generator(-1), dist.UsageError, "got -1|Got -1"),
        (lambda a: Generator(1).random(3, "i4"), dist.UsageError, "float64 or float32"),
        (lambda a: Generator(1).integers(3, 3), ValueError, "got 3 to 2"),
        (lambda a: Generator(1).integers(300, dtype="u1"), ValueError, "uint8"),
        (lambda a: Generator(1).normal(0, -1), ValueError, "negative"),
        (lambda a: np.quantile(a, 1.5), ValueError, r"range \[0, 1\]"),
        (lambda a: np.percentile(a, -1), ValueError, r"range \[0, 100\]"),
        (lambda a: np.quantile(a, 0.5, method="best"), ValueError, "got 'best'"),
        (lambda a: np.quantile(a[:0], 0.5), IndexError, "at least one element"),
        (lambda a: np.partition(a, 40), ValueError, "out of bounds"),
        (lambda a: np.sort(a, axis=1), ValueError, "out of bounds"),
        (lambda a: np.searchsorted(a, 1, "middle"), ValueError, "left"),
        (lambda a: np.bincount(a - 3), ValueError, "negative"),
        (lambda a: np.histogram(a, weights=np.ones(3)), dist.UsageError, "one weight"),
        (lambda a: np.histogram(a, bins="auto"), dist.UsageError, "number of bins"),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(wrong, error, words):
    def check():
        a = dist.shard_tensor(np.arange(20), dist.ProcessMesh([0, 1]), [dist.Shard(0)])
        with pytest.raises(error, match=words):
            wrong(a)
        assert a.sum() == 190

    dist.simulate(2, check)
