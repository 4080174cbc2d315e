"""Ranks die in the middle of an operation, the others go on: `recovering.py VICTIMS OPERATION`.

Prints, of each rank that is left, what it was and is, whom it lost, and who was named.
"""

import os
import signal
import sys
import time

import numpy as np
import pytest

import hpcdist as dist

world = dist.init_parallel_env()
rank, victims = world.rank, [int(each) for each in sys.argv[1].split(",")]
left = [each for each in range(world.nranks) if each not in victims]
survivors = dist.new_group(left) if rank in left else None
broken = dist.new_group([rank for rank in range(world.nranks) if rank != left[0]])
shared, ordinary = dist.zeros(50_000), np.zeros(50_000)
gathered = np.zeros(50_000 * world.nranks)
plan = dist.plan_all_reduce(np.ones(3))


def ring():
    works = [
        dist.isend(np.ones(3), (world.rank + 1) % world.nranks),
        dist.irecv(np.zeros(3), (world.rank - 1) % world.nranks),
    ]
    dist.wait_all(works)


def blocking_ring():
    to, source = (world.rank + 1) % world.nranks, (world.rank - 1) % world.nranks
    dist.send(np.full(3, world.rank), to)
    dist.recv(got := np.zeros(3, int), source)
    assert (got == source).all()


OPERATIONS = {
    "small": lambda: dist.all_reduce(np.ones(3)),
    "ordinary": lambda: dist.all_reduce(ordinary),
    "shared": lambda: dist.all_reduce(shared),
    "broadcast": lambda: dist.broadcast(ordinary, 0),
    "asynchronous": lambda: dist.all_reduce(ordinary, sync_op=False).wait(),
    "small asynchronous": lambda: dist.all_reduce(np.ones(3), sync_op=False).wait(),
    "moved": lambda: dist.all_gather(gathered, ordinary),
    "plan": lambda: plan.start().wait(),
    "objects": lambda: dist.all_gather_object([], rank),
    "messages": ring,
    "send and recv": blocking_ring,
    "new group": lambda: dist.new_group(range(world.nranks)),
}


def total(array, group=None):
    array[:] = 1
    dist.all_reduce(array, group=group)
    return float(array[-1])


try:
    for step in range(40):
        if step == 10:
            dist.barrier()  # or a victim might hear of the death of another before its own
            if rank in victims:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
        OPERATIONS[sys.argv[2]]()
except dist.RankFailure as failure:
    named = failure.ranks
    world = dist.recover(60)
    totals = {total(np.ones(3)), total(np.ones(50_000)), total(shared), total(shared, survivors)}
    assert totals == {float(world.nranks)}, totals
    everybody: list[int] = []
    dist.all_gather_object(everybody, world.rank, group=dist.new_group(range(world.nranks)))
    assert everybody == list(range(world.nranks)), everybody
    if broken.rank >= 0:
        with pytest.raises(dist.UsageError, match="has lost ranks"):
            dist.barrier(broken)
    print(rank, world.rank, world.nranks, *world.lost, "named", *named, flush=True)
