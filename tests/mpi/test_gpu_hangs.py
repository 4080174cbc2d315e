"""What tells of an operation of NCCL that never ends, and in which order operations run."""

import os
import threading

import pytest
from gpu_arrays import why_not_nccl
from mpi4py import MPI
from requirements import missing

import hpcdist as dist
from hpcdist.runtime import gpu
from hpcdist.transport.waiting.polling import poll

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("and_the_world_goes_on")]
LIMIT_S = 1.0
EMULATED = "EMULATED_GPU_COUNT" in os.environ
FLOAT64 = 8
"""ncclFloat64."""


@pytest.fixture
def over_nccl(cupy, world_with, size):
    reason = why_not_nccl(gpu.count(), size)
    if reason:
        missing("nccl", reason)
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(device_backend="nccl", device="gpu", share_gpu=1)


def communicator_of(group):
    return group.transport.on_devices._launches.backend._comm


def test_ranks_that_mean_different_operations_of_nccl_are_a_timeout(
    cupy, over_nccl, rank, size, monkeypatch, capfd
):
    group = dist.new_group(timeout=LIMIT_S)
    x = cupy.ones(100)
    dist.all_reduce(x, group=group)
    dist.alltoall_single(cupy.ones(size), cupy.ones(size), group=group)  # connects each two
    comm = communicator_of(group)
    if rank == 0:  # what hpcdist has agreed on is not what it does

        def another(send, recv, count, dtype, op, stream):
            if EMULATED:
                comm.all_reduce(send, recv, count - 1, dtype, op, stream)
            else:  # NCCL itself takes a number less without a word
                comm.recv(recv, count, dtype, 1, stream)

        monkeypatch.setattr(
            group.transport.on_devices._launches.backend, "_comm", comm._replace(all_reduce=another)
        )
    work = dist.all_reduce(x, sync_op=False, group=group)
    begun = MPI.Wtime()
    with pytest.raises(dist.CollectiveTimeout, match="has not ended on the GPU within 1 s"):
        work.synchronize()
    assert MPI.Wtime() - begun < 5 * LIMIT_S
    assert not EMULATED or "NCCL hangs: rank" in capfd.readouterr().err
    with pytest.raises(dist.TransportError, match="NCCL was aborted in this group"):
        dist.all_reduce(x, group=group)
    dist.all_reduce(x)  # other groups go on


@pytest.mark.skipif(not EMULATED, reason="NCCL itself takes a short one without a word")
def test_a_message_that_is_too_long_for_its_receiver_hangs(cupy, rank, size, two_of_nccl, capfd):
    if rank > 1:
        return
    comm, x, stream = two_of_nccl[0], cupy.ones(10), cupy.cuda.Stream(non_blocking=True)
    if rank == 0:
        comm.send(x.data.ptr, 10, FLOAT64, 1, stream.ptr)
    else:
        comm.recv(x.data.ptr, 5, FLOAT64, 0, stream.ptr)
        assert not poll(lambda: stream.done, 0.3)
        assert "NCCL hangs: rank 1 receives 40 bytes of rank 0" in capfd.readouterr().err


# ---- one operation at a time


@pytest.fixture
def two_of_nccl(cupy, over_nccl, rank, size):
    """Two communicators of NCCL with which every rank has summed something up."""
    nccl = cupy.cuda.nccl
    ids = MPI.COMM_WORLD.bcast([nccl.get_unique_id() for _ in range(2)])
    made = [nccl.NcclCommunicator(size, each, rank) for each in ids]
    for comm in made:
        assert end(add(cupy, [comm]))
    MPI.COMM_WORLD.Barrier()
    yield made
    MPI.COMM_WORLD.Barrier()
    aborts = [threading.Thread(target=comm.abort) for comm in made]  # one may be behind the other
    for each in aborts:
        each.start()
    for each in aborts:
        each.join()


def add(cupy, communicators):
    """Let each communicator sum something up on a stream of its own; return arrays and streams."""
    arrays = [cupy.ones(1000) for _ in communicators]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in communicators]
    cupy.cuda.Device().synchronize()
    for comm, x, stream in zip(communicators, arrays, streams, strict=True):
        comm.allReduce(x.data.ptr, x.data.ptr, x.size, FLOAT64, 0, stream.ptr)
    return arrays, streams


def end(begun):
    _, streams = begun
    return poll(lambda: all(each.done for each in streams), 2.0)


@pytest.fixture
def one_at_a_time(monkeypatch):
    if not EMULATED:
        missing("gpu", "only emulated GPUs can lack room; `make test-gpu` has them")
    monkeypatch.setenv("EMULATED_GPU_NCCL_SERIAL", "1")


def test_operations_in_different_orders_end_where_the_gpu_has_room_for_both(
    cupy, two_of_nccl, rank
):
    assert end(add(cupy, two_of_nccl[:: -1 if rank else 1]))


def test_operations_in_different_orders_lock_where_it_has_not(
    cupy, one_at_a_time, two_of_nccl, rank
):
    assert not end(add(cupy, two_of_nccl[:: -1 if rank else 1]))


def test_groups_need_room_for_one_operation_at_a_time(cupy, one_at_a_time, over_nccl, rank, size):
    groups = [dist.new_group(timeout=20) for _ in range(3)]
    for repeat in range(10):
        arrays = [cupy.full(1000, rank + repeat) for _ in groups]
        works = [
            dist.all_reduce(x, group=group, sync_op=bool((repeat + rank) % 2))
            for x, group in zip(arrays, groups, strict=True)
        ]
        for work in works[:: -1 if rank else 1]:
            if work is not None:
                work.synchronize()
        assert all((x == size * repeat + sum(range(size))).all() for x in arrays)
