"""Compressed averages of gradients: numbers in fewer bits, and simulated ranks."""

import compressed_checks
import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist.parallel.compressed.encodings import BLOCK, ENCODINGS, decode, encode
from hpcdist.parallel.compressed.lanes import neighbours

SIZE = 300 * BLOCK  # more than are encoded at a time


def there_and_back(name, values):
    encoding = ENCODINGS[name]
    data = np.zeros(encoding.nbytes(values.size), np.uint8)
    encode(encoding, values, data)
    decode(encoding, data, out := np.empty_like(values))
    return out


def blocks(seed=0):
    """Return numbers whose blocks are of very different sizes."""
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.integers(-20, 20, (SIZE // BLOCK, 1))
    return (random.normal(size=(SIZE // BLOCK, BLOCK)) * scales).astype("f4")


@pytest.mark.parametrize("check", compressed_checks.check)
@pytest.mark.parametrize("size", first_of([3, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=60)


def test_integers_are_off_by_half_a_step_of_their_block():
    values = blocks()
    steps = np.abs(values).max(axis=1, keepdims=True) / 127
    found = there_and_back("int8", values.reshape(-1)).reshape(values.shape)
    assert (np.abs(found - values) <= 0.5001 * steps).all()
    assert np.abs(found - values).max() > 0


def test_floats_of_one_byte_are_off_by_a_sixteenth_or_by_the_smallest_of_their_block():
    values = blocks()
    smallest = np.abs(values).max(axis=1, keepdims=True) / 448 * 2**-9
    found = there_and_back("fp8", values.reshape(-1)).reshape(values.shape)
    assert (np.abs(found - values) <= np.maximum(np.abs(values) * 0.0645, smallest)).all()


@pytest.mark.parametrize(("name", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_floats_of_two_bytes_are_rounded_to_the_nearest(name, bits):
    values = np.random.default_rng(0).uniform(1, 100, SIZE).astype("f4")
    found = there_and_back(name, values)
    assert (np.abs(found - values) <= values * 2.0**-bits).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_spoils_its_block_and_no_other(name, bad):
    values = np.ones(SIZE, "f4")
    values[5 * BLOCK + 3] = bad
    spoilt = np.isnan(there_and_back(name, values)).reshape(-1, BLOCK)
    assert spoilt[5].all()
    assert spoilt.sum() == BLOCK


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_codes_lack_is_kept_but_not_of_a_spoilt_block(name):
    values, error = np.random.default_rng(0).normal(size=(2, SIZE)).astype("f4")
    values[5 * BLOCK + 3] = np.nan
    before, sums = error.copy().reshape(-1, BLOCK), values + error
    encoding = ENCODINGS[name]
    encode(encoding, values, data := np.zeros(encoding.nbytes(SIZE), np.uint8), error)
    decode(encoding, data, decoded := np.empty_like(values))
    lacks, error = (sums - decoded).reshape(-1, BLOCK), error.reshape(-1, BLOCK)
    np.testing.assert_array_equal(error[5], before[5])
    np.testing.assert_array_equal(np.delete(error, 5, axis=0), np.delete(lacks, 5, axis=0))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_zeros_and_the_smallest_numbers_stay_finite(name):
    for value in (0.0, 1e-45, 1e-38, 3e38):
        values = np.full(BLOCK, value, "f4")
        np.testing.assert_allclose(there_and_back(name, values), values, rtol=1e-3, atol=1e-30)


def test_one_byte_for_a_number_and_four_for_a_block():
    assert {name: each.nbytes(BLOCK) for name, each in ENCODINGS.items()} == {
        "float16": 2 * BLOCK,
        "bfloat16": 2 * BLOCK,
        "int8": BLOCK + 4,
        "fp8": BLOCK + 4,
    }


def test_ranks_are_neighbours_where_some_share_a_node_and_others_do_not():
    assert neighbours([0, 1, 2], [5, 6, 5]) == [[0, 2], [1]]
    assert neighbours([0, 1, 2], [5, 6, 7]) == [[0], [1], [2]]
    assert neighbours([0, 1, 2], [5, 5, 5]) == [[0], [1], [2]]
    assert neighbours([3, 4], []) == [[3], [4]]
