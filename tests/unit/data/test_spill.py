"""Memory for rows: what is given back is zeros, and what is beside it stays."""

import mmap

import pytest

from hpcdist.data.spill import Room, give_back, private_memory

NBYTES = 1 << 22


@pytest.mark.parametrize(
    "make", [lambda: private_memory(NBYTES), lambda: Room(NBYTES).memory], ids=["own", "of_a_node"]
)
def test_whole_pages_that_are_given_back_are_zeros(make):
    memory = make()
    assert memory.nbytes == NBYTES
    assert not memory.any()
    memory[:] = 7
    start, stop = 100, 3 * NBYTES // 4 + 100
    give_back([memory[start:stop]])
    page = mmap.PAGESIZE
    assert (memory[:start] == 7).all()
    assert (memory[stop:] == 7).all()
    assert not memory[start + page : stop - page].any()


def test_memory_of_nothing_is_there():
    assert private_memory(0).nbytes == 0
