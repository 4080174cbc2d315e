"""Random mixes of operations in which one rank or another is interrupted at any moment.

All ranks draw the same program. In each step a rank, or none, has a timer that raises in the middle
of the operation, wherever that is by then, and the ranks begin at moments of their own. Whoever
ends a step with a result has the right one; whoever does not hears of an interrupt; what was lent
is never touched again, and after each step the ranks are in step.
"""

import gc
import os
import random
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.transport.shm.hot import switched_off

pytestmark = pytest.mark.usefixtures("quick_collections")
SEEDS = range(4)
STEPS = 60
HOUR_S = float(os.environ.get("HPCDIST_TEST_MIXES_S", "3600"))
SIZES = 8, 8 << 10, 60_000, 100_000, 1 << 20
WEIGHT = 7.0


class InterruptError(Exception):
    """What the signal handler raises."""


def total(size):
    return size * (size + 1) / 2


def all_reduce(make, rank, size, group):
    x = make(rank + 1.0)
    return lambda: dist.all_reduce(x, group=group), lambda: (x == total(size)).all()


def reduce(make, rank, size, group):
    x = make(rank + 1.0)
    good = lambda: rank != 0 or (x == total(size)).all()  # noqa: E731
    return lambda: dist.reduce(x, 0, group=group), good


def broadcast(make, rank, size, group):
    x = make(rank + 1.0)
    return lambda: dist.broadcast(x, size - 1, group=group), lambda: (x == size).all()


def all_gather(make, rank, size, group):
    x = make(rank + 1.0)
    out = [make(0.0) for _ in range(size)]
    good = lambda: all((each == r + 1).all() for r, each in enumerate(out))  # noqa: E731
    return lambda: dist.all_gather(out, x, group=group), good


def alltoall(make, rank, size, group):
    given, out = ([make(rank + 1.0) for _ in range(size)] for _ in range(2))
    good = lambda: all((each == r + 1).all() for r, each in enumerate(out))  # noqa: E731
    return lambda: dist.alltoall(out, given, group=group), good


def asynchronous(make, rank, size, group):
    x = make(rank + 1.0)
    work = dist.all_reduce(x, group=group, sync_op=False)
    return work.wait, lambda: (x == total(size)).all()


def objects(make, rank, size, group):
    given, out = make(rank + 1.0), []
    good = lambda: all((each == r + 1).all() for r, each in enumerate(out))  # noqa: E731
    return lambda: dist.all_gather_object(out, given, group=group), good


OPERATIONS = all_reduce, reduce, broadcast, all_gather, alltoall, asynchronous, objects


def ordinary(nbytes):
    return lambda value: np.full(nbytes // 8, value)


def shared(nbytes):
    def make(value):
        array = dist.empty(nbytes // 8)
        array[:] = value
        return array

    return make


def attempt(operate, seconds, group):
    """Run an operation; return what it ends with, None for a result."""
    agreement = group.transport.context.agreement
    before = agreement.sequence
    if seconds is None:
        try:
            operate()
        except dist.RemoteError as error:
            return error
        return None
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        operate()
    except (InterruptError, dist.RemoteError, dist.UsageError) as error:
        ended = error  # the last where it came while an object was pickled
    else:
        ended = None
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except InterruptError as error:
            ended = ended or error
    if ended is not None and agreement.sequence == before:  # before it had begun
        return attempt(operate, None, group)
    return ended


def step(draw, rank, size, group):
    """Do one step; return what is wrong."""
    operation, nbytes = draw.choice(OPERATIONS), draw.choice(SIZES)
    make = draw.choice([ordinary, ordinary, shared])(nbytes)
    victim, seconds = draw.randrange(-1, size), draw.choice([1e-5, 1e-4, 1e-3, 5e-3, 0.02])
    delays = [draw.choice([0.0, 0.0, seconds, 2 * seconds, 0.01]) for _ in range(size)]
    in_python = draw.random() < 0.3
    words = f"{operation.__name__} of {nbytes} bytes, {victim} after {seconds}, {delays}"
    operate, is_good = operation(make, rank, size, group)
    MPI.COMM_WORLD.Barrier()
    time.sleep(delays[rank])
    if in_python:
        with switched_off():
            ended = attempt(operate, seconds if rank == victim else None, group)
    else:
        ended = attempt(operate, seconds if rank == victim else None, group)
    wrong = [] if ended is not None or is_good() else [f"another result of {words}"]
    if ended is not None and (victim < 0 or (rank != victim and not ended.in_step)):
        wrong.append(f"{ended!r} in {words}")
    weights = []
    if ended is not None and operation is not asynchronous:
        del operate, is_good
        gc.collect()
        weights = [make(WEIGHT) for _ in range(3)]
    else:
        ended = None  # what goes on keeps its arrays
    told = np.ones(1)
    dist.all_reduce(told, group=group)
    if told[0] != size:
        wrong.append(f"out of step after {words}")
    if any((each != WEIGHT).any() for each in weights):
        wrong.append(f"overwritten in {words}")
    return wrong


def mix(seed, rank, size, group, until):
    def handle(*_):
        raise InterruptError

    draw, previous = random.Random(seed), signal.signal(signal.SIGALRM, handle)
    wrong, number = [], 0
    try:
        while MPI.COMM_WORLD.bcast(until(number), 0):
            wrong += [f"step {number}: {each}" for each in step(draw, rank, size, group)]
            number += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return wrong


@pytest.fixture
def group(size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    made = dist.new_group(timeout=60)
    yield made
    dist.destroy_process_group(made)


@pytest.mark.parametrize(
    "seed", [pytest.param(each, marks=[pytest.mark.thorough] if each else []) for each in SEEDS]
)
def test_mixes_end_as_they_should(seed, rank, size, group):
    assert mix(seed, rank, size, group, lambda number: number < STEPS) == []


@pytest.mark.slow
def test_an_hour_of_mixes_ends_as_it_should(rank, size, group):
    end = time.monotonic() + HOUR_S
    assert mix(99, rank, size, group, lambda number: time.monotonic() < end) == []
