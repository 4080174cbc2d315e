"""Values at the edge of what can be computed, on ranks of which only some have them."""

import numpy as np
import pytest

import hpcdist as dist
import hpcdist.array as xp

ROWS = [dist.Shard(0)]
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def rows(x, ranks=None):
    """Return a NumPy array as one that is cut over some ranks, or all."""
    mesh = dist.ProcessMesh(range(dist.get_world_size()) if ranks is None else ranks)
    return dist.shard_tensor(x, mesh, ROWS)


def whole(x):
    return dist.unshard_dtensor(x)


@RANKS
def test_what_is_not_a_number_spreads_over_all_ranks_as_in_numpy(ranks):
    def check():
        x = np.random.default_rng(1).normal(size=(5, 5))
        x[0, 0] = np.nan
        with np.errstate(all="ignore"):
            assert np.isnan(whole(np.linalg.inv(rows(np.full((3, 3), np.nan))))).all()
            assert np.isnan(float(np.linalg.det(rows(x))))

    dist.simulate(ranks, check)


@RANKS
def test_a_matrix_with_tiny_pivots_is_not_singular(ranks):
    x = np.random.default_rng(0).normal(size=(129, 129))
    x[:, 0] *= 1e-200
    x[:, 1] *= 1e200

    def check():
        found = [float(each) for each in np.linalg.slogdet(rows(x))]
        np.testing.assert_allclose(found, np.linalg.slogdet(x), rtol=1e-6)

    dist.simulate(ranks, check)


@RANKS
@pytest.mark.parametrize(("words", "dtype"), [(["1", "2", "400"], "i1"), (["1", "9" * 30], "i8")])
def test_a_number_too_large_for_its_dtype_is_an_error_on_all_ranks(ranks, words, dtype):
    try:
        np.array(words).astype(dtype)
    except (OverflowError, ValueError):
        pass
    else:
        pytest.skip("this NumPy takes the last bits of the number")

    def check():
        with pytest.raises((OverflowError, ValueError)):
            rows(np.array(words)).astype(dtype)
        assert rows(np.ones(3)).sum() == 3

    dist.simulate(ranks, check)


@RANKS
def test_durations_that_are_no_time_are_left_out_where_numpy_leaves_them_out(ranks):
    x = np.array([1, 2, "NaT", 3], "m8[s]")

    def check():
        for function in (np.nancumsum, np.nanmax, np.nanmin, np.nanmean, np.nansum):
            np.testing.assert_array_equal(whole(function(rows(x))), function(x))

    dist.simulate(ranks, check)


@RANKS
@pytest.mark.parametrize("x", [[-1.0, 0, 1, 1], [-0.0, -0.0, 0.0, 1]])
@pytest.mark.parametrize("function", [np.cumsum, np.cumprod])
def test_zeros_keep_their_signs_from_part_to_part(ranks, function, x):
    def check():
        found, wanted = whole(function(rows(np.array(x)))), function(np.array(x))
        assert np.signbit(found).tolist() == np.signbit(wanted).tolist()

    dist.simulate(ranks, check)


def divided_in_place(x, y):
    x /= y


ERRORS = {  # of the last element alone, which is too large in `x`, 0 in `y` and NaN in `n`
    "divide": lambda x, y, n: 1 / y,
    "floor_divide": lambda x, y, n: x // y,
    "multiply": lambda x, y, n: x * 10.0,
    "subtract": lambda x, y, n: -x - x,
    "power": lambda x, y, n: x**2,
    "exp": lambda x, y, n: np.exp(x),
    "log": lambda x, y, n: np.log(y, out=x),
    "divmod": lambda x, y, n: divmod(x, y),
    "square": lambda x, y, n: np.square(x, where=y == 0, out=n),
    "sum": lambda x, y, n: np.stack([x, x]).sum(0),
    "prod": lambda x, y, n: (x * 0.5).prod() * np.prod(x[:, None] + np.zeros(2)),
    "cumprod": lambda x, y, n: np.cumprod(np.concatenate([x, [2.0]])),
    "std": lambda x, y, n: x.std(),
    "matmul": lambda x, y, n: x[:, None] @ np.full((1, 2), 2.0),
    "astype": lambda x, y, n: n.astype(int),
    "assignment": lambda x, y, n: rows(np.zeros(5, int)).__setitem__(slice(None), n),
}


