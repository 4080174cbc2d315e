"""What NumPy accepts, refuses and makes of rare values, on arrays that are cut over three ranks."""

import datetime
import itertools
import operator
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import hpcdist as dist
import hpcdist.array as xp

X = np.arange(12.0).reshape(4, 3)
DAYS = np.array([["2020-01-01", "NaT"], ["NaT", "NaT"], ["2021-01-01", "2019-01-01"]], "M8[D]")
YEARS = DAYS.astype("M8[Y]") - np.timedelta64(50, "Y")
ZS = np.array([1 + 1j, -2.0, 3j])
TIMES = np.array([[3, 4], [0, 5], [-2, 0]]).astype("m8[s]")
TIMES[1, 1] = "NaT"
FIELDS = np.array([(1, 2.5), (3, 4.5), (5, 6.5)], [("a", "i4"), ("b", "f8")])
NANS = np.array([[1.0, np.nan], [np.nan, np.nan], [5.0, -2.0]])


def mesh():
    return dist.ProcessMesh([0, 1, 2])


def whole(x):
    return dist.shard_tensor(np.asarray(x), mesh(), [])


def rows(x):
    return dist.shard_tensor(np.asarray(x), mesh(), [dist.Shard(0)])


def columns(x):
    return dist.shard_tensor(np.asarray(x), mesh(), [dist.Shard(-1)])


PUTS = pytest.mark.parametrize("put", [whole, rows, columns], ids=["whole", "rows", "columns"])


