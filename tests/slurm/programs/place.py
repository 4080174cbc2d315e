"""Rank 0 tells where each rank stands: by the launcher's variables, and by MPI."""

import json
import socket

import numpy as np

import hpcdist as dist
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import my_cores, snapshot
from hpcdist.runtime.slurm import expand_nodes, read_job

NAMES = ["rank", "size", "local_rank", "local_size", "node_rank", "nnodes"]

told = read_place(snapshot())
job = read_job(snapshot())
world = dist.init_parallel_env()
env = dist.ParallelEnv()
total = np.array([float(world.rank)])
dist.all_reduce(total)
found = {
    "host": socket.gethostname(),
    "launcher": told.launcher,
    "told": [getattr(told, name) for name in NAMES],
    "true": [getattr(env, name) if name != "size" else env.world_size for name in NAMES],
    "total": total[0],
    "job": job._asdict(),
    "nodes": expand_nodes(job.nodes),
    "cores": my_cores()[1],
}
everyone = []
dist.gather_object(found, everyone if world.rank == 0 else None, dst=0)
for rank in everyone:  # line by line: srun cuts long lines in pieces when it labels them
    print(json.dumps(rank), flush=True)
