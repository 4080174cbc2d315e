"""hpcdist beside mpi4py in one program."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")


@pytest.fixture
def half():
    """A world on half of the ranks, made of a communicator of the program's own."""
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)
    dist.destroy_process_group()
    world = dist.init_parallel_env(comm=comm)
    yield comm, world
    dist.destroy_process_group()
    assert comm.allreduce(1) == comm.size  # it is still the program's own
    comm.Free()
    dist.init_parallel_env()


def test_a_world_may_be_any_communicator(half):
    comm, world = half
    assert (world.rank, world.nranks) == (comm.rank, comm.size)
    x, gathered = np.array([MPI.COMM_WORLD.rank]), []
    dist.all_gather(gathered, x)
    assert [int(each[0]) for each in gathered] == comm.allgather(MPI.COMM_WORLD.rank)
    group = dist.new_group([comm.size - 1])
    dist.broadcast(x, comm.size - 1, group) if group.is_member() else None
    assert len(dist.ParallelEnv().trainer_endpoints) == comm.size


def test_the_communicator_of_a_group_is_the_programs_own(rank, size):
    for group in (dist.init_parallel_env(), dist.new_group(range(size))):
        comm = group.mpi_comm
        assert (comm.rank, comm.size) == (group.rank, group.nranks)
        for _ in range(5):
            x = np.ones(100)
            work = dist.all_reduce(x, group=group, sync_op=False)
            request = comm.Iallreduce(MPI.IN_PLACE, y := np.ones(100))
            message = comm.isend({"from": rank}, (rank + 1) % size, tag=0)
            assert comm.recv(source=(rank - 1) % size, tag=0) == {"from": (rank - 1) % size}
            assert comm.allreduce(1) == size
            message.wait()
            request.Wait()
            work.wait()
            assert (x == size).all()
            assert (y == size).all()
    dist.destroy_process_group(group)


def test_messages_of_mpi4py_and_of_hpcdist_do_not_meet(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    raw, ours = np.empty(1), np.empty(1)
    raw_receive = MPI.COMM_WORLD.Irecv(raw, MPI.ANY_SOURCE, MPI.ANY_TAG)
    receive = dist.irecv(ours)
    work = dist.isend(np.array([1.0]), to)
    receive.wait()
    raw_send = MPI.COMM_WORLD.Isend(np.array([2.0]), to, 5)
    MPI.Request.Waitall([raw_receive, raw_send])
    work.wait()
    assert (ours[0], raw[0]) == (1.0, 2.0)
    assert receive.source == source


def test_traffic_on_comm_world_goes_on_in_parallel(rank, size):
    for turn in range(20):
        x = np.full(1000, float(turn))
        work = dist.all_reduce(x, sync_op=False)
        assert MPI.COMM_WORLD.bcast(turn, turn % size) == turn
        MPI.COMM_WORLD.Barrier()
        work.wait()
        assert (x == turn * size).all()


def test_a_communicator_must_be_one_of_mpi4py():
    dist.destroy_process_group()
    for wrong in (MPI.COMM_NULL, "world", MPI.GROUP_EMPTY):
        with pytest.raises(dist.UsageError, match="comm must be"):
            dist.init_parallel_env(comm=wrong)
    dist.init_parallel_env()


def test_what_nobody_received_does_not_reach_a_communicator_that_is_made_later(rank, size):
    group = dist.new_group()
    if size > 1:
        dist.isend(np.ones(3), (rank + 1) % size, group).wait()
    dist.barrier()
    dist.destroy_process_group(group)
    made = [MPI.COMM_WORLD.Dup() for _ in range(8)]  # one of them has the number of the group's
    MPI.COMM_WORLD.Barrier()
    assert not any(comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for comm in made)
    for comm in made:
        comm.Free()
