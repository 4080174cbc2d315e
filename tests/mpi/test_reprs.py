"""What `repr` says of works and plans of MPI, on each rank alone."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist

pytestmark = pytest.mark.mpi


def test_works_and_plans_tell_their_state_and_a_destroyed_group_does_not_trouble_them():
    world = dist.init_parallel_env()
    group = dist.new_group(world.ranks)
    works = [dist.all_reduce(np.ones(1 << 16), sync_op=False, group=group)]
    peer = (world.rank + 1) % world.nranks
    works += [dist.irecv(np.ones(3), group=group), dist.isend(np.ones(3), peer, group)]
    plan = dist.plan_all_reduce(np.ones(3), group=group)
    assert all(repr(work).startswith("<Work: ") for work in works)
    for work in works:
        work.wait()
    told = [repr(work) for work in works]
    assert told[0] == "<Work: all_reduce(shape (65536,), float64, SUM), ended>"
    assert told[1].endswith(f"ended, from rank {(world.rank - 1) % world.nranks}>")
    assert "ended" in told[2]
    plan.start().wait()
    assert repr(plan) == "<Plan: all_reduce(shape (3,), float64, SUM), ready>"
    plan.free()
    assert repr(plan).endswith(", freed>")
    dist.destroy_process_group(group)
    assert [repr(work) for work in works] == told
    assert repr(plan).endswith(", freed>")
    assert repr(group).endswith("; closed")
    dist.barrier()


def test_one_rank_alone_may_look():
    world = dist.init_parallel_env()
    if world.rank > 0:
        MPI.COMM_WORLD.Barrier()
    work = dist.all_reduce(np.ones(3), sync_op=False)
    if world.rank == 0:
        assert world.nranks == 1 or "all_reduce" in repr(work)
        MPI.COMM_WORLD.Barrier()
        assert world.backend in repr(world.process_group)
        assert f" of {world.nranks}" in repr(dist.ParallelEnv())
    work.wait()
    dist.barrier()


def test_a_torch_module_says_how_many_ranks_train_it():
    torch = pytest.importorskip("torch")
    world = dist.init_parallel_env()
    told = repr(dist.DataParallel(torch.nn.Linear(2, 1)))
    assert f"{world.nranks} ranks" in told
    assert "Linear" in told
    torch.distributed.destroy_process_group()
