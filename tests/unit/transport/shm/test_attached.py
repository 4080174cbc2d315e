"""Ordinary memory of other processes, which the kernel copies."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from hpcdist.errors import TransportError
from hpcdist.transport.shm.attached import (
    Attached,
    Sample,
    attach,
    copies_of,
    copying_takes,
    make_sample,
    reduce_attached,
)
from hpcdist.transport.shm.kernel import address_of, compiled

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
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdin=pipe, stdout=pipe, text=True
    ) as process:
        place = Attached(process.pid, int(process.stdout.readline()))
        try:
            if not Sample(place, bytes(range(8))).is_read():
                pytest.skip("processes here may not attach to each other")
            yield process, place
        finally:
            process.kill()


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


def sum_of_both(mine, other, targets, room=64 << 10):
    """Add what this process has and what the other has, as rank 0 of two that owns all of it."""
    sources = [Attached(os.getpid(), address_of(mine)), other]
    stage = np.zeros(room, np.uint8)
    reduce_attached(compiled.CODES["add_uint8"], 0, sources, targets, mine.size, 1.0, stage)


@pytest.mark.parametrize("room", [1000, 1 << 20])
def test_a_share_is_reduced_in_blocks_and_written_to_all_who_want_it(other, room):
    _, place = other
    mine = np.arange(100_000, dtype=np.uint8)[::-1].copy()
    expected = mine + np.arange(100_000, dtype=np.uint8)
    before, found = mine.copy(), np.zeros_like(mine)
    sum_of_both(mine, place, (0, place.address), room)
    place.read(found)
    assert (mine == before).all()
    assert (found == expected).all()
    sum_of_both(mine, place, (address_of(mine), 0), room)
    assert (mine == before + expected).all()
    place.read(found)
    assert (found == expected).all()


def test_a_share_of_a_process_that_is_gone_is_an_error(other):
    process, place = other
    process.kill()
    process.wait()
    mine = np.ones(100_000, np.uint8)
    with pytest.raises(TransportError, match="another process") as caught:
        sum_of_both(mine, place, (address_of(mine), place.address))
    assert isinstance(caught.value.__cause__, ProcessLookupError)
    assert (mine == 1).all()


def test_a_reduction_without_room_for_a_block_is_refused(other):
    _, place = other
    mine = np.ones(100, np.uint8)
    with pytest.raises(TransportError, match="Invalid argument"):
        sum_of_both(mine, place, (address_of(mine), 0), room=63)


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


def test_how_fast_the_kernel_copies_is_tried_among_few_ranks_alone():
    assert all(0 < takes < math.inf for takes in copying_takes(2))
    assert set(copying_takes(100)) == {math.inf}


@pytest.mark.parametrize(
    ("takes", "copies"),
    [((0.6, 1.2), "early"), ((0.6, 2.0), "fast"), ((2.0, 1.2), "any"), ((math.inf,) * 2, "any")],
    ids=str,
)
def test_rules_ask_how_fast_much_and_few_are_copied(takes, copies):
    assert copies_of(takes) == copies


def test_memory_that_is_not_there_cannot_be_attached():
    with pytest.raises(TransportError):
        Attached(os.getppid(), 16).read(np.zeros(4, np.uint8))
