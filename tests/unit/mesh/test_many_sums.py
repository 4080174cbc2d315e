"""A hundred thousand random sums: the same bits in any order, and as near as promised."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.mesh import sums
from hpcdist.mesh.sums import reproducible_sum
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.shm.kernel import combine

pytestmark = pytest.mark.slow
MANY = 100_000
ODD = [math.inf, -math.inf, math.nan, -0.0]


def drawn(random, n):
    """Return numbers of all sizes: alike, far apart, denormal; many cancel, a few are odd."""
    low, high = [(-3, 3), (-60, 60), (-1000, 1000), (-1074, -1000)][random.integers(4)]
    x = np.ldexp(random.standard_normal(n), random.integers(low, high, n))
    if random.integers(2):
        x = random.permutation(np.concatenate([x, -x[n // 3 :]]))
    if x.size and random.integers(8) == 0:
        x[random.integers(x.size, size=3)] = random.choice(ODD, 3)
    return x


def bits_of(value):
    return "nan" if np.isnan(value) else np.float64(value).tobytes()


def of_ranks(x, ranks, random):
    """Return the sum of numbers that are permuted and dealt to some ranks."""
    cuts = [0, *sorted(random.integers(x.size + 1, size=ranks - 1)), x.size]
    x = random.permutation(x)
    words = np.stack([sums._words_of(x[lo:hi], (0,)) for lo, hi in pairwise(cuts)])
    return sums._nearest(words, sums._FORMATS["float64"])[0]


def test_sums_of_arrays_have_the_bits_of_one_rank_and_the_error_that_is_promised():
    random = np.random.default_rng(11)
    for number in range(MANY):
        x = drawn(random, int(random.integers(40)) if number % 1000 else 9000)
        found = reproducible_sum(x, (0,), None)
        for ranks in {1, int(random.integers(2, 9))}:
            assert bits_of(of_ranks(x, ranks, random)) == bits_of(found), x
        odd = {str(each) for each in x if not math.isfinite(each)}
        if odd:
            assert str(float(found)) == (odd.pop() if len(odd) == 1 else "nan")
            continue
        exact = sum(map(Fraction, x.tolist()))
        try:
            nearest = float(exact)
        except OverflowError:
            assert found == (math.inf if exact > 0 else -math.inf)
            continue
        bound = Fraction(max(abs(x).max(initial=0), 5e-324)) * x.size / 2**80
        assert abs(Fraction(float(found)) - exact) <= bound + Fraction(math.ulp(nearest)) / 2, x


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_sums_of_contributions_are_the_nearest_numbers_whoever_gives_them(dtype):
    random, at_once = np.random.default_rng(12), 1000
    rule = rule_for(ReduceOp.REPRODUCIBLE_SUM, dtype_row(np.dtype(dtype)))
    for _ in range(MANY // at_once):
        ranks = int(random.integers(1, 20))
        with np.errstate(over="ignore", under="ignore"):
            given = np.stack([drawn(random, at_once)[:at_once] for _ in range(ranks)]).astype(dtype)
        found, again = np.empty(at_once, dtype), np.empty(at_once, dtype)
        combine(rule, [*given], [found], ranks)
        combine(rule, [*random.permutation(given)], [again], ranks)
        assert (np.isnan(found) == np.isnan(again)).all()
        assert found[~np.isnan(found)].tobytes() == again[~np.isnan(again)].tobytes()
        if dtype is np.float64:
            for column, value in zip(given.T.tolist(), found.tolist(), strict=True):
                assert bits_of(value) == bits_of(exactly(column))


def exactly(numbers):
    try:
        return math.fsum(numbers) or sum(numbers[1:], numbers[0])  # of which -0.0 stays
    except (OverflowError, ValueError):  # of infinities of both signs, or too large on the way
        with np.errstate(invalid="ignore"):
            odd = sum(each for each in numbers if not math.isfinite(each))
        if odd != 0:
            return odd
        exact = sum(map(Fraction, numbers))
        return math.copysign(1, exact.numerator) * (
            float(abs(exact)) if abs(exact) < Fraction(2) ** 1024 - Fraction(2) ** 970 else math.inf
        )
