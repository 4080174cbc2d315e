"""A training whose ranks die at random moments: ``soaking.py SEED FOLDER [ENGINE]``.

Some of six ranks kill themselves, in whatever they do at that moment; whoever is left goes on. Each
step adds up float64 numbers in the order of the samples, so that the weights are those of a
training without a death, and does two random operations whose results are known. At the end every
rank prints what it was, a fingerprint, and its longest pause between two steps.
"""

import random
import signal
import sys
import time

import numpy as np
from soak import RANKS, plan_run
from training_engines import ENGINES, everything, fingerprint

import hpcdist as dist

STEPS, PAUSE_S = 60, 0.02
"""A training is longer than `soak.LAST_DEATH_S`."""
SAMPLES, WIDTH = 12, 301
SIZES = (3, 1000, 60_000)
"""Of the arrays: on the board of the node, through it, and in place."""


# ---- operations whose results are known


def _all_reduce(world, size, numbers):
    array = np.full(size, world.rank + 1.0)
    dist.all_reduce(array)
    return array, sum(range(world.nranks + 1))


def _shared(world, size, numbers):
    array = dist.zeros(size)
    array[:] = world.rank + 1.0
    dist.all_reduce(array)
    return array.copy(), sum(range(world.nranks + 1))


def _asynchronous(world, size, numbers):
    arrays = [np.full(size, world.rank + 1.0) for _ in range(3)]
    works = [dist.all_reduce(array, sync_op=False) for array in arrays]
    for work in works:
        work.wait()
    return np.concatenate(arrays), sum(range(world.nranks + 1))


def _broadcast(world, size, numbers):
    src = numbers.randrange(world.nranks)
    array = np.full(size, float(world.rank))
    dist.broadcast(array, src)
    return array, src


def _exchange(world, size, numbers):
    received = np.empty((world.nranks, size))
    dist.alltoall_single(received, np.full((world.nranks, size), world.rank + 1.0))
    return received.sum(axis=0), sum(range(world.nranks + 1))


def _scattered(world, size, numbers):
    received = np.empty(size)
    dist.reduce_scatter(received, [np.full(size, float(at)) for at in range(world.nranks)])
    return received, world.rank * world.nranks


def _objects(world, size, numbers):
    found: list[object] = []
    dist.all_gather_object(found, {"rank": world.rank, "data": bytes(size)})
    return np.array([each["rank"] for each in found]) - np.arange(world.nranks), 0


def _ring(world, size, numbers):
    received = np.empty(size)
    works = [
        dist.isend(np.full(size, float(world.rank)), (world.rank + 1) % world.nranks),
        dist.irecv(received, (world.rank - 1) % world.nranks),
    ]
    dist.wait_all(works)
    return received, (world.rank - 1) % world.nranks


def _new_group(world, size, numbers):
    group = dist.new_group(range(world.nranks))
    array = np.full(size, world.rank + 1.0)
    dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)
    return array, sum(range(world.nranks + 1))


OPERATIONS = [
    _all_reduce, _shared, _asynchronous, _broadcast, _exchange, _scattered, _objects, _ring,
    _new_group,
]  # fmt: skip


def operate(world, numbers):
    """Do an operation, the same one on all ranks; it raises if the result is wrong."""
    operation, size = numbers.choice(OPERATIONS), numbers.choice(SIZES)
    found, expected = operation(world, size, numbers)
    assert np.all(found == expected), (operation.__name__, size, found, expected)


def improve(world, weights, step):
    """Change the weights by a sum over samples, each computed by one rank, in their order."""
    parts = np.zeros((SAMPLES, WIDTH))
    for sample in range(world.rank, SAMPLES, world.nranks):
        numbers = np.random.default_rng((step, sample)).normal(size=WIDTH)
        parts[sample] = np.sin(weights * numbers) + numbers
    dist.all_reduce(parts)  # one rank has each row, all others zeros
    for part in parts:
        weights -= 0.01 * part


def train(world, seed, folder, plan, pauses):
    training = ENGINES[plan.engine](world)
    weights = np.ones(WIDTH)
    memory = dist.Memory(
        training.model,
        training.optimizer,
        state={"weights": weights},
        every=plan.every,
        copies=plan.copies,
        path=f"{folder}/series",
        every_on_disk=20,
    )
    for step in memory.steps(STEPS):
        pauses.append(time.monotonic())  # at first: what was before is no pause
        operate(world, random.Random(f"{seed} {step} 1"))
        training.step(step)
        improve(world, weights, step)
        operate(world, random.Random(f"{seed} {step} 2"))
        time.sleep(PAUSE_S)
    return {
        **everything(training, f"{folder}/end", world),
        "weights": weights.copy(),
    }


def main(seed, folder, engine=None):
    plan = plan_run(int(seed), engine=engine)
    world = dist.init_parallel_env()
    number, moments = world.rank, list[float]()
    at_s = plan.deaths.get(number) if world.nranks == RANKS else None
    dist.barrier()
    if at_s is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the system ends the process, wherever it is
        signal.setitimer(signal.ITIMER_REAL, max(at_s, 1e-6))
    found = dist.survive(train)(seed, folder, plan, moments)
    longest = max(np.diff(moments), default=0.0)
    said = f"rank {number} of {world.nranks} ends with {fingerprint(found)} after {longest:.3f}\n"
    sys.stdout.write(said)


if __name__ == "__main__":
    main(*sys.argv[1:])
