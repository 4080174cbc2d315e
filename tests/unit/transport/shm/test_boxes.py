"""What an exchange copies and combines: pure functions of boxes."""

import itertools
import math

import numpy as np
import pytest
from misaligned import misaligned

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.boxes import volume_of
from hpcdist.transport.call.call import Exchange, Give, Read, label
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.shm import boxes
from hpcdist.transport.shm.boxes import (
    as_alltoall,
    chains_of,
    copy_box,
    counts_per_rank,
    fill,
    packed,
    slabs,
    unpacked,
)
from hpcdist.transport.shm.kernel import BLOCK_ITEMS


def box(*bounds):
    return tuple(slice(start, stop) for start, stop in bounds)


def read(target, combine=False, rank=0):
    return Read(rank, (9,), target, target, combine)


def call_of(send, recv, reads=(), gives=(), op=None, key=1, words="rows to columns"):
    dtype = dtype_row(recv.dtype)
    rule = None if op is None else rule_for(op, dtype)
    shape = send.shape
    return Exchange(
        Kind.EXCHANGE, send, recv, dtype, shape, reads, gives, rule, op, key=key, words=words
    )


LEFT, RIGHT, MIDDLE = box((0, 4)), box((4, 8)), box((2, 6))


@pytest.mark.parametrize(
    ("reads", "chains"),
    [
        ([], []),
        ([read(LEFT), read(LEFT), read(RIGHT)], [[0], [1], [2]]),
        ([read(LEFT), read(LEFT, True)], [[0, 1]]),
        ([read(LEFT), read(RIGHT), read(LEFT, True), read(RIGHT, True)], [[0, 2], [1, 3]]),
        ([read(LEFT, True), read(LEFT, True)], [[0, 1]]),
        ([read(LEFT), read(LEFT, True), read(LEFT), read(LEFT, True)], [[0, 1], [2, 3]]),
        ([read(LEFT), read(MIDDLE, True), read(LEFT, True)], [[0], [1], [2]]),
        ([read(LEFT), read(RIGHT), read(MIDDLE), read(RIGHT, True)], [[0], [1], [2], [3]]),
        ([read(()), read((), True)], [[0, 1]]),
    ],
)
def test_what_is_combined_in_one_target_is_a_chain(reads, chains):
    assert chains_of(reads) == chains


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 3, 4), (5, 1, 6), (0, 3), (4, 0)])
@pytest.mark.parametrize("most", [1, 3, 4, 12, 100])
def test_slabs_are_all_of_an_array_once_and_in_order(shape, most):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = [numbers[part] for part in slabs(shape, most)]
    assert all(each.size <= most and each.ndim for each in parts)
    flat = [each for part in parts for each in part.reshape(-1)]
    assert flat == list(range(math.prod(shape)))


@pytest.mark.parametrize("trail", [(), (5,)])
def test_what_is_packed_is_unpacked_by_who_reads_it(trail):
    shape = 4, 6
    send = np.arange(math.prod(shape + trail)).reshape(shape + trail)
    boxes = [box((0, 2), (1, 4)), box((3, 4), (0, 6)), box((1, 4), (2, 3))]
    gives = [Give(rank, each) for rank, each in zip((1, 0, 1), boxes, strict=True)]
    call = call_of(send, send, gives=gives)._replace(shape=shape)
    flat, counts = packed(call, gives), counts_per_rank(call, gives, 3)
    starts = [0, *itertools.accumulate(counts)]
    for reader in range(3):
        mine = [give.source for give in gives if give.rank == reader]
        reads = [Read(0, shape, each, each) for each in mine]
        pieces = unpacked(call, reads, flat[starts[reader] : starts[reader + 1]])
        for piece, each in zip(pieces, mine, strict=True):
            np.testing.assert_array_equal(piece, send[each])
    assert counts[2] == 0
    assert sum(counts) == sum(map(volume_of, boxes)) * math.prod(trail)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "?", "c8"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX])
