"""A cable is cut, and mended when all have noticed: outage.py SOCKET."""

import sys
import time
from pathlib import Path

import numpy as np

import hpcdist as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from switch import ask

world = dist.init_parallel_env(timeout=4)
x = np.ones(1)
dist.all_reduce(x)
if world.rank == 0:
    ask(Path(sys.argv[1]), hosts=["n2"], set={"is_up": False})
try:
    while True:
        dist.all_reduce(np.ones(1))
except dist.CollectiveTimeout as error:
    print(world.rank, "misses", *error.missing, flush=True)
if world.rank == 0:
    time.sleep(2)
    ask(Path(sys.argv[1]), set={"is_up": True})
for _ in range(20):
    try:
        dist.all_reduce(x)
        break
    except dist.CollectiveTimeout:
        continue
print(world.rank, "went on:", x[0], flush=True)
