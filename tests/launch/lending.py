"""A rank dies in an operation, another one comes late: ``lending.py FOLDER OPERATION BYTES HOW``.

The last rank posts its part and dies. The first one hears of it, and fills the memory that it had
lent with weights; only then do the others come. Then all that are left recover.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hpcdist as dist

folder, operation, nbytes, how = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
world = dist.init_parallel_env(timeout=60)
rank, size, count = world.rank, world.nranks, nbytes // 8
OPERATIONS = {
    "all_reduce": dist.all_reduce,
    "reduce": lambda x: dist.reduce(x, 1),
    "broadcast": lambda x: dist.broadcast(x, 1),
    "all_gather": lambda x: dist.all_gather(np.empty(size * x.size), x),
    "objects": lambda x: dist.all_gather_object([], x),
}


def filled(value):
    array = np.empty(count) if how == "ordinary" else dist.empty(count)
    array[:] = value
    return array


x = filled(float(rank))
dist.barrier()
if rank == size - 1:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
elif rank:
    while not (folder / "filled").exists():
        time.sleep(1e-3)
try:
    OPERATIONS[operation](x)
except dist.RankFailure as error:
    heard = error.ranks
else:
    heard = ()
weights = []
if rank == 0:
    del x
    gc.collect()
    weights = [filled(7.0) for _ in range(4)]
    (folder / "filled").touch()
world = dist.recover()
y = np.ones(count)
dist.all_reduce(y)
intact = all((each == 7).all() for each in weights)
print(rank, *heard, "intact" if intact else "overwritten", y.min(), y.max())
