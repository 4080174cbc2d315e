"""Numbers taken from a device to the host and back, on a device that completes late."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.arrays.libraries import DeviceView, Library, register_library
from hpcdist.arrays.transfer import host_numbers, near, on_host
from hpcdist.comm.memory import empty_near
from hpcdist.testing.slow_device import DEVICE, SlowArray

WHOLE = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize("numbers", [WHOLE, WHOLE[:, ::2], WHOLE[:0], np.float64(3).reshape(())])
def test_a_copy_on_the_host_has_the_numbers_that_arrive_late(numbers):
    for array in (DEVICE.array(numbers), numbers):
        copy = on_host(array)
        assert type(copy) is np.ndarray
        assert copy.flags.c_contiguous
        assert not np.may_share_memory(copy, numbers)
        np.testing.assert_array_equal(copy, numbers)


@pytest.mark.parametrize("numbers", [WHOLE, WHOLE[:, ::2], WHOLE[:0], np.float64(3).reshape(())])
def test_arrays_come_near_others(numbers):
    late = DEVICE.array(np.zeros(2, "f4"))
    arrived = near(late, numbers)
    assert isinstance(arrived, SlowArray)
    assert arrived.dtype == np.float32
    np.testing.assert_array_equal(DEVICE.numbers(arrived), numbers)
    back = near(np.zeros(2), arrived)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, numbers)


def test_what_is_near_is_not_copied():
    here, late = np.zeros(3), DEVICE.array(np.zeros(3))
    assert near(here, WHOLE) is WHOLE
    assert near(late, late) is late
    assert near(here, [1, 2]).tolist() == [1, 2]
    assert near(here, 2.0).tolist() == 2.0


def test_numbers_keep_their_order_wherever_they_are():
    late = DEVICE.array(np.array([4.0, 5.0]))
    given = [1, late.sum(), np.float32(2), np.isfinite(late).all(), late[0], True]
    assert host_numbers(given) == [1.0, 9.0, 2.0, 1.0, 4.0, 1.0]
    assert host_numbers([]) == []


def test_no_memory_near_a_device_is_none():
    assert empty_near(DEVICE.array(np.ones((2, 3))), 0).shape == (0,)


def test_the_stand_in_gives_no_numbers_unasked():
    """So what passes on it does not lean on what CuPy refuses."""
    late = DEVICE.array(np.ones(3))
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(late)
    with pytest.raises(TypeError, match=r"numpy\.ndarray"):
        np.add(late, np.ones(3))
    with pytest.raises(TypeError, match=r"numpy\.ndarray"):
        late[...] = np.ones(3)
    with pytest.raises(TypeError, match="initial"):
        np.max(late, initial=0)
    assert np.empty_like(late, shape=()).shape == (3,)  # as CuPy 14 has it
    assert isinstance(late.sum(), SlowArray)


def test_a_parameter_of_a_library_that_sees_the_device_through_another_is_refused():
    class Tensor:
        pass

    register_library(
        Tensor, Library(lambda _: DeviceView(DEVICE.array(np.ones(2)), np.dtype("f8")), np.asarray)
    )
    with pytest.raises(dist.UsageError, match="a Tensor on a GPU; give it a CuPy array"):
        dist.Parameter(Tensor())
