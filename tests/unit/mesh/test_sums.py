"""Reproducible sums: the bits do not depend on the order, and are those of an exact model."""

import math
import operator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.errors import UsageError
from hpcdist.mesh import sums
from hpcdist.mesh.sums import BINS, LOWEST, WIDTH, reproducible_sum
from hpcdist.transport.call.reduction import ReduceOp

DTYPES = [np.float64, np.float32, np.float16]
_LESS_USUAL = [pytest.param(each, marks=pytest.mark.thorough) for each in DTYPES[1:]]
PARTS = 4


def drawn(random, dtype):
    """Return numbers of many sizes: normal, tiny and huge, pairs that cancel, odd ones."""
    n = int(random.choice([0, 1, 7, 8, 9, 300, 5000]))
    low, high = [(-3, 3), (-60, 60), (-1074, 1020), (-1074, -1000)][random.integers(4)]
    with np.errstate(all="ignore"):
        x = np.ldexp(random.standard_normal(n), random.integers(low, high, n)).astype(dtype)
    x = np.where(np.isfinite(x), x, 0).astype(dtype)
    if random.integers(3) == 0:
        x = random.permutation(np.concatenate([x, -x[1:]]))
    if random.integers(5) == 0 and n:
        x[random.integers(n, size=2)] = random.choice([np.inf, -np.inf, np.nan, -0.0], 2)
    return x


