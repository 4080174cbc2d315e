"""Tell what leaves and reaches each node in every collective: traffic.py SOCKET BYTES REPEATS."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hpcdist as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from switch import ask

SWITCH, BYTES, REPEATS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
NODES = int(os.environ["SLURM_NNODES"])


def operations(rank, size):
    """Return what is called, by name; the largest array of each has `BYTES` bytes."""
    whole, other = np.ones(BYTES // 8), np.empty(BYTES // 8)
    part = np.ones(whole.size // size)
    few = np.ones(1)
    return {
        "barrier": dist.barrier,
        "8 B": lambda: dist.all_reduce(few),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce": lambda: dist.reduce(other, 0),
        "reduce_scatter": lambda: dist.stream.reduce_scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.stream.all_gather(other, part),
        "gather": lambda: dist.stream.gather(part, [] if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(part, np.split(whole, size) if rank == 0 else None, 0),
        "alltoall": lambda: dist.alltoall_single(other, whole),
    }


def measured(operation):
    """Return the bytes sent and received by each node; on rank 0."""
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.05)
        ask(SWITCH, clear=True)
    MPI.COMM_WORLD.Barrier()  # its few bytes count, too
    operation()
    MPI.COMM_WORLD.Barrier()
    if dist.get_rank() != 0:
        return None
    time.sleep(0.05)
    found = ask(SWITCH)
    return [[found[f"n{node + 1}"][way] for node in range(NODES)] for way in ("sent", "received")]


dist.init_parallel_env()
for name, operation in operations(dist.get_rank(), dist.get_world_size()).items():
    operation()  # connections are made
    found = [measured(operation) for _ in range(REPEATS)]
    if dist.get_rank() == 0:  # TCP may send something again
        print(json.dumps([name, *np.min(found, axis=0).tolist()]), flush=True)
