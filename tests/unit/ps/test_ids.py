"""Ids of any integer dtype, and what is a function of them alone."""

import numpy as np
import pytest

from hpcdist.errors import UsageError
from hpcdist.ps.ids import as_ids, coins, mixed, owners

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", [*INTEGERS, ">i4", ">u8"])
def test_ids_of_any_integer_dtype_are_the_same_numbers(dtype):
    ids, shape = as_ids(np.array([[0, 1, 2], [3, 100, 5]], dtype))
    assert ids.dtype == np.int64
    assert ids.dtype.isnative
    assert ids.flags.c_contiguous
    assert shape == (2, 3)
    np.testing.assert_array_equal(ids, [0, 1, 2, 3, 100, 5])


def test_ids_that_do_not_lie_together_are_taken_in_order():
    ids, shape = as_ids(np.arange(24).reshape(4, 6)[::2, ::-3])
    assert shape == (2, 2)
    np.testing.assert_array_equal(ids, [5, 2, 17, 14])


def test_unsigned_ids_are_seen_by_their_bits():
    ids, _ = as_ids(np.array([2**64 - 1, 2**63, 7], np.uint64))
    np.testing.assert_array_equal(ids, [-1, -(2**63), 7])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([[], []], []),
        (5, [5]),
        (range(3), [0, 1, 2]),
        ([2**64 - 1], [-1]),
        ([2**63, -5, 1], [-(2**63), -5, 1]),
    ],
)
def test_ids_may_be_integers_of_python(given, expected):
    ids, shape = as_ids(given)
    assert shape == np.shape(given)
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize(
    "given",
    [
        np.zeros(3),
        np.zeros(0),
        np.ones(2, bool),
        [1.0, 2.0],
        [True, False],
        ["a"],
        [2**64],
        [-(2**63) - 1],
        [[1], [2, 3]],
        np.array([None]),
    ],
    ids=repr,
)
def test_what_is_no_id_is_refused(given):
    with pytest.raises(UsageError, match="ids"):
        as_ids(given)


def test_the_hash_is_splitmix64():
    seed = 1234567
    golden = 0x9E3779B97F4A7C15
    states = np.array([(seed + i * golden) % 2**64 for i in range(3)], np.uint64)
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    np.testing.assert_array_equal(mixed(states), np.array(known, np.uint64))


def test_owners_are_the_same_in_every_run_and_evenly_many():
    np.testing.assert_array_equal(owners(np.array([0, 1, 2, 3, -1, 2**40]), 3), OWNERS_OF_THREE)
    for servers in (1, 2, 3, 7):
        load = np.bincount(owners(np.arange(200_000), servers), minlength=servers)
        assert load.size == servers
        assert load.max() / load.mean() <= 1.05


OWNERS_OF_THREE = [2, 1, 1, 0, 2, 0]


def test_coins_depend_on_id_and_seed_alone():
    ids = np.arange(100_000)
    drawn = coins(ids, 3)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    np.testing.assert_array_equal(drawn[::-7], coins(ids[::-7].copy(), 3))
    assert abs((drawn < 0.25).mean() - 0.25) < 0.01
    assert abs(np.corrcoef(drawn, coins(ids, 4))[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn, owners(ids, 2))[0, 1]) < 0.02
