"""Arguments that a rule could take for something else, on three ranks, beside what NumPy does."""

import array
from fractions import Fraction

import numpy as np
import pytest

import hpcdist as dist
import hpcdist.array as xp

X = np.arange(9.0).reshape(3, 3)
DATES = np.array(["2020-01-01", "NaT", "2021-01-01"], "M8[D]")


def cut(x, dim=0):
    return dist.shard_tensor(np.asarray(x), mesh(), [dist.Shard(dim)])


def whole(x):
    return dist.shard_tensor(np.asarray(x), mesh(), [])


def mesh():
    return dist.ProcessMesh([0, 1, 2])


SAME = {
    "a range": lambda put: np.add(put(X), range(3)),
    "an array.array": lambda put: np.multiply(put(X), array.array("d", [1, 2, 3])),
    "a condition of integers": lambda put: np.compress([0, 1, 1], put(X), axis=1),
    "a condition of integers, flat": lambda put: np.compress([0, 1, 1, 0, 1, 0, 1, 0, 0], put(X)),
    "a mean": lambda put: np.var(put(X), axis=0, mean=X.mean(0, keepdims=True)),
    "no dimension": lambda put: np.var(put(X), axis=()),
    "tolerances": lambda put: np.isclose(
        put(np.zeros((2, 3))), [0, 0, 5.0], rtol=0, atol=np.array([0, 0, 9.0])
    ),
    "the first NaT": lambda put: np.argmax(put(DATES)),
    "words to look for": lambda put: np.isin(put(X), ["a", "b"]),
    "numbers to look for among dates": lambda put: np.isin(put(DATES), [1, 2], invert=True),
    "no index": lambda put: put(X)[[]],
    "values that are cut": lambda put: np.full_like(X, 0) + np.full_like(put(X), put(X[0])),
}
SINCE = {
    "a mean": "2.0.0",
    "words to look for": "1.25.0",
    "numbers to look for among dates": "1.25.0",
}


@pytest.mark.parametrize("put", [whole, cut, lambda x: cut(x, -1)], ids=["whole", "rows", "last"])
@pytest.mark.parametrize("name", SAME)
def test_an_argument_is_what_it_is_to_numpy(name, put):
    if np.lib.NumpyVersion(np.__version__) < SINCE.get(name, "1.24.0"):
        pytest.skip("this NumPy does not have it")
    wanted = SAME[name](np.asarray)

    def check():
        got = SAME[name](put)
        np.testing.assert_array_equal(dist.unshard_dtensor(got), wanted)

    dist.simulate(3, check)


def test_a_value_that_is_partial_or_cut_fills_with_what_it_is():
    def check():
        three = dist.dtensor_from_local(np.array(1.0), mesh(), [dist.Partial()], shape=())
        assert xp.full((2,), three, mesh=mesh()).local.tolist() == [3, 3]
        assert np.full_like(whole(X), cut(np.arange(3.0))).local[1].tolist() == [0, 1, 2]

    dist.simulate(3, check)


