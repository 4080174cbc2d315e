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
