"""Lists of arrays: which are copied to lie together, and which are used where they lie."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

import hpcdist as dist
from hpcdist.arrays.packing import overlap, overlap_each_other
from hpcdist.comm import describe
from hpcdist.comm.group import Group
from hpcdist.transport.call.call import UNEVEN, is_apart, is_even, shape_detail
from hpcdist.transport.call.runs import APART_FROM, from_each, to_each
from hpcdist.transport.shm.control import PAYLOAD

LARGE, SMALL = APART_FROM // 8, APART_FROM // 8 - 1
GROUP = Group(range(3), 1, 0, None)
SUM = dist.ReduceOp.SUM


def apart(count, ranks=3):
    return [np.zeros(count) for _ in range(2 * ranks)][::2]


def are_same(runs, arrays):
    return all(
        run.ctypes.data == array.ctypes.data and run.nbytes == array.nbytes
        for run, array in zip(runs, arrays, strict=True)
    )


def test_large_arrays_of_a_list_are_read_and_written_where_they_lie():
    outs, given, x = apart(LARGE), apart(LARGE), np.zeros(LARGE)
    for call in (describe.all_gather(GROUP, outs, x), describe.gather(GROUP, x, outs, 1)):
        assert are_same(call.receives, outs)
        assert call.send is x
        assert call.recv is call.finish is None
    for call in (
        describe.scatter(GROUP, x, given, 1),
        describe.reduce_scatter(GROUP, x, given, SUM),
    ):
        assert are_same(call.sends, given)
        assert call.recv is x
        assert call.send is call.finish is None
    call = describe.alltoall(GROUP, outs, given)
    assert are_same(call.sends, given)
    assert are_same(call.receives, outs)
    assert call.send.size == 0
    assert call.recv is call.finish is None


def test_small_arrays_and_those_that_lie_together_are_one_run():
    whole, x = np.zeros((3, LARGE)), np.zeros(LARGE)
    call = describe.all_gather(GROUP, list(whole), x)
    assert are_same([call.recv], [whole])
    call = describe.scatter(GROUP, x, list(whole), 1)
    assert are_same([call.send], [whole])
    call = describe.alltoall(GROUP, apart(SMALL), apart(SMALL))
    assert call.send.size == call.recv.size == 3 * SMALL
    assert call.sends == call.receives == ()


def test_what_travels_on_a_board_never_lies_apart():
    assert APART_FROM > PAYLOAD


def test_one_large_array_leaves_all_of_a_list_where_they_are():
    outs = [np.zeros(shape) for shape in [(2,), (2, LARGE), ()]]
    call = describe.all_gather(GROUP, outs, outs[1])
    assert are_same(call.receives, outs)
    assert call.shapes == ((2,), (2, LARGE), ())
    assert call.detail == UNEVEN


def test_only_what_would_be_overwritten_is_copied():
    outs = apart(LARGE)
    assert describe.all_gather(GROUP, outs, outs[1]).send is outs[1]  # where it belongs
    call = describe.all_gather(GROUP, outs, outs[2])
    assert not np.may_share_memory(call.send, outs[2])
    call = describe.alltoall(GROUP, outs, outs)
    assert not any(np.may_share_memory(call.send, out) for out in outs)
    assert are_same(call.receives, outs)
    same = [np.zeros(LARGE)] * 3
    assert describe.all_gather(GROUP, same, np.zeros(LARGE)).receives == ()


def test_a_call_has_a_run_for_each_rank_whatever_the_form():
    whole, runs = np.arange(3.0 * LARGE), [np.full(LARGE, each) for each in (0.0, 1.0, 2.0)]
    for given_, out in ((whole.reshape(3, LARGE), whole), (runs, runs)):
        sent = to_each(describe.scatter(GROUP, np.zeros(LARGE), given_, 1), 3)
        assert [run.size for run in sent] == [LARGE] * 3
        taken = from_each(describe.all_gather(GROUP, out, np.zeros(LARGE)), 3)
        assert [run.size for run in taken] == [LARGE] * 3


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1 << 40, 7)])
def test_the_last_bit_of_a_detail_tells_of_arrays_that_lie_apart(shape):
    one, other = shape_detail(shape), shape_detail(shape) | True
    assert one % 2 == 0
    assert is_even((one, one))
    assert is_even((one, other))
    assert not is_apart((one, one))
    assert is_apart((one, other))
    assert is_apart((other, other))
    assert not is_even((UNEVEN, UNEVEN))
    assert not is_even((UNEVEN, one))
    assert not is_even((shape_detail((5, 5)), other))


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=5)


@given(spans, spans)
def test_arrays_overlap_if_they_have_an_element_in_common(some, others):
    memory = np.zeros(40)
    some, others = ([set(range(a, a + n)) for a, n in each] for each in (some, others))
    arrays = [[memory[min(s) : max(s) + 1] for s in each if s] for each in (some, others)]
    assert overlap(*arrays) == any(one & other for one in some for other in others)
    pairs = [(one, other) for at, one in enumerate(some) for other in some[at + 1 :]]
    assert overlap_each_other(arrays[0]) == any(one & other for one, other in pairs)
