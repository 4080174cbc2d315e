"""A training that goes on when its ranks die: ``ENGINE STEPS FOLDER [RANK@STEP ...]``.

The n-th of the ranks that are named kills itself in the n-th life of the training. At the end
rank 0 prints a fingerprint of all that was trained.
"""

import os
import signal
import sys

from training_engines import ENGINES, everything, fingerprint

import hpcdist as dist

engine, steps, folder, *kills = sys.argv[1:]
KILLS = [tuple(map(int, each.split("@"))) for each in kills]


@dist.survive
def train(world):
    training = ENGINES[engine](world)
    memory = dist.Memory(training.model, training.optimizer, every=4)
    for step in memory.steps(int(steps)):
        doomed = KILLS[world.generation : world.generation + 1]
        if (world.rank, step) in doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(step)
    found = everything(training, folder, world)
    if world.rank == 0:
        print(f"trained on {world.nranks} ranks: {fingerprint(found)}", flush=True)


train()