WRITES = {
    "fill_diagonal": lambda a: np.fill_diagonal(a, 5),
    "add.at": lambda a: np.add.at(a, 0, 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_would_write_to_a_copy_is_refused_where_gathering_is_allowed(name):
    def check():
        a = cut(X)
        with dist.array_policy("allow"), pytest.raises((ValueError, TypeError, dist.UsageError)):
            WRITES[name](a)

    dist.simulate(3, check)


def put_in(x, key, value):
    a = cut(x)
    a[key] = value


WRONG = {
    "where without initial": lambda: np.max(cut([3.0, 1.0]), where=np.array([True, True])),
    "two axes": lambda: np.argmax(cut(np.ones((2, 2))), axis=(0, 1)),
    "a truth value for an axis": lambda: cut(X).sum(True),
    "a truth value among axes": lambda: np.max(cut(X), axis=(0, False)),
    "a truth value for the axis of a product": lambda: np.cumprod(cut(X), axis=False),
    "a truth value for the axis of an index": lambda: np.argmin(cut(X), axis=True),
    "a truth value for the axis of joined arrays": lambda: np.concatenate([cut(X)] * 2, axis=True),
    "a list of axes": lambda: cut(X).sum([0]),
    "edges that are no dates": lambda: np.histogram(cut(DATES[:1]), [0, 1, 5]),
    "bins that are no dates": lambda: np.digitize(cut(DATES[:1]), [0, 1, 5]),
    "weights that are no numbers": lambda: np.histogram(cut([1.0]), [0, 2], weights=cut(["a"])),
    "distances that are no numbers": lambda: np.gradient(cut(X[:, :2], 1), "a"),
    "truth values for indices": lambda: np.take_along_axis(cut(X), cut(X > 0), 0),
    "indices of numbers, of which most ranks have none": lambda: np.take(X, cut([0.5])),
    "a word among words for numbers": lambda: put_in([1, 2, 3], slice(None), ["1", "2", "x"]),
    "such words that are cut": lambda: put_in([1, 2, 3], slice(None), cut(["1", "2", "x"])),
    "such words where a mask is true": lambda: put_in([1, 2], np.array([True] * 2), ["1", "x"]),
    "such words by indices": lambda: put_in([1, 2, 3], [2, 0, 1], np.array(["x", "2", "3"])),
    "a word that fills": lambda: xp.full(
        (1,), "x", dtype="i4", mesh=mesh(), placements=[dist.Shard(0)]
    ),
    "NaN beyond integers": lambda: np.pad(cut([1, 2, 3]), (1, 0), constant_values=np.nan),
    "NaN around integers": lambda: dist.map_overlap(
        np.negative, cut([1, 2, 3]), depth=1, boundary=np.nan
    ),
    "another shape on one rank": lambda: dist.map_overlap(
        lambda part: part[: 2 - dist.get_rank()], cut(np.arange(9)), depth=1, boundary=0
    ),
    "an error on one rank": lambda: dist.map_overlap(
        lambda part: {}[dist.get_rank()] if dist.get_rank() else part, cut(X), depth=1
    ),
    "the largest of objects": lambda: np.max(np.add(cut([1, 2]), Fraction(1))),
    "where the largest of objects is": lambda: np.argmax(np.add(cut([1, 2]), Fraction(1))),
    "the largest of bytes without an order": lambda: np.argmax(cut(np.zeros(2, "V3"))),
    "x without y": lambda: np.where(cut([True, False]), 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_on_ranks_without_elements_too(name):
    def check():
        with pytest.raises((ValueError, TypeError, LookupError)):
            WRONG[name]()

    dist.simulate(3, check)


def test_local_functions_may_return_named_tuples():
    def check():
        factors = dist.local_map(np.linalg.qr, out_placements=[[dist.Shard(0)], [dist.Shard(0)]])
        a = cut(np.arange(18.0).reshape(9, 2) ** 2)
        for each, other in zip(factors(a), np.linalg.qr(a.local), strict=True):
            np.testing.assert_array_equal(each.local, other)

    dist.simulate(3, check)


def test_a_row_that_is_cut_is_assigned_to_all_rows():
    def check():
        a = cut(np.zeros((5, 4)))
        a[...] = cut(np.arange(4.0))
        a[1:3, ::-1] = cut(np.arange(4.0))
        wanted = np.zeros((5, 4)) + np.arange(4)
        wanted[1:3] = wanted[0, ::-1]
        np.testing.assert_array_equal(dist.unshard_dtensor(a), wanted)

    dist.simulate(3, check)


@pytest.mark.parametrize("kind", [[], [dist.Partial()]], ids=["whole", "partial"])
def test_contributions_become_a_value_before_their_dtype_changes(kind):
    def check():
        halves = dist.dtensor_from_local(np.full(2, 0.5), mesh(), [dist.Partial()], shape=(2,))
        ones = dist.shard_tensor(halves, mesh(), kind, dtype="int32")
        assert dist.unshard_dtensor(ones).tolist() == [1, 1]
        least = [dist.Partial(dist.ReduceType.kRedMin)]
        sevens = dist.shard_tensor(whole(np.full(2, 7.0)), mesh(), least, dtype="int64")
        assert dist.unshard_dtensor(sevens).tolist() == [7, 7]

    dist.simulate(3, check)


def test_ranks_whose_many_cuts_differ_in_one_place_do_not_agree():
    ranks = 20
    ours, theirs = [2] * ranks, [2] * ranks
    ours[15], ours[16] = 3, 1
    theirs[15], theirs[16] = 1, 3

    def check():
        world, row = dist.get_rank(), dist.ProcessMesh([*range(ranks)])
        both = [
            dist.dtensor_from_local(np.ones(lengths[world]), row, [dist.Shard(0)])
            for lengths in (ours, theirs)
        ]
        with pytest.raises(dist.MismatchError):
            dist.reshard(both[world == 16], row, [])

    dist.simulate(ranks, check)