def model(numbers, dtype):
    """Return the sum as [Note: reproducible sums] defines it, of fractions."""
    values = [float(each) for each in numbers]
    odd = {each for each in values if not math.isfinite(each)}
    if odd:
        return dtype(odd.pop() if len(odd) == 1 else math.nan)
    largest = max(map(abs, values), default=0)
    highest = max(math.frexp(largest)[1] // WIDTH, LOWEST)
    units = [Fraction(2) ** (WIDTH * (highest - number)) for number in range(BINS)]
    return nearest(sum(kept(Fraction(each), units) for each in values), dtype)


def kept(number, units):
    """Return what of a number goes into bins: each takes the multiple next to what is left."""
    rest = number
    for unit in units:
        multiple = math.floor(abs(rest) / unit + Fraction(1, 2))
        rest -= (multiple if rest > 0 else -multiple) * unit
    return number - rest


def nearest(value, dtype):
    """Return the number of a dtype that is nearest to a fraction: of it and its neighbours."""
    limit = Fraction(float(np.finfo(dtype).max))
    if abs(value) > 2 * limit:
        return dtype(math.copysign(math.inf, value))
    with np.errstate(over="ignore"):
        guess = np.clip(dtype(float(value)), -np.finfo(dtype).max, np.finfo(dtype).max)
    with np.errstate(over="ignore"):
        near = [np.nextafter(guess, dtype(end)) for end in (-np.inf, guess, np.inf)]
    step = limit - Fraction(float(np.nextafter(dtype(limit), dtype(0))))

    def distance(each):
        at = Fraction(float(each)) if np.isfinite(each) else limit + step
        at = at if np.isfinite(each) or each > 0 else -at
        return abs(at - value), int(each.view(f"u{each.itemsize}")) & 1

    return min(near, key=distance)


def same(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes() or bool(np.isnan(a) and np.isnan(b))


@pytest.fixture(params=["compiled", "in NumPy"])
def loops(request, monkeypatch):
    if request.param == "in NumPy":
        monkeypatch.setattr(sums, "_compiled", None)
    elif sums._compiled is None:
        pytest.skip("the loops are not compiled here")


@pytest.fixture
def world():
    """End the world of one rank that a test begins."""
    yield
    dist.destroy_process_group()


def of_parts(x, random):
    """Return the sum of an array that is permuted and dealt to ranks, which combine their words."""
    x = random.permutation(x)
    cuts = [0, *sorted(random.integers(len(x) + 1, size=PARTS - 1)), len(x)]
    words = np.stack([sums._words_of(x[lo:hi], (0,)) for lo, hi in pairwise(cuts)])
    together = sums._nearest(words.copy(), sums._FORMATS[x.dtype.name])
    grids = np.max([each[0] for each in words], 0)
    for each in words:
        sums._raise_to(each, grids)
    least = words[0]
    least[1:] = np.sum([each[1:] for each in words], 0)
    found = sums._nearest(least, sums._FORMATS[x.dtype.name])
    assert same(found, together)
    return found[0].astype(x.dtype)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [np.float64, *_LESS_USUAL])
def test_a_sum_is_that_of_the_model_in_any_order_and_by_columns(dtype):
    random = np.random.default_rng(3)
    for _ in range(60):
        x = drawn(random, dtype)
        expected = model(x, dtype)
        assert same(reproducible_sum(x, (0,), None), expected)
        with np.errstate(over="ignore"):
            assert same(of_parts(x, random), expected)
        columns = np.stack([x, random.permutation(x), x[::-1]] * 12, 1)
        assert all(same(each, expected) for each in reproducible_sum(columns, (0,), None))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_sum_is_at_least_as_accurate_as_a_pairwise_one(dtype):
    random = np.random.default_rng(5)
    for _ in range(50):
        x = (random.standard_normal(3000) * 2.0 ** random.uniform(-20, 20, 3000)).astype(dtype)
        x = np.concatenate([x, -x[: random.integers(3000)]])
        exact = Fraction(0) + sum(map(Fraction, x.tolist()))
        error = abs(Fraction(float(reproducible_sum(x, (0,), None))) - exact)
        bound = len(x) * Fraction(float(abs(x).max())) / 2**80
        assert error <= bound + abs(exact) * Fraction(float(np.finfo(dtype).eps)) / 2
        assert error <= abs(Fraction(float(x.sum())) - exact)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dims", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, np.complex64, np.complex128])
def test_sums_along_any_dimensions_have_numpys_shape_and_nearly_its_values(dims, keepdims, dtype):
    x = np.random.default_rng(1).integers(-9, 9, (5, 40, 3)).astype(dtype)
    for each in (x, np.asfortranarray(x), x[::-1, ::2]):
        found = reproducible_sum(each, dims, None, keepdims=keepdims)
        expected = each.sum(dims, keepdims=keepdims)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert (found == expected).all()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("given", [">f8", ">f4", "g", "f4"])
def test_a_sum_of_another_dtype_takes_the_numbers_as_they_are(given):
    x = np.arange(300.0).astype(given)
    assert reproducible_sum(x, (0,), None, dtype=np.float64) == x.sum()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_another_order_would_lose_is_in_the_sum(ranks):
    def program():
        mesh = dist.ProcessMesh(range(ranks))
        x = dist.shard_tensor(np.array([1e16, 1.0, -1e16, 3.0] * 25), mesh, [dist.Shard(0)])
        with dist.array_policy(sums="reproducible"):
            return float(x.sum()), float(x.mean()), float(np.vdot(x, np.ones(100)))

    assert set(dist.simulate(ranks, program)) == {(100.0, 1.0, 100.0)}


@pytest.mark.usefixtures("world")
def test_products_are_at_least_as_accurate_as_those_of_blas():
    random = np.random.default_rng(2)
    a, b = (random.standard_normal((30, 500)) * 2.0 ** random.uniform(-9, 9, 500) for _ in "ab")
    with dist.array_policy(sums="reproducible"):
        found = (dist.array.asarray(a) @ dist.array.asarray(b.T)).local
    rows, columns = ([[*map(Fraction, row)] for row in each[:4].tolist()] for each in (a, b))
    exact = [[float(sum(map(operator.mul, x, y))) for y in columns] for x in rows]
    errors = [np.abs(each[:4, :4] - exact).max() for each in (found, a @ b.T)]
    assert errors[0] <= errors[1]


@pytest.mark.usefixtures("world")
def test_infinities_and_nan_go_where_they_belong():
    a = np.ones((3, 4))
    a[0, 1], a[1, 2] = np.inf, np.nan
    with dist.array_policy(sums="reproducible"), np.errstate(invalid="ignore"):
        found = (dist.array.asarray(a) @ np.ones((4, 2))).local
    assert found[0].tolist() == [math.inf] * 2
    assert np.isnan(found[1]).all()
    assert found[2].tolist() == [4.0] * 2


@pytest.mark.usefixtures("world")
def test_what_has_no_reproducible_sum_is_refused_with_the_remedy():
    with dist.array_policy(sums="reproducible"):
        with pytest.raises(UsageError, match=r"no reproducible sums of float\d+; convert"):
            dist.array.asarray(np.ones(3, np.longdouble)).sum()
        x = dist.array.asarray(np.ones((2, 2)))
        with pytest.raises(UsageError, match="multiply two at a time"):
            np.einsum("ij,jk,kl->il", x, x, x)
    with pytest.raises(UsageError, match="sums must be one of fast, reproducible, got 'exact'"):
        dist.array_policy(sums="exact").__enter__()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    ("sums_at_once", "operators"), [(1, [ReduceOp.SUM]), (300, [ReduceOp.MAX, ReduceOp.SUM])]
)
def test_few_sums_of_ranks_take_one_reduction_of_integers_and_many_take_two(
    sums_at_once, operators
):
    asked = []

    def alone(words, op):
        asked.append((op, words.dtype))
        return words

    x = np.ones((3, sums_at_once))
    found = reproducible_sum(x, (0,), sums.Everywhere(2, 1, alone))
    assert (found == 3).all()
    assert asked == [(op, np.int64) for op in operators]
