"""Sorted arrays become one, by the compiled loops and by NumPy."""

import numpy as np
import pytest

from hpcdist.compiled import load
from hpcdist.mesh.rules.merging import can_merge, merge

compiled = load("hpcdist.mesh._native")
needs_compiled = pytest.mark.skipif(compiled is None, reason="the loops were not compiled here")


@needs_compiled
@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8", "f4", "f8"])
def test_sorted_runs_are_merged(dtype):
    draw = np.random.default_rng(5)
    assert can_merge(np.dtype(dtype))
    for most in (3, 1 << 20):  # many equal ones, and hardly any
        for sizes in [(0, 0), (0, 5), (7, 0), (1, 1), (1, 300), (257, 256), (1000, 3), (999, 998)]:
            one, other = (np.sort(draw.integers(0, most, size)).astype(dtype) for size in sizes)
            for high in (other, (other + one[-1:].sum()).astype(dtype)):
                room = np.zeros(sum(sizes) + 1, dtype)
                merge(room[:-1], one, high)
                np.testing.assert_array_equal(room[:-1], np.sort(np.concatenate([one, high])))
                assert room[-1] == 0


@needs_compiled
def test_of_equal_elements_those_of_the_first_run_come_first():
    one, other = np.array([-0.0, -0.0, 1.0] * 50), np.array([0.0, 0.0, 1.0] * 50)
    room = np.zeros(300)
    merge(room, np.sort(one), np.sort(other))
    assert np.signbit(room).tolist() == [True] * 100 + [False] * 200


@needs_compiled
def test_runs_of_wrong_things_are_refused():
    x = np.zeros(4)
    with pytest.raises(TypeError):
        compiled.merge(0, x, x)
    for code in (-1, 99):
        with pytest.raises(ValueError, match="no such kernel"):
            compiled.merge(code, x, x, x)
    with pytest.raises(ValueError, match="not as long as both"):
        compiled.merge(0, x, x, x)
    assert not can_merge(np.dtype("i2"))
    assert not can_merge(np.dtype(">f8"))
