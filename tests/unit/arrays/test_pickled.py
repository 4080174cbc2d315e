"""Objects are packed with their large arrays beside the pickle."""

import pickle

import numpy as np
import pytest

from hpcdist.arrays.pickled import (
    EAGER,
    OUT_OF_BAND,
    Pickled,
    buffer_lengths,
    empty_buffers,
    pickled_detail,
)
from hpcdist.comm.pieces import LARGE_NBYTES, pack_object, unpack_object


def travel(obj, padding=0):
    """Send an object to the same process."""
    pickled = pack_object(obj)
    meta = bytes(pickled.meta) + b"\0" * padding
    buffers = empty_buffers(meta)
    for buffer, sent in zip(buffers, pickled.buffers, strict=True):
        buffer[...] = np.frombuffer(sent, np.uint8)
    return unpack_object(Pickled(meta, buffers))


@pytest.mark.parametrize("padding", [0, 100])
def test_objects_arrive_as_they_were_sent(padding):
    for obj in (None, 10**50, "ä", b"", {1: [2.5, (3,)]}, {1, 2}, range(3), ValueError("x")):
        assert repr(travel(obj, padding)) == repr(obj)


def test_large_arrays_stay_out_of_the_pickle_and_arrive_writable():
    for order in "CF":
        x = np.ones((200, 100), order=order)
        pickled = pack_object({"x": x, "small": np.ones(3)})
        assert len(pickled.meta) < 1000
        assert buffer_lengths(pickled.meta) == (x.nbytes,)
        assert np.shares_memory(np.frombuffer(pickled.buffers[0], np.uint8), x)
        arrived = travel(x)
        arrived[0] = 2
        assert (x == 1).all()
        assert arrived.flags.f_contiguous == x.flags.f_contiguous


def test_views_and_tiny_arrays_travel_too():
    x = np.arange(100_000)
    for view in (x[::3], x[::-1], x[:0], x[:1], x.reshape(100, -1).T[5:50]):
        np.testing.assert_array_equal(travel(view), view)


def test_many_arrays_keep_their_order():
    arrays = [np.full(OUT_OF_BAND + each, each, np.uint8) for each in range(5)]
    assert len(pack_object(arrays).buffers) == 5
    for got, wanted in zip(travel(arrays), arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_copy_of_a_parcel_shares_no_memory():
    x = np.zeros(OUT_OF_BAND, np.uint8)
    pickled = pack_object(x)
    again = unpack_object(pickled.copy())
    x[:] = 1
    assert not again.any()
    again[0] = 5
    assert pickled.nbytes == len(pickled.meta) + x.nbytes


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_values_of_bytes_lie_beside_the_pickle(kind):
    value = kind(b"x" * LARGE_NBYTES)
    pickled = pack_object({"value": [value]})
    assert len(pickled.meta) < 1000
    assert np.shares_memory(np.frombuffer(pickled.buffers[0], np.uint8), np.frombuffer(value, "u1"))
    for found in (travel([value], 100)[0], unpack_object(pickled.copy())["value"][0]):
        assert type(found) is kind
        assert found == value


def test_a_copy_copies_what_can_change_alone():
    change = bytearray(b"x" * LARGE_NBYTES)
    pickled = pack_object([change, b"y" * LARGE_NBYTES])
    copied = pickled.copy()
    change[0] = 0
    assert unpack_object(copied) == [b"x" * LARGE_NBYTES, b"y" * LARGE_NBYTES]
    assert copied.buffers[1] is pickled.buffers[1]


def test_the_detail_tells_small_pickles_from_all_others():
    small, large = pack_object(1), pack_object(b"x" * EAGER)
    with_buffer = pack_object(np.zeros(OUT_OF_BAND, np.uint8))
    assert pickled_detail([small]) == len(small.meta) <= EAGER
    assert pickled_detail([small, large]) == len(large.meta) > EAGER
    assert pickled_detail([with_buffer]) > EAGER
    assert pickled_detail([]) == 0


def test_what_pickle_raises_comes_through():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack_object(lambda: 0)
