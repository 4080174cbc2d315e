"""A rank dies while operations on GPUs are under way: ``dying_gpu.py WAY END``.

The others go on as soon as they hear of it, whether they wait in hpcdist or in CUDA. Each writes
what its operation was ended by.
"""

import os
import signal
import sys
import threading
import time

import hpcdist as dist

way, end = sys.argv[1:]
os.environ["HPCDIST_DEVICE_BACKEND"] = way
world = dist.init_parallel_env(timeout=60, device="gpu")

import cupy  # noqa: E402

VICTIM, FIRST_S = 1, 0.3


def total(world):
    """Return the sum of the ranks' numbers, which come late; wait for it as `end` says."""
    x = cupy.full(1 << 16, world.rank + 1.0)
    cupy.cuda.get_current_stream().launch_host_func(time.sleep, 0.002)
    work = dist.all_reduce(x, sync_op=end == "reading")
    if end == "synchronize":
        work.synchronize()
    work.wait()
    return cupy.asnumpy(x)


def right(world):
    return (total(world) == sum(range(1, world.nranks + 1))).all()


assert right(world)
if world.rank == VICTIM:
    threading.Timer(FIRST_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while right(world):
        pass
    right(world)  # numbers that are void come before the error, and no others
except dist.RankFailure:
    world = dist.recover()
    assert world.lost == (VICTIM,), world.lost
    assert world.nranks == 2
    assert right(world)
    sys.stdout.write(f"rank {world.rank} went on\n")
