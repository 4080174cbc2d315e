"""Many recoveries in the life of a process: ``leaking.py RECOVERIES``.

Two ranks die, and otherwise all recover for nothing. They use groups, shared arrays, messages, rpc
and a memory after each recovery. Each rank that is left writes what it holds of the system after
the first recoveries, and after the last, as a line of JSON.
"""

import gc
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

import hpcdist as dist

recoveries = int(sys.argv[1])
WARM = 8
"""After so many recoveries, and the deaths, everything has been used."""
DEATHS = {2: 0, 5: 1}
"""After which recovery which rank of the world of then dies."""


def held():
    """Return how many descriptors, mappings, threads and names of shared memory there are."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(maps),
        "shared mappings": sum("memfd:" in line or "/dev/shm" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
        "names": len(list(Path("/dev").glob("shm/*"))),
    }


def use(world, shared, kept):
    """Do something of every kind."""
    group = dist.new_group(range(world.nranks))
    for array in (np.ones(3), np.ones(50_000), shared):
        array[:] = 1
        dist.all_reduce(array, group=group)
        assert array[-1] == world.nranks
    dist.all_reduce(np.ones(3), sync_op=False).wait()
    dist.all_gather_object([], world.rank)
    dist.wait_all(
        [
            dist.isend(np.ones(3), (world.rank + 1) % world.nranks),
            dist.irecv(np.zeros(3), (world.rank - 1) % world.nranks),
        ]
    )
    plan = dist.plan_all_reduce(np.ones(3))
    plan.start().wait()
    dist.destroy_process_group(group)  # else it goes on, with all that it has
    kept.commit(world.generation)
    dist.rpc.init_rpc()
    assert dist.rpc.rpc_sync((world.rank + 1) % world.nranks, abs, (-1,)) == 1
    dist.barrier()


world = dist.init_parallel_env()
shared = dist.zeros(50_000)
kept = dist.Memory({"w": np.ones(1000)})
use(world, shared, kept)
found = {}
for number in range(recoveries):
    with suppress(dist.RankFailure):  # whoever is first ends what the others are in
        dist.barrier()
        if DEATHS.get(number) == world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if number in DEATHS:
            dist.barrier()
    world = dist.recover(60)
    kept.restore()
    use(world, shared, kept)
    if number in (WARM, recoveries - 1):
        dist.barrier()
        found[number] = held()
        dist.barrier()
sys.stdout.write(json.dumps({str(number): each for number, each in found.items()}) + "\n")
