"""Ordinary memory of other processes, which the kernel copies."""

import os
import subprocess
import sys

import numpy as np
import pytest

from hpcdist.errors import TransportError
from hpcdist.transport.kernel import address_of, compiled
from hpcdist.transport.shm.attached import Attached, Sample, attach, make_sample

HELD = """
import sys, numpy as np
held = np.arange(100_000, dtype=np.uint8)
print(held.ctypes.data, flush=True)
for line in sys.stdin:
    print(int(held[7]), flush=True)
"""

pytestmark = pytest.mark.skipif(
    compiled is None or not make_sample()[0], reason="the kernel lets nobody attach here"
)


@pytest.fixture
def other():
    """Return a process that holds an array, and where."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    place = Attached(process.pid, int(process.stdout.readline()))
    if not Sample(place, bytes(range(8))).is_read():
        process.kill()
        pytest.skip("processes here may not attach to each other")
    yield process, place
    process.kill()
    process.communicate()


def test_what_another_process_has_is_read_and_written_in_place(other):
    process, place = other
    out = np.zeros(1000, np.uint8)
    place.at(5).read(out)
    assert out.tolist() == (np.arange(1000) + 5).astype(np.uint8).tolist()
    place.at(7).write(np.array([99], np.uint8))
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "99\n"


def test_a_sample_is_not_read_where_something_else_lies(other):
    _, place = other
    assert not Sample(place, b"elsewhere").is_read()


def test_the_memory_of_a_process_that_is_gone_is_an_error(other):
    process, place = other
    process.kill()
    process.wait()
    with pytest.raises(TransportError, match=f"process {process.pid}"):
        place.read(np.zeros(4, np.uint8))
    assert not Sample(place, b"\0").is_read()


def test_own_memory_is_read_where_it_is():
    data, out = np.arange(1000), np.zeros(1000, np.int64)
    place = Attached(os.getpid(), address_of(data))
    place.read(out)
    assert (out == data).all()
    place.read(data)  # nothing to do
    assert (data == np.arange(1000)).all()


def test_arrays_that_can_be_read_are_told_by_their_address():
    data = np.arange(10)
    assert attach(data) == address_of(data)
    assert attach(data[:0]) == 0


def test_memory_that_is_not_there_cannot_be_attached():
    with pytest.raises(TransportError):
        Attached(os.getppid(), 16).read(np.zeros(4, np.uint8))