@RANKS
@pytest.mark.parametrize("name", [*ERRORS, "divide, in place"])
def test_a_floating_point_error_is_raised_on_all_ranks(ranks, name):
    function = ERRORS.get(name, divided_in_place)

    def check():
        x, y = rows(np.array([1, 1, 1, 1, 1.7e308])), rows(np.array([4.0, 3, 2, 1, 0]))
        n = rows(np.array([0, 0, 0, 0, np.nan]))
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            with pytest.raises(FloatingPointError, match=f"encountered in {name.split(',')[0]}"):
                function(x, y, n) if name in ERRORS else function(x, y)
            assert (y + 1).sum() == 15  # the ranks are still in step

    dist.simulate(ranks, check)


def test_what_all_ranks_have_is_an_error_without_a_word_to_the_others():
    def check():
        x = dist.shard_tensor(np.zeros(3), dist.ProcessMesh([0, 1]), [])
        if dist.get_rank() == 0:
            with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
                1 / x

    dist.simulate(2, check)


@RANKS
def test_errors_that_are_not_to_be_raised_go_where_they_are_called(ranks):
    def check():
        called = []
        with np.errstate(over="raise", divide="call", call=lambda what, _: called.append(what)):
            assert whole(1 / rows(np.array([1, 2, 3, 0.0])))[3] == np.inf
        return called

    assert [what for called in dist.simulate(ranks, check) for what in called] == ["divide by zero"]


@RANKS
@pytest.mark.parametrize("x", [[1, 2, 1e200, 1e200, 3, 1e9], [np.inf, 1, 1, 0, 3, 0]])
@pytest.mark.parametrize("function", [np.cumprod, np.prod])
def test_a_product_that_leaves_the_range_is_told_once(ranks, function, x):
    def check():
        told = []
        with np.errstate(all="call", call=lambda what, _: told.append(what)):
            found = function(rows(np.array(x)))
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(whole(found), function(np.array(x)))
        return told

    assert sum(map(len, dist.simulate(ranks, check))) == 1


NOTHING = [
    np.array([[1, np.nan], [np.nan, np.nan], [3, np.nan]]),
    np.array([["NaT", "2020-01-01"], ["NaT", "NaT"], ["NaT", "2021-01-01"]], "M8[D]"),
    np.array([["NaT", 1], ["NaT", "NaT"], ["NaT", 3]], "m8[s]"),
]


@pytest.mark.parametrize("x", NOTHING, ids=["f", "M", "m"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("function", [np.nanmax, np.nanmin])
def test_slices_of_nothing_are_told_as_by_numpy(function, axis, x):
    with pytest.warns(RuntimeWarning, match="All-NaN slice encountered"):
        wanted = function(x, axis)
    with pytest.warns(RuntimeWarning, match="All-NaN slice encountered"):
        found = dist.simulate(3, lambda: whole(function(rows(x), axis)))
    for each in found:
        np.testing.assert_array_equal(each, wanted)


def test_complex_numbers_without_nan_have_extremes_where_they_are_not_cut():
    x = np.array([[1, np.nan], [np.nan, 2j], [3 + 1j, 3]])

    def check():
        assert whole(np.nanmax(rows(x), axis=1)).tolist() == [1, 2j, 3 + 1j]

    dist.simulate(2, check)


@RANKS
@pytest.mark.parametrize("x", [*NOTHING, np.arange(6).reshape(3, 2)], ids=["f", "M", "m", "i"])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_extremes_without_nan_reduce_as_in_numpy(ranks, axis, x):
    def check():
        for ufunc in (np.fmax, np.fmin):
            np.testing.assert_array_equal(whole(ufunc.reduce(rows(x), axis)), ufunc.reduce(x, axis))

    dist.simulate(ranks, check)


@RANKS
@pytest.mark.parametrize("x", [*NOTHING[1:], np.array([[2**62 + 1, 2**62], [0, 1], [3, 2**62]])])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_places_of_extremes_without_nan_are_those_of_numpy(ranks, axis, x):
    def check():
        for function in (np.nanargmax, np.nanargmin):
            np.testing.assert_array_equal(whole(function(rows(x), axis)), function(x, axis))

    dist.simulate(ranks, check)


def test_what_is_empty_needs_no_copy():
    dist.simulate(1, lambda: xp.asarray(np.empty(0), copy=False))


def test_a_rank_outside_the_mesh_may_make_every_call():
    def check():
        x, y = rows(np.arange(3.0), [1]), rows(np.eye(4) + 1, [1])
        np.nanargmax(x)
        np.repeat(x, [1, 2, 1], axis=0)
        np.take_along_axis(x, np.array([0, 1]), 0)
        np.concatenate([x, np.ones(2)])
        power = np.linalg.matrix_power(y, -2) @ np.linalg.inv(y)
        assert power.shape == (4, 4)

    dist.simulate(2, check)
