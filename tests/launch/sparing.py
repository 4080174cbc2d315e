"""A training with spares, in which processes die: ``sparing.py STEPS [DEATH ...]``.

A death, of a job that is not started again, is

    RANK@STEP/LIFE   this rank kills itself at this step, after so many recoveries
    PROCESS@joining  this process kills itself while it builds a new world with others
    PROCESS@parked   this process kills itself before it has a rank
    PROCESS@0.5s     this process kills itself so long after all have met (a spare: has waited),
                     wherever it is

At the end each rank prints what it has become, with which steps it has begun, and what was
trained: sums over the samples of a sampler, the same on any number of ranks, and over random
numbers of each rank.
"""

import hashlib
import importlib
import os
import signal
import sys
import threading
import time

import numpy as np

import hpcdist as dist
from hpcdist.runtime.mpi import load_mpi
from hpcdist.runtime.place import read_place

STEPS, DEATHS = int(sys.argv[1]), [each.partition("@")[::2] for each in sys.argv[2:]]
if os.environ.get("HPCDIST_RESTART_COUNT", "0") != "0":
    DEATHS = []
PROCESS, SIZE = read_place(os.environ).rank, dist.get_world_size()
PATH, PAUSE_S = os.environ.get("SPARING_PATH"), float(os.environ.get("SPARING_PAUSE_S", "0"))
BATCH, COPIES = 12, int(os.environ.get("SPARING_COPIES", "1"))
FIRST: list[int] = []
"""The steps with which this process has begun, in each of its lives."""


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


load_mpi()  # by hpcdist, which does not end MPI
crew = importlib.import_module("hpcdist.transport.mpi.crew")
recovering = importlib.import_module("hpcdist.transport.mpi.recovering")
if (str(PROCESS), "joining") in DEATHS:
    recovering.make_site = die
if (str(PROCESS), "parked") in DEATHS:
    crew.Crew.is_called = die
elif PROCESS >= SIZE:
    wait = crew.Crew.is_called
    crew.Crew.is_called = lambda self: [die_later(), wait(self)][1]


def die_later():
    """Die at the moment that is asked for, if one is; the first time."""
    for delay in [when for who, when in DEATHS if who == str(PROCESS) and when.endswith("s")]:
        timer = threading.Timer(float(delay[:-1]), die)
        timer.daemon = True
        timer.start()


class Sums:
    """Arrays to which all ranks add."""

    def __init__(self):
        self.trained = np.zeros(1000)
        self.drawn = np.zeros(SIZE)

    def add(self, world, samples, step):
        share, draw = np.zeros(1000), np.zeros(SIZE)
        share[samples] = step + 1
        draw[world.rank] = np.random.random()
        dist.all_reduce(share)
        dist.all_reduce(draw)
        self.trained += share
        self.drawn += draw


@dist.survive
def train(world):
    if world.generation == 0:
        dist.barrier()
        die_later()
    np.random.seed(world.rank)
    sums, sampler = Sums(), dist.DistributedSampler(1000, seed=3)
    memory = dist.Memory(
        vars(sums), sampler=sampler, every=4, copies=COPIES, path=PATH, every_on_disk=8
    )
    batches = None
    for step in memory.steps(STEPS):
        if batches is None:
            FIRST.append(step)
        if (str(world.rank), f"{step}/{world.generation}") in DEATHS:
            die()
        batches = batches or sampler.batches(BATCH // world.nranks)
        sums.add(world, next(batches), step)
        time.sleep(PAUSE_S)
    return sums


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:8]


sums = train()
world = dist.get_group()
print(
    f"process {PROCESS}: rank {world.rank} of {world.nranks}, recovery {world.generation}, "
    f"lost {[*world.lost]}, replaced {[*world.replaced]}, from steps {FIRST}, "
    f"trained {digest(sums.trained)}, drawn {digest(sums.drawn)}",
    flush=True,
)
