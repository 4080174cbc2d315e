"""Many arrays as few operations."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

import hpcdist as dist
from hpcdist.arrays.buffer import as_buffer
from hpcdist.comm.states import first_difference
from hpcdist.parallel.fused import fused

MiB = 1 << 20


def doubled(arrays):
    """Double all arrays with `fused`; return the results and the addresses of the pieces."""
    places = []

    def double(flat):
        places.append(flat.ctypes.data)
        flat *= flat.dtype.type(2)

    def one_rank():
        buffers = [as_buffer(array) for array in arrays]
        return fused(buffers, dist.get_group(0), double), places

    return dist.simulate(1, one_rank)[0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["f4", "f8", ">f8", "c8", "i2"]),
            st.sampled_from([(), (0,), (3,), (2, 3), (4, 4)]),
            st.sampled_from(["C", "F", "strided", "read-only"]),
        ),
        max_size=8,
    )
)
def test_arrays_of_any_layout_are_changed_once(kinds):
    arrays = []
    for number, (dtype, shape, layout) in enumerate(kinds):
        array = np.full(shape, number + 1, dtype, order="F" if layout == "F" else "C")
        if layout == "strided":
            array = np.full((*shape, 2), number + 1, dtype)[..., 0]
        array.flags.writeable = layout != "read-only"
        arrays.append(array)
    results, _ = doubled(arrays)
    for number, (array, result) in enumerate(zip(arrays, results, strict=True)):
        assert (result is array) == array.flags.writeable
        assert result.shape == array.shape
        assert (result == 2 * number + 2).all()
        assert (array == (2 * number + 2 if array.flags.writeable else number + 1)).all()


def test_large_arrays_are_sent_from_where_they_lie_and_small_ones_together():
    large, small = np.ones(2 * MiB), [np.ones(3) for _ in range(20)]
    _, places = doubled([*small[:10], large, *small[10:]])
    assert len(places) == 2
    assert large.ctypes.data in places


def test_arrays_that_follow_each_other_are_sent_from_where_they_lie():
    flat = np.ones(100)
    _, places = doubled(list(flat.reshape(4, 25)))
    assert places == [flat.ctypes.data]
    assert (flat == 2).all()


def test_groups_close_before_they_exceed_their_size_or_when_the_dtype_changes():
    arrays = [np.full(n, n, dtype) for n, dtype in [(2, "f4"), (2, "f4"), (3, "f4"), (1, "f8")]]
    groups = dist.build_groups(arrays, 16)
    assert [[len(each) for each in group[1]] for group in groups] == [[2, 2], [3], [1]]
    assert [list(group[0]) for group in groups] == [[2, 2, 2, 2], [3, 3, 3], [1]]
    assert groups[0][2] == [[2], [2]]
    assert groups[0][1][0] is arrays[0]
    groups[1][0][:] = 7
    assert list(arrays[2]) == [3, 3, 3]
    assert dist.build_groups([], 16) == []
    assert len(dist.build_groups(arrays[:3], 1)) == 3


def test_groups_are_arrays_of_the_library_of_their_parts():
    torch = pytest.importorskip("torch")
    ((flat, _, shapes),) = dist.build_groups([torch.ones(2, 3), torch.zeros(())], 100)
    assert torch.equal(flat, torch.tensor([1.0] * 6 + [0.0]))
    assert shapes == [[2, 3], []]


@pytest.mark.parametrize("size", [0, -1, None, 1.5])
def test_a_group_has_a_positive_size(size):
    with pytest.raises(dist.UsageError, match="group_size must be a positive number of bytes"):
        dist.build_groups([np.ones(1)], size)


def test_the_first_difference_between_ranks_is_told_with_both_sides():
    a, b, c = ("a", (2,), "float32"), ("b", (3,), "float32"), ("b", (4,), "float32")
    told = first_difference([[a, b], [a, b], [a, c]], [4, 5, 6])
    assert told == (
        "the ranks have different parameters; the first difference is parameter 1, counted from 0: "
        "rank 4 has 'b' of shape (3,), float32, but rank 6 has 'b' of shape (4,), float32. Build "
        "the same model, with the same layers in the same order, on every rank"
    )
    told = first_difference([[a], [a, b]], [0, 1], "array")
    assert "rank 0 has no more, but rank 1 has 'b'" in told
