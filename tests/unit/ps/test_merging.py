"""Gradients of equal ids become one."""

import ml_dtypes
import numpy as np
import pytest

from hpcdist.compiled import load
from hpcdist.ps.merging import (
    group,
    group_in_python,
    merge,
    segment_add,
    segment_add_in_python,
    unique,
)

compiled = load("hpcdist.ps._native")
RNG = np.random.default_rng(5)
SPANS = [1, 3, 1000, 2**20, 2**62]
needs_compiled = pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")


@needs_compiled
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("count", [0, 1, 2, 63, 5000])
def test_both_loops_group_alike(count, span):
    ids = RNG.integers(-span, span, count)
    for mine, other in zip(group(ids), group_in_python(ids), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


@needs_compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_both_loops_add_the_same_bits(width, dtype):
    ids = RNG.integers(0, 40, 1000)
    rows = RNG.standard_normal((1000, width)).astype(dtype)
    rows[:3] = -0.0
    rows[5] = np.nan
    rows[7], rows[8] = np.inf, 1e30
    _, order, starts = group(ids)
    mine = segment_add(rows, order, starts)
    other = segment_add_in_python(rows, order, starts)
    np.testing.assert_array_equal(mine.view(np.uint8), other.view(np.uint8))


@pytest.mark.usefixtures("loops")
def test_equal_ids_are_added_in_the_order_they_come():
    grads = np.array([[1e8], [1.0], [-1e8], [3.0], [2.0]], np.float32)
    merged = merge(np.array([9, -4, 9, -4, 9]), grads)
    np.testing.assert_array_equal(merged.ids, [-4, 9])
    np.testing.assert_array_equal(merged.counts, [2, 3])
    assert merged.grads.tolist() == [[4.0], [2.0]]  # in another order 2 would be lost in 1e8


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_added_in_float32(dtype):
    grads = np.full((300, 2), 1, dtype)
    merged = merge(np.zeros(300, np.int64), grads)
    assert merged.grads.dtype == dtype
    assert merged.grads.astype(float).tolist() == [[300, 300]]


@pytest.mark.usefixtures("loops")
def test_unique_tells_which_id_each_was():
    ids = RNG.integers(-50, 50, 300)
    found, inverse = unique(ids)
    expected, where = np.unique(ids, return_inverse=True)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(inverse, where)


@needs_compiled
def test_the_compiled_loops_refuse_what_does_not_fit():
    rows = np.ones((4, 2), np.float32)
    sums = np.empty((2, 2), np.float32)
    order, starts = np.arange(4), np.array([0, 2, 4])
    for wrong in (
        (8, sums, rows, np.array([0, 1, 2, 4]), starts),
        (4, sums, rows, np.array([0, 1, 2, 4]), starts),
        (4, sums, rows, np.array([0, 1, -1, 3]), starts),
        (4, sums, rows, order, np.array([0, 2, 5])),
        (4, sums, rows, order, np.array([0, 3, 2])),
        (4, sums[:, :1].copy(), np.empty((0, 2), np.float32), order, starts),
        (2, sums, rows, order, starts),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            compiled.segment_add(*wrong)
    with pytest.raises(ValueError, match="too short"):
        compiled.group_ids(order, np.empty(4, np.int64), np.empty(4, np.int64), starts)
