"""What is written into a connection, and what is read of it."""

import numpy as np
import pytest
from hypothesis import given, strategies

from hpcdist.rpc import frames
from hpcdist.rpc.frames import FrameError, Parcel


@given(
    strategies.sampled_from([frames.CALL, frames.INLINE, frames.RESULT, frames.FAILURE]),
    strategies.integers(0, 2**64 - 1),
    strategies.binary(max_size=100),
    strategies.lists(strategies.integers(0, 50), max_size=5),
)
def test_what_is_written_is_read(kind, call, pickle, sizes):
    buffers = [np.full(size, i, np.uint8) for i, size in enumerate(sizes)]
    raw = b"".join(map(bytes, frames.parts(kind, call, Parcel(pickle, buffers))))
    head = frames.read_head(b"xx" + raw, 2)
    assert head == (kind, len(sizes), call, len(pickle))
    raw = raw[frames.HEADER_BYTES :]
    assert frames.read_lengths(raw, head.buffers) == tuple(sizes)
    assert raw[8 * len(sizes) :] == pickle + b"".join(map(bytes, buffers))


def test_nothing_large_is_copied():
    array = np.zeros(1 << 20)
    *_, last = frames.parts(frames.CALL, 1, Parcel(b"p", [array]))
    assert last is array


def test_what_is_passed_is_not_written():
    buffers = [np.zeros(100, np.uint8), np.zeros(200, np.uint8)]
    written = frames.parts(frames.CALL, 1, Parcel(b"p", buffers), {1: 7})
    assert written[-1] is buffers[0]
    assert frames.read_lengths(written[1], 2) == (100, 200 | frames.PASSED)
    assert Parcel(b"p", buffers).nbytes == 301


def header(**changes):
    fields = {"magic": b"hRPC", "kind": 1, "buffers": 0, "passed": 0, "call": 1, "nbytes": 0}
    return frames._HEADER.pack(*(fields | changes).values())


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        bytes(frames.HEADER_BYTES),
        header(magic=b"hrpc"),
        header(kind=0),
        header(kind=200),
        header(buffers=frames.MOST_BUFFERS + 1),
        header(passed=frames.MOST_PASSED + 1),
        header(nbytes=frames.MOST_BYTES + 1),
    ],
)
def test_garbage_is_no_header(raw):
    frames.read_head(header())
    with pytest.raises(FrameError):
        frames.read_head(raw)


def test_lengths_beyond_reason_are_refused():
    lengths = np.array([frames.MOST_BYTES, 1], np.uint64)
    with pytest.raises(FrameError, match="claim"):
        frames.read_lengths(lengths.tobytes(), 2)