@pytest.mark.parametrize("shape", [(), (5,), (3, BLOCK_ITEMS // 2), (2, 3, 4)])
def test_boxes_are_combined_alike_wherever_they_lie(dtype, op, shape):
    if dtype == "c8" and op is ReduceOp.MAX:
        pytest.skip("complex numbers have no order")
    chance = np.random.default_rng(3)
    pieces = [chance.integers(0, 3, shape).astype(dtype) for _ in range(3)]
    whole = tuple(slice(0, length) for length in shape)
    reads = [Read(0, shape, whole, whole, number > 0) for number in range(3)]
    contiguous = np.zeros(shape, dtype)
    fill(call_of(contiguous, contiguous, reads, op=op), pieces)
    wide = tuple(2 * length for length in shape)
    apart = np.zeros(wide, dtype)
    targets = [each._replace(target=tuple(slice(n, 2 * n) for n in shape)) for each in reads]
    fill(call_of(apart, apart, targets, op=op), pieces)
    np.testing.assert_array_equal(apart[(*targets[0].target, ...)], contiguous)
    exact = np.stack(pieces).astype("c16" if dtype == "c8" else "f8")
    expected = {ReduceOp.SUM: np.sum, ReduceOp.PROD: np.prod, ReduceOp.MAX: np.max}[op](exact, 0)
    np.testing.assert_array_equal(contiguous, expected.astype(dtype))
    outside = np.ones(wide, bool)
    outside[(*targets[0].target, ...)] = False
    assert not apart[outside].any()


def test_a_target_is_rounded_once():
    ulp = np.float16(2.0**-11)  # half of the distance to the next number above 1
    pieces = [np.array([value], "f2") for value in (1.0, ulp, ulp)]
    recv = np.zeros(1, "f2")
    reads = [Read(0, (1,), box((0, 1)), box((0, 1)), number > 0) for number in range(3)]
    fill(call_of(recv, recv, reads, op=ReduceOp.SUM), pieces)
    assert recv[0] == np.float16(1 + 2.0**-10)


def test_the_alltoall_of_an_exchange_agrees_only_with_those_of_its_key():
    x = np.arange(6.0).reshape(2, 3)
    part = box((0, 2), (1, 2))
    reads, gives = [Read(1, (2, 3), part, part)], [Give(0, part)]
    one, same, other = (as_alltoall(call_of(x, x, reads, gives, key=key), 2) for key in (5, 5, 6))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert label(one, [0, 1]) == "exchange(rows to columns, float64)"
    assert one.send.tolist() == [1, 4]
    assert one.counts == ([2, 0], [0, 2])


def test_an_exchange_agrees_only_with_one_of_its_key_and_dtype():
    x = np.zeros(3)
    numbers = {
        call_of(x, x.astype(dtype), key=key).fingerprint()
        for key in (1, 2)
        for dtype in ("f4", "f8")
    }
    assert len(numbers) == 4
    assert call_of(x, x).fingerprint() == call_of(np.ones(7), np.ones((2, 2))).fingerprint()


# ---- copies, compiled or not


BOXES = [
    ((4000,), [slice(0, 4000)]),
    ((4000,), [slice(3, 3999)]),
    ((40, 300), [slice(1, 39), slice(0, 300)]),
    ((40, 300), [slice(0, 40), slice(5, 299)]),
    ((40, 300), [slice(0, 40), slice(7, 9)]),
    ((3, 5, 200), [slice(0, 3), slice(1, 4), slice(1, 199)]),
    ((3, 5, 200), [slice(1, 3), slice(1, 4), slice(0, 200)]),
    ((3, 1, 200), [slice(1, 3), slice(0, 1), slice(0, 200)]),
    ((2, 3, 2, 2, 90), [slice(0, 2), slice(1, 3), slice(0, 1), slice(0, 2), slice(1, 90)]),
    ((5, 300), [slice(2, 2), slice(0, 300)]),
    ((), []),
]


@pytest.mark.parametrize("way", ["compiled", "NumPy"])
@pytest.mark.parametrize("dtype", ["u1", "f2", "f8", "c16"])
@pytest.mark.parametrize(("shape", "box"), BOXES)
def test_boxes_are_copied_and_nothing_beside_them(monkeypatch, shape, box, dtype, way):
    monkeypatch.setattr(boxes, "_STREAMED_FROM", 0)
    if way == "NumPy":
        monkeypatch.setattr(boxes, "_stream_box", None)
    box = (*box, ...)
    data = np.random.default_rng(3).integers(1, 100, shape).astype(dtype)
    given = np.array(data[box])
    for at in (0, 1):  # in an array of its shape, and of its own one, beginning anywhere
        room = misaligned(np.zeros(data.size, dtype), at * data.itemsize).reshape(shape)
        copy_box(room[box], data[box])
        np.testing.assert_array_equal(room[box], given)
        assert np.count_nonzero(room) == given.size
        small = misaligned(np.zeros(given.size, dtype), at * data.itemsize).reshape(given.shape)
        copy_box(small, data[box])
        np.testing.assert_array_equal(small, given)
        room[...] = 0
        copy_box(room[box], small)
        np.testing.assert_array_equal(room[box], given)
        assert np.count_nonzero(room) == given.size
