"""More than 2^31 elements and bytes, at two ranks: run by hand, it takes about 10 GB.

mpiexec -n 2 python -m pytest --with-mpi -m slow tests/mpi/test_large.py
"""

import os

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist

COUNT = (1 << 31) + 1001
GB = 1 << 30


def free_gb():
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as lines:
        available = next((line for line in lines if line.startswith("MemAvailable")), None)
    return (int(available.split()[1]) * 1024 if available else pages) / GB


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="made for two ranks"),
]


@pytest.fixture(autouse=True)
def _enough_memory():
    free = MPI.COMM_WORLD.bcast(free_gb())
    if free < 14:
        pytest.skip(f"needs about 10 GB of memory and a margin; {free:.1f} GB are free")
    yield
    MPI.COMM_WORLD.Barrier()


def ends(x):
    """Return some elements on both sides of 2^31 and at the ends."""
    return [int(x[place]) for place in (0, 1, (1 << 31) - 1, 1 << 31, -1)]


def pattern(rank, count=COUNT):
    x = np.full(count, rank + 1, np.int8)
    x[[0, (1 << 31) - 1, -1]] = 10 * (rank + 1)
    return x


def test_all_reduce():
    x = pattern(dist.get_rank())
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert ends(x) == [20, 2, 20, 2, 20]
    dist.all_reduce(x)
    assert ends(x) == [40, 4, 40, 4, 40]


def test_broadcast():
    x = pattern(dist.get_rank())
    dist.broadcast(x, 1)
    assert ends(x) == [20, 2, 20, 2, 20]


def test_all_gather():
    gathered = []
    dist.all_gather(gathered, pattern(dist.get_rank()))
    assert [ends(x) for x in gathered] == [[10, 1, 10, 1, 10], [20, 2, 20, 2, 20]]


def test_send_and_recv():
    x, rank = pattern(dist.get_rank()), dist.get_rank()
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        assert ends(x) == [10, 1, 10, 1, 10]


def test_alltoall():
    x = pattern(dist.get_rank(), COUNT + 1)
    out = np.empty_like(x)
    dist.alltoall_single(out, x)
    half = x.size // 2
    assert (out[0], out[1], out[half], out[half + 1]) == (10, 1, 20, 2) or dist.get_rank() == 1
    assert (out[half - 1], out[-1]) == (1, 2) or dist.get_rank() == 1


def test_an_object():
    shared = [np.full(COUNT, 7, np.int8), "text"] if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert ends(shared[0]) == [7] * 5
    assert shared[1] == "text"


def test_a_pickle_in_one_piece():
    shared = [b"x" * COUNT] if dist.get_rank() == 0 else [None]
    if dist.get_rank() == 0:
        dist.send_object_list(shared, 1)
    else:
        dist.recv_object_list(shared, 0)
        assert (len(shared[0]), shared[0][-1:]) == (COUNT, b"x")


def test_ragged_lists_of_more_than_2_31_bytes_are_gathered_scattered_and_exchanged():
    rank, first = dist.get_rank(), dist.get_rank() == 0
    x = pattern(rank) if first else np.full((3, 7), 2, np.int8)
    outs = [np.zeros(COUNT, np.int8), np.zeros((3, 7), np.int8)]
    dist.all_gather(outs, x)
    assert ends(outs[0]) == [10, 1, 10, 1, 10]
    assert (outs[1] == 2).all()
    outs[0][...] = 0
    dist.gather(x, outs if rank == 1 else None, 1)
    assert ends(outs[0]) == ([10, 1, 10, 1, 10] if rank == 1 else [0] * 5)
    x[...] = 0
    dist.scatter(x, outs if rank == 1 else None, 1)
    assert (ends(x) if first else x[0, 0]) == ([10, 1, 10, 1, 10] if first else 2)
    del outs
    filled = []
    small = np.zeros((2, rank + 1), np.int8)
    dist.alltoall(filled, [small, x] if first else [x, small])
    assert [each.shape for each in filled] == ([(2, 1), (3, 7)] if first else [(COUNT,), (2, 2)])
    assert first or ends(filled[0]) == [10, 1, 10, 1, 10]


def test_ragged_blocks_of_more_than_2_31_bytes_are_reduced_and_scattered():
    rank, first = dist.get_rank(), dist.get_rank() == 0
    blocks = [pattern(rank), np.ones((3, 7), np.int8)]
    out = np.zeros_like(blocks[rank])
    dist.reduce_scatter(out, blocks)
    assert (ends(out) if first else out[0, 0]) == ([30, 3, 30, 3, 30] if first else 2)