def same(got, wanted, rtol=0):
    if isinstance(wanted, tuple):
        for one, other in zip(got, wanted, strict=True):
            same(one, other, rtol)
        return
    found, wanted = dist.unshard_dtensor(got), np.asarray(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if rtol:
        np.testing.assert_allclose(found, wanted, rtol)
    else:
        np.testing.assert_array_equal(found, wanted)


def is_older_than(version):
    return np.lib.NumpyVersion(np.__version__) < f"{version}.0"


def taken(x, places):
    """Take from an array that is the same on every rank; NumPy asks only that array for a rule."""
    return np.take(x, places) if isinstance(places, np.ndarray) else xp.take(whole(x), places)


def flat_assigned(a):
    a.flat[::2] = [1, 2]
    a.flat[-1] = -7
    return a


def put_in(a, key, values):
    a[key] = values
    return a


def copied(a, values):
    np.copyto(a, values)
    return a


def assigned(a, values):
    a = a.copy()
    a[a == a] = values
    return a


# ---- what NumPy accepts

ACCEPTED = {
    "angles in degrees": lambda put: np.angle(put(ZS), True),
    "angles in degrees by name": lambda put: np.angle(put(ZS), deg=True),
    "numbers for NaN": lambda put: np.nan_to_num(put(NANS), True, 7.0),
    "trunc into out": lambda put: np.trunc(put(X / 2), out=put(X)),
    "isposinf into out": lambda put: np.isposinf(put(X), put(X > 0)),
    "tiles by an array": lambda put: np.tile(put(X), np.array([2, 1])),
    "tiles by a range": lambda put: np.tile(put(X), range(1, 3)),
    "ordinary numbers into out": lambda put: np.sum(np.ones((4, 3)), axis=1, out=put(X[:, 0])),
    "their medians into out": lambda put: np.nanmedian(X, axis=1, out=put(X[:, 0])),
    "a trace into out": lambda put: np.trace(put(X), out=put(X)[0, :1].reshape(()).copy()),
    "the largest in a dtype": lambda put: np.maximum.reduce(put(X), dtype="f4"),
    "a sum in a dtype": lambda put: np.add.reduce(put(X), axis=1, dtype="i8"),
    "whether any, as bool": lambda put: np.logical_or.reduce(put(X), dtype=bool),
    "kept dimensions by a number": lambda put: np.nansum(put(NANS), 0, keepdims=1),
    "the largest of some": lambda put: np.nanmax(put(NANS), 0, initial=0.0, where=NANS < 5),
    "means of some": lambda put: np.nanmean(put(X), 1, where=X != 1),
    "the latest day": lambda put: np.nanmax(put(DAYS)),
    "the latest days": lambda put: np.nanmax(put(DAYS[::2]), axis=1),
    "the first days": lambda put: np.nanmin(put(DAYS), axis=0, keepdims=True),
    "the longest time": lambda put: np.nanmax(put(DAYS - DAYS[0, 0])),
    "an average": lambda put: np.average(put(X), weights=put(X)),
    "an average of rows": lambda put: np.average(put(X), 0, [1, 2, 3, 4], returned=True),
    "an average of both": lambda put: np.average(put(X), (1, 0), X.T + 1),
    "an average of floats": lambda put: np.average(put(X.astype("f4")), returned=True),
    "an average of integers": lambda put: np.average(put(X.astype("i2")), 1, np.ones(3, "f4")),
    "an average of small floats": lambda put: np.average(put(X.astype("f4")), 1, np.ones(3, "f4")),
    "powers": lambda put: put(X.astype(int)) ** put(np.array([0, 1, 2])),
    "powers by unsigned": lambda put: put(X.astype("i4")) ** np.array([0, 1, 2], "u1"),
    "a view": lambda put: put(X).reshape(4, 3, 1, copy=False),
    "words as numbers": lambda put: put(np.array(["1", "20", "3"], "S2")).astype("f8"),
    "a sum of no dimensions": lambda put: put(X)[1, 1].sum(axis=-1),
    "the largest of no dimensions": lambda put: np.max(put(X)[1, 1], axis=0, keepdims=True),
    "a running product of no dimensions": lambda put: np.cumprod(put(X)[1, 1], axis=0),
    "places in no dimensions": lambda put: np.take(put(X)[1, 1], [0, -1], axis=0),
    "repeats of no dimensions": lambda put: np.repeat(put(X)[1, 1], 3, axis=-1),
    "the place of the largest of no dimensions": lambda put: np.argmax(put(X)[1, 1], axis=0),
    "an order of no dimensions": lambda put: np.argsort(put(X)[1, 1], axis=0, kind="stable"),
    "a flip of no dimensions": lambda put: np.flip(put(X)[1, 1]),
    "where no dimensions are": lambda put: np.argwhere(put(X)[1, 1]),
    "assigned to no dimensions": lambda put: assigned(put(X)[:1, :1].reshape(()), put([5.0])),
    "a triangle of a row": lambda put: np.tril(put(X)[:, 0]),
    "a grid of tables": lambda put: tuple(np.meshgrid(put(X), put(X[:2]))),
    "times, multiplied": lambda put: np.outer(put(TIMES), put(np.array([1, 2]))),
    "times, added": lambda put: np.sum(put(TIMES), axis=0),
    "times, added, without NaT": lambda put: np.sum(put(TIMES[:1])),
    "times, running": lambda put: np.cumsum(put(TIMES), axis=0),
    "mean times": lambda put: np.mean(put(TIMES), axis=0),
    "times that are not 0": lambda put: np.count_nonzero(put(TIMES), axis=0),
    "days that are not 1970": lambda put: np.count_nonzero(put(YEARS), axis=0),
    "times compared with numbers": lambda put: put(TIMES) == put(np.ones((3, 2))),
    "norms of complex numbers": lambda put: np.linalg.norm(put(np.outer(ZS, ZS) * 7), axis=0),
    "small floats, transformed": lambda put: np.fft.irfft(put(np.ones(7, "f2"))) * 0,
    "the condition of zeros": lambda put: np.linalg.cond(put(np.zeros((4, 3, 3)))),
    "whether any, from a truth value on": lambda put: np.logical_or.reduce(put(X), initial=True),
    "whether all, by a mask": lambda put: np.logical_and.reduce(put(X), 1, where=X > 4),
    "whether an odd number": lambda put: np.logical_xor.reduce(put(X), axis=1),
    "bits, or": lambda put: np.bitwise_or.reduce(put(X.astype(int))),
    "bits, and": lambda put: np.bitwise_and.reduce(put(X.astype("u1")), axis=1, initial=7),
    "bits, exclusive or": lambda put: np.bitwise_xor.reduce(put(X.astype("i2")), axis=0),
    "places of none": lambda put: np.take(put(X), [], axis=1),
    "a running sum of a number": lambda put: xp.cumulative_sum(put(X)[1, 1])
    if put is not np.array
    else np.array([X[1, 1]]),
    "a variance in complex numbers": lambda put: np.var(put(ZS), dtype="c8"),
    "a deviation in integers": lambda put: np.std(put(X.astype(int)), dtype=int),
    "a variance of small floats": lambda put: np.var(put(X.astype("f2")), axis=0),
    "a sum into a truth value": lambda put: np.sum(put(X), 1, out=put(X)[:, 0] > 9),
    "a mean into integers": lambda put: np.mean(put(X), 1, out=put(X.astype("i4"))[:, 0].copy()),
    "the largest into small integers": lambda put: np.max(
        put(X), 1, out=put(X.astype("u1"))[:, 0].copy()
    ),
    "running sums into integers": lambda put: np.cumsum(put(X / 2), 0, out=put(X.astype(int))),
    "a product by numbers of the letters": lambda put: np.einsum(
        put(X), [0, 1], put(X), [2, 1], [2, 0]
    ),
    "a sum by numbers of the letters": lambda put: np.einsum(put(X), [..., 3], put(X), [0, 3]),
    "a product of truth values and numbers": lambda put: np.einsum(
        "ij,k->k", put(X > 0), put(np.array([1.0, 2, 3]))
    ),
    "a product of small integers and numbers": lambda put: np.einsum(
        "ij,k->k", put(np.full((4, 3), 100, "i1")), put(np.array([1.0, 2, 3]))
    ),
    "polynomials of a row": lambda put: np.polyval(put(X), put(X[:1])),
    "polynomials of a table": lambda put: np.polyval(put(X[1:]), put(X)),
    "polynomials of a number": lambda put: np.polyval(put(X), put(X)[1, 1]),
    "no polynomials": lambda put: np.polyval(put(X[:0]), put(X)),
    "a quantile of integers that is one of them": lambda put: np.nanquantile(put(X.astype(int)), 1),
    "quantiles of nothing": lambda put: np.nanquantile(put(X[:0]), 0.5, keepdims=True),
    "percentiles of nothing": lambda put: np.nanpercentile(put(X[:0]), [5, 9, 7], axis=0),
    "leading dimensions of length 1, copied": lambda put: copied(put(X), put(X[None, :1])),
    "the same of an ordinary array": lambda put: copied(put(X[0]), X[None, None, 1]),
    "running sums of a line": lambda put: np.add.accumulate(put(X[0]), axis=None),
    "running extremes of a line": lambda put: np.maximum.accumulate(put(X[0]), axis=None),
    "indices into truth values": lambda put: np.argmax(put(X), 1, out=put(X[:, 0] > 9)),
    "a shift along a dimension twice": lambda put: np.fft.fftshift(put(X), axes=(1, 0, -1)),
    "and back": lambda put: np.fft.ifftshift(put(X), axes=(1, 1)),
    "the order of numbers as keys": lambda put: np.lexsort(put(X[0])),
    "the rank of a vector": lambda put: np.linalg.matrix_rank(put(X[0])),
    "the rank of a matrix without rows": lambda put: np.linalg.matrix_rank(put(X[:0])),
    "the ranks of matrices without columns": lambda put: np.linalg.matrix_rank(
        put(np.ones((4, 5, 0)))
    ),
    "the rank of a vector of zeros": lambda put: np.linalg.matrix_rank(put(0 * X[0])),
    "a product over less than no dimensions": lambda put: np.tensordot(put(X), put(X[0]), -1),
    "rows assigned with a new dimension": lambda put: put_in(
        put(X), (np.array([3, 0]), None), put(X[1:3, None])
    ),
    "columns assigned behind a new dimension": lambda put: put_in(
        put(X), (slice(None), None, np.array([2, 0])), np.arange(8).reshape(4, 1, 2)
    ),
    "elements assigned around a new dimension": lambda put: put_in(
        put(X), (np.array([3, 0]), None, np.array([2, 0])), put(np.array([[7], [8]]))
    ),
    "a number assigned behind dots and new dimensions": lambda put: put_in(
        put(X), (None, ..., None, np.array([2, 0])), 7
    ),
    "a field": lambda put: put(FIELDS)["b"] * 2,
    "a field assigned to": lambda put: put_in(put(FIELDS), "a", put(np.arange(3)))["a"],
    "some of a field assigned to": lambda put: assigned(put(FIELDS)["b"], 7),
    "a field of no dimensions": lambda put: put(FIELDS)[1]["a"],
    "flat elements": lambda put: np.stack([*put(X).flat]),
    "some flat elements": lambda put: put(X).flat[1:-1:3],
    "flat elements assigned": lambda put: flat_assigned(put(X)),
    "places that are cut": lambda put: taken(np.arange(5.0), put(np.array([4, 0, -1]))),
    "a condition that is cut": lambda put: np.compress(put(np.array([1, 0, 1])), X, 1),
}  # fmt: skip
SINCE = {
    "a view": "2.1",
    "an average of both": "2.0",
    "times compared with numbers": "1.25",
}


@PUTS
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value encountered")
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_numpy_accepts_comes_to_the_same(name, put):
    if is_older_than(SINCE.get(name, "1.24")):
        pytest.skip("this NumPy does not have it")
    wanted = ACCEPTED[name](np.array)
    dist.simulate(3, lambda: same(ACCEPTED[name](put), wanted))


WORDS = np.array(["ab", "c", "", "Hello x", "zz"])
NUMBERED = np.array(["%d", "a%d", "%5d"])
WIDTHS = np.arange(5) + 7 * is_older_than("2.0")  # where too small ones cut words off
SPELLED = {
    "upper": lambda put, of: of.upper(put(WORDS)),
    "multiply": lambda put, of: of.multiply(put(WORDS), put(np.arange(5))),
    "replace": lambda put, of: of.replace(put(WORDS), "l", "xyz"),
    "center": lambda put, of: of.center(put(WORDS), put(WIDTHS), "*"),
    "zfill": lambda put, of: of.zfill(put(WORDS[:2]), 5),
    "partition": lambda put, of: of.partition(put(WORDS[3:]), "l"),
    "encode": lambda put, of: of.encode(put(WORDS), "utf8"),
    "decode": lambda put, of: of.decode(put(WORDS.astype("S9"))),
    "mod": lambda put, of: of.mod(put(NUMBERED), put(np.array([5, 6, 7]))),
    "translate": lambda put, of: of.translate(put(WORDS), str.maketrans("l", "1")),
    "find": lambda put, of: of.find(put(WORDS), "l"),
    "index": lambda put, of: of.index(put(WORDS[3:4]), sub="l"),
    "count": lambda put, of: of.count(put(WORDS), "l", 2),
    "startswith": lambda put, of: of.startswith(put(WORDS), "H"),
    "strip": lambda put, of: of.strip(put(WORDS), "H"),
    "str_len": lambda put, of: of.str_len(put(WORDS)),
    "isalpha": lambda put, of: of.isalpha(put(WORDS)),
    "none": lambda put, of: of.lower(put(WORDS[:0])),
    "of few": lambda put, of: of.replace(put(WORDS[:2]), "a", "xyz"),
    "of few, encoded": lambda put, of: of.encode(put(WORDS[:2]), "utf8"),
    "of few, parted": lambda put, of: of.partition(put(WORDS[:2]), "a"),
}


def lets_arrays_take_over(name):
    """Return whether a function of `numpy.strings` does, by a protocol or by a ufunc in it."""
    if not hasattr(np, "strings"):
        return False
    return name == "find" or hasattr(getattr(np.strings, name), "_implementation")


@PUTS
@pytest.mark.parametrize("name", SPELLED)
def test_functions_of_words_come_to_what_numpy_makes_of_them(name, put):
    numpys = getattr(np, "strings", np.char)
    wanted = SPELLED[name](np.array, numpys)

    def check():
        same(SPELLED[name](put, xp.strings), wanted)
        if name in ("upper", "multiply", "find", "partition") and lets_arrays_take_over(name):
            same(SPELLED[name](put, numpys), wanted)

    dist.simulate(3, check)


@PUTS
def test_a_word_without_a_result_is_an_error_on_all_ranks(put):
    def check():
        for namespace in (xp.strings, getattr(np, "strings", xp.strings)):
            with pytest.raises(ValueError, match=r"found|another rank"):
                namespace.index(put(np.array(["l", "xl", "c"])), "l")
        with pytest.raises(ValueError, match=r"ascii|another rank"):
            xp.strings.encode(put(np.array(["a", "b", "\u1234"])), "ascii")
        if is_older_than("2.0"):
            same(xp.strings.add(put(WORDS), "!"), np.char.add(WORDS, "!"))
        else:
            same(put(WORDS) + "!", np.strings.add(WORDS, "!"))

    dist.simulate(3, check)


VIEWS = {
    "reshape": lambda a: np.reshape(a, (3, 4)),
    "a.reshape": lambda a: a.reshape(2, 6),
    "reshape along columns": lambda a: a.reshape(4, 3, 1),
    "ravel": np.ravel,
    "a.ravel": lambda a: a.ravel(),
    "flip": np.flip,
    "flipud": np.flipud,
    "fliplr": np.fliplr,
    "a row": lambda a: a[1],
    "a column": lambda a: a[:, 1],
    "an element": lambda a: a[1, 1, ...],
    "every other, from the end": lambda a: a[::-2],
    "squeeze": lambda a: np.squeeze(a[1:2, 1:], axis=0),
    "a.squeeze": lambda a: a[:, 1:2].squeeze(),
    "a transpose": np.transpose,
    "an inner part": lambda a: a[1:-1, None],
    "halves": lambda a: np.split(a, 2)[1],
    "all": lambda a: a[...],
    "rows": lambda a: [*a][2],
}


@PUTS
@pytest.mark.parametrize("name", VIEWS)
def test_what_is_written_to_a_view_reaches_the_array_or_is_refused(name, put):
    wanted = X.copy()
    VIEWS[name](wanted)[...] = -1

    def check():
        a = put(X)
        view = VIEWS[name](a)
        try:
            view[...] = -1
        except dist.UsageError:
            assert put is not whole
            same(a, X)
            with pytest.raises(ValueError, match="read-only"):
                view += 1
            view = view.copy()
            view[...] = -1
            assert (view == -1).all()
        else:
            same(a, wanted)

    dist.simulate(3, check)


RAVELLED = {
    "from the end": lambda a: np.ravel(a[::-1, 0]),
    "flipped": lambda a: np.ravel(np.flip(a)),
    "every other row": lambda a: a[::2].ravel(),
    "every third row": lambda a: a[::3].ravel(),
    "a column": lambda a: a[:, 1].ravel(),
    "every other column": lambda a: a[:, ::2].ravel(),
    "a repeated row": lambda a: np.broadcast_to(a[0], (2, 3)).ravel(),
    "a transpose": lambda a: np.ravel(a.T),
}


@PUTS
@pytest.mark.parametrize("name", RAVELLED)
def test_what_lies_apart_is_ravelled_into_a_copy(name, put):
    def check():
        a = put(X)
        flat = RAVELLED[name](a)
        a[...] = 9
        same(flat, RAVELLED[name](X))
        try:
            flat[...] = -1
        except dist.UsageError:
            assert put is not whole
        same(a, np.full_like(X, 9))

    dist.simulate(3, check)


@PUTS
def test_vectors_of_two_elements_have_nothing_in_the_third(put):
    def check():
        flat = [1, 1, 0]
        same(np.cross(put(X), put(X[::-1])[:, :2]), np.cross(X, X[::-1] * flat))
        same(np.cross(put(X)[:, :2], put(X[::-1])), np.cross(X * flat, X[::-1]))
        same(np.cross(put(X)[:, :2], X[::-1, :2]), np.cross(X * flat, X[::-1] * flat)[:, 2])
        with pytest.raises(ValueError, match="2 or 3"):
            np.cross(put(X)[:, :1], put(X))
        with pytest.raises(ValueError, match="3 elements"):
            xp.linalg.cross(put(X)[:, :2], put(X))

    dist.simulate(3, check)


def test_unstacked_arrays_and_diagonals_of_what_is_cut_are_read_only():
    def check():
        a, b = rows(X), whole(X)
        for view in (*xp.unstack(a), np.diagonal(a), np.diagonal(b)):
            with pytest.raises(dist.UsageError, match="read-only"):
                view[...] = 1
        for view in xp.unstack(a, axis=1):
            view[...] = 1

    dist.simulate(3, check)


@PUTS
def test_an_index_may_be_assigned_to_by_an_operator(put):
    def changed(a, v):
        a[1] += v
        a[2, 1:] -= 1
        a[:, 1] *= 2.0
        a[0, ...] **= 2
        a[0, 0, ...] += 5
        a[3:0:-1] += a[:3]
        a[:] /= 2
        return a

    wanted = changed(X.copy(), np.arange(3.0))

    def check():
        a = put(X)
        for v in (np.arange(3.0), put(np.arange(3.0))):
            a[...] = X
            same(changed(a, v), wanted)

    dist.simulate(3, check)


def test_what_nobody_else_has_can_be_written_to():
    def check():
        a = xp.arange(12.0, mesh=mesh(), placements=[dist.Shard(0)]).reshape(4, 3)
        a[1:, ::2] -= 1
        a.T[0] *= 2
        a += rows(np.ones((4, 3)))
        wanted = np.arange(12.0).reshape(4, 3)
        wanted[1:, ::2] -= 1
        wanted.T[0] *= 2
        same(a, wanted + 1)

    dist.simulate(3, check)


def test_a_view_is_refused_on_all_ranks_if_one_of_them_has_the_array():
    def check():
        a = rows(np.arange(12.0))
        kept, view = (a.T[:2] if dist.get_rank() == 1 else None), a.reshape(4, 3)[:2]
        del a
        with pytest.raises(dist.UsageError, match="read-only"):
            view[0] = 1
        del kept
        view[0] = 1

    dist.simulate(3, check)


@pytest.mark.parametrize("name", VIEWS)
def test_so_it_is_on_one_rank(name):
    def check():
        a = dist.shard_tensor(X.copy(), dist.ProcessMesh([0]), [dist.Shard(0)])
        view = VIEWS[name](a)
        try:
            view[...] = -1
        except dist.UsageError:
            same(a, X)
        else:
            assert (a == -1).any()

    dist.simulate(1, check)


@PUTS
def test_an_item_is_known_to_all_ranks(put):
    def check():
        a = put(X)
        assert (a.item(5), a.item(-1), a.item(3, -1), a.item((0, 1))) == (5, 11, 11, 1)
        assert whole(X)[1, 1].item() == 4
        for wrong in ((12,), (1, 2, 3), (4, 0)):
            with pytest.raises((IndexError, ValueError)):
                a.item(*wrong)

    dist.simulate(3, check)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_variance_of_complex_numbers_may_be_in_real_ones():
    wanted = [np.var(ZS, dtype="f8"), np.std(ZS, dtype="f4")]

    def check():
        for put in (whole, rows):
            same(np.var(put(ZS), dtype="f8"), wanted[0])
            same(np.std(put(ZS), dtype="f4"), wanted[1])

    dist.simulate(3, check)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_complex_number_outside_all_bins_is_an_error_on_all_ranks():
    def check():
        a = rows(np.array([1 - 1j, -1 - 2j, -1 + 3j, 3 - 3j]))
        with pytest.raises(ValueError, match=r"negative elements|another rank"):
            np.histogram(a, 10)
        assert np.histogram(a[:2], 10)[0].local.sum() == 2

    dist.simulate(3, check)


@PUTS
@pytest.mark.parametrize("axis", [(), 0, (0, 1), (0, 2), None])
def test_a_table_of_quantiles_comes_before_the_other_dimensions(axis, put):
    x, q = np.arange(30.0).reshape(5, 2, 3), [[0.1, 0.9], [0.3, 0.4], [0.5, 1]]
    wanted = np.quantile(x, q, axis)
    dist.simulate(3, lambda: same(np.nanquantile(put(x), q, axis), wanted))


def test_an_operator_without_dimensions_has_the_dtype_of_numpys():
    def check():
        for x, op in itertools.product(map(np.array, (True, 3, 2.5)), (pow, operator.add)):
            same(op(whole(x), 2), op(x, 2))
            same(op(2, whole(x)), op(2, x))

    dist.simulate(3, check)


def test_an_array_without_dimensions_has_views_too():
    a = np.array(1.0)

    def check():
        a = whole(np.array(1.0))
        a[...][...] = 2
        assert a.item() == 2
        number = whole(X)[1, 1]
        number += 1
        assert number.item() == X[1, 1] + 1

    assert a[...].base is a
    dist.simulate(3, check)


def test_a_number_has_the_formats_of_numpy():
    def check():
        mean = rows(X).mean()
        assert f"{mean:8.3f} {mean}" == f"{X.mean():8.3f} {X.mean()}"
        assert format(rows(X.astype("f4") / 10).max()) == f"{np.float32(1.1)}"
        assert f"{rows(X)}" == repr(rows(X))
        with pytest.raises(TypeError):
            f"{rows(X):.3f}"

    dist.simulate(3, check)


CONTRIBUTED = {
    "differences": lambda a: np.diff(a, axis=0),
    "halves": lambda a: tuple(np.array_split(a, 2)),
    "running sums": lambda a: np.cumsum(a, axis=0),
}


OTHERS = {
    "a word": "b",
    "bytes": b"b",
    "nothing": None,
    "a date": datetime.date(2020, 1, 1),
    "a decimal": Decimal(1),
    "a fraction": Fraction(1),
    "a range": range(3),
    "dots": ...,
    "a set": {1},
    "a list": ["b", "a", "c"],
    "a time": np.datetime64("2020-01-01"),
}
COMPARED = {
    "numbers": np.arange(3),
    "words": np.array(["a", "b", "b"]),
    "bytes": np.array([b"a", b"b", b"b"]),
    "days": np.array(["2020-01-01", "NaT", "2021-01-01"], "M8[D]"),
    "a number": np.array(1.0),
    "no words": np.array([], "U1"),
}


@PUTS
@pytest.mark.parametrize("op", [operator.eq, operator.ne])
def test_whatever_is_compared_is_compared_by_element(op, put):
    if is_older_than("1.25"):
        pytest.skip("this NumPy compares arrays of different kinds as a whole")

    def check():
        for x in COMPARED.values():
            for other in OTHERS.values():
                if np.ndim(other) and np.shape(other) != x.shape and x.ndim:
                    continue  # which cannot be broadcast
                place = whole if not x.ndim else put
                same(op(place(x), other), op(x, other))
                if not isinstance(other, np.generic):  # whose operators are NumPy's own
                    same(op(other, place(x)), op(other, x))

    dist.simulate(3, check)


def test_operators_are_left_to_an_operand_that_asks_for_them():
    class Own:
        __array_ufunc__ = None

        def __eq__(self, other):
            return "equal"

        __hash__ = None

        def __radd__(self, other):
            return "added"

    def check():
        assert (rows(X) == Own(), rows(X) + Own()) == ("equal", "added")
        with pytest.raises(TypeError):
            rows(X) + {1}

    dist.simulate(3, check)


def test_what_only_some_elements_refuse_is_an_error_on_all_ranks():
    def check():
        days = rows(DAYS[:, 0])
        with pytest.raises(TypeError):  # NaT is None beside a date
            operator.lt(days, datetime.date(2020, 1, 1))
        same(rows(X[:, 0]) + range(4), X[:, 0] + range(4))

    dist.simulate(3, check)


@pytest.mark.parametrize("name", CONTRIBUTED)
def test_contributions_are_combined_before_anything_is_computed_of_them(name):
    def check():
        a = dist.dtensor_from_local(X * dist.get_rank(), mesh(), [dist.Partial()], shape=X.shape)
        same(CONTRIBUTED[name](a), CONTRIBUTED[name](X * 3))

    dist.simulate(3, check)


@pytest.mark.parametrize("grid", [[[0, 1], [2, 3]], [[3], [1], [0], [2]]])
def test_places_are_found_where_other_axes_cut_what_is_looked_for(grid):
    needles = np.array([[3, 9, -1], [4, 4, 0], [7, 2, 5]])

    def check():
        square = dist.ProcessMesh(grid)
        line = dist.shard_tensor(np.arange(8), square, [dist.Shard(0)])
        for ways in ([dist.Shard(0), dist.Shard(1)], [dist.Shard(1), dist.Shard(1)]):
            places = np.searchsorted(line, dist.shard_tensor(needles, square, ways))
            same(places, np.searchsorted(np.arange(8), needles))

    dist.simulate(4, check)


# ---- what it refuses

REFUSED = {
    "a field that is not there": lambda put: put(FIELDS)["c"],
    "a field of numbers": lambda put: put(X)["a"],
    "rows assigned without a new dimension": lambda put: put_in(
        put(X), (np.array([3, 0]), None), put(X[:2, None].repeat(2, 1))
    ),
    "a letter of the result alone": lambda put: np.einsum("ij->ijk", put(X)),
    "dots that the result lacks": lambda put: np.einsum("...->", put(X)),
    "dots beside a letter": lambda put: np.einsum("...i,i->i", put(X), put(X[0])),
    "nothing in an unknown shape": lambda put: put(X[:0, :1]).reshape(0, -1),
    "running sums of a table": lambda put: np.add.accumulate(put(X), axis=None),
    "running extremes of a table": lambda put: np.maximum.accumulate(put(X), axis=None),
    "running sums of no dimensions": lambda put: np.add.accumulate(put(X)[1, 1]),
    "indices into floats": lambda put: np.argmax(put(X), 0, out=put(X)[0].copy()),
    "a product over too many dimensions": lambda put: np.tensordot(put(X), put(X), 3),
    "indices that do not fit together": lambda put: put(X)[np.arange(2), np.arange(3)],
    "and are assigned to": lambda put: put(X).__setitem__((np.arange(2), np.arange(3)), 1),
    "quantiles of complex numbers": lambda put: np.nanquantile(put(ZS), 0.5),
    "percentiles of complex numbers": lambda put: np.nanpercentile(put(np.outer(ZS, ZS)), 5, 0),
    "an axis of 1.0": lambda put: put(X).sum(axis=1.0),
    "an axis of 1.0 after one of 1": lambda put: (put(X).sum(1), put(X).sum(1.0)),
    "axes of 1.0": lambda put: put(X).max((0, 1.0)),
    "running along 0.0": lambda put: np.cumsum(put(X), 0.0),
    "taking along 0.0": lambda put: np.take(put(X), [0], axis=0.0),
    "repeating along 0.0": lambda put: np.repeat(put(X), 2, axis=0.0),
    "a length far away": lambda put: np.broadcast_to(put(X), (10**30, 4, 3)),
    "tiles of 2.0": lambda put: np.tile(put(X), 2.0),
    "negative tiles": lambda put: np.tile(put(X), -1),
    "negative repeats": lambda put: np.repeat(put(X), -1, 0),
    "weights of 0": lambda put: np.average(put(X), 0, weights=[1, -1, 1, -1]),
    "weights of 0 of one row": lambda put: np.average(put(X), 1, weights=put(X * (X < 9))),
    "weights of 0 that are cut": lambda put: np.average(put(X[0]), weights=put(X[0] - 1)),
    "weights without an axis": lambda put: np.average(put(X), weights=[1, 2, 3]),
    "weights of another shape": lambda put: np.average(put(X), 0, weights=[1, 2, 3]),
    "weights in another order": lambda put: np.average(put(X), (1, 0), weights=np.ones((4, 2))),
    "a negative power on one rank": lambda put: 2 ** put(np.array([1, 1, -1])),
    "a negative power of an array": lambda put: put(X.astype(int)) ** put(np.array([1, -1, 1])),
    "a negative power": lambda put: put(np.arange(1)) ** -1,
    "negative powers, where": lambda put: np.power(
        put(np.arange(3)), put(np.array([1, 1, -1])), where=np.array([False, False, True])
    ),
    "a negative power in place": lambda put: put(np.arange(3)).__ipow__(put(np.array([-1, 1, 1]))),
    "a negative power of a bool": lambda put: np.power(put(X > 0), put(np.array([1, -1, 1], "i1"))),
    "places that are nowhere": lambda put: taken(np.arange(3), put(np.array([0, 1, 3]))),
    "places in nothing": lambda put: np.take(put(np.empty((0, 2))), [0], axis=0, mode="clip"),
    "words that are no numbers": lambda put: put(np.array(["1", "2", "x"], "S1")).astype(int),
    "a view that is a copy": lambda put: put(np.ones((4, 6))).T.reshape(24, copy=False),
    "a view that is a copy on some": lambda put: put(X[:, :2])[:, ::-1].reshape(8, copy=False),
}  # fmt: skip
SINCE |= {name: "2.1" for name in REFUSED if "view" in name}
SINCE |= {"weights in another order": "2.0"}


@PUTS
@pytest.mark.parametrize("name", REFUSED)
def test_what_numpy_refuses_is_the_same_error_on_all_ranks(name, put):
    if is_older_than(SINCE.get(name, "1.24")):
        pytest.skip("this NumPy has other errors")
    with pytest.raises(Exception) as refused:  # noqa: PT011 - whatever NumPy says
        REFUSED[name](np.array)

    def check():
        with pytest.raises(refused.type):
            REFUSED[name](put)
        dist.barrier()  # all ranks are in step

    dist.simulate(3, check, timeout=20)


def test_what_cannot_fail_asks_nobody():
    def check():
        numbers, ones = rows(np.arange(6)), rows(np.ones(6, "u1"))
        if dist.get_rank() == 0:  # the others are not there
            for compute in (
                lambda: numbers**2,
                lambda: numbers**0.5,
                lambda: 2.0**numbers,
                lambda: (numbers * 1.0) ** (3 - numbers),
                lambda: numbers**ones,
                lambda: numbers.astype("f4"),
            ):
                compute()
        dist.barrier()

    dist.simulate(3, check)


# ---- products that leave the range of numbers

TINY, HUGE, INF = 1e-200, 1e200, np.inf
PRODUCTS = {
    "0 before what is infinite": [0, HUGE, HUGE],
    "0 after what is infinite": [HUGE, HUGE, 0],
    "small before large": [TINY, HUGE, HUGE],
    "large before small": [HUGE, TINY, TINY],
    "large, small, large": [HUGE, TINY, TINY, HUGE, HUGE, 3],
    "infinite in the end": [2, 3, HUGE, HUGE],
    "infinite on the way": [HUGE, HUGE, TINY, TINY, TINY, 5],
    "nothing on the way": [TINY, TINY, HUGE, HUGE, HUGE],
    "negative": [-1, TINY, -HUGE, HUGE, -3],
    "negative infinity": [-HUGE, HUGE, 1, 2],
    "an infinity": [1, 2, INF, 0, 3],
    "an infinity before 0": [0, INF, HUGE],
    "a NaN": [1, np.nan, HUGE, 2],
    "zeros": [0.0, 1, 2, -0.0, 4],
    "ordinary": [1, 2, 3, -4, 5],
}


@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_leave_the_range_of_numbers_where_those_of_numpy_do(name, dtype):
    line = np.array(PRODUCTS[name], dtype)
    table = np.stack([line, np.ones_like(line)], axis=1)
    backwards = np.stack([line, line[::-1]], axis=1)

    def check():
        with np.errstate(all="ignore"):
            for put in (whole, rows):
                for x in (line, table, backwards):
                    same(np.cumprod(put(x), axis=0), np.cumprod(x, axis=0), 1e-13)
                for x in (line, table, line[:1]):
                    same(np.prod(put(x), axis=0), np.prod(x, axis=0), 1e-13)
                    same(np.prod(put(x), 0, keepdims=True), np.prod(x, 0, keepdims=True), 1e-13)

    dist.simulate(3, check)


def test_products_of_all_dimensions_are_those_of_numpy():
    x = np.array([[TINY, 2], [HUGE, 1], [HUGE, 3]])
    grid = np.array([[0.0, HUGE], [HUGE, HUGE], [1, 2], [3, 4]])

    def check():
        same(np.prod(rows(x)), np.prod(x), 1e-13)
        same(np.prod(columns(grid)), np.array(0.0))
        same(np.prod(rows(x), 0, where=x < HUGE), np.prod(x, 0, where=x < HUGE), 1e-13)
        same(np.prod(rows(x), dtype="f8", initial=2.0), np.prod(x, initial=2.0), 1e-13)

    dist.simulate(3, check)
