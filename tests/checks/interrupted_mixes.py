"""Random mixes of operations in which one rank or another is interrupted at any moment, or dies.

All ranks draw the same program. In each step a rank, or none, has a timer that raises in the middle
of the operation, wherever that is by then, and the ranks begin at moments of their own. Whoever
ends a step with a result has the right one; whoever does not hears of an interrupt; what was lent
is never touched again, and after each step the ranks are in step. Where the timer ends the process
the others hear of that, recover, and go on without it.
"""

import gc
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from interrupted_at import InterruptError

import hpcdist as dist
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.tuning import Algorithm, TuningRule, TuningTable

SIZES = 8, 8 << 10, 60_000, 100_000, 1 << 20
WEIGHT = 7.0
PATIENCE_S = 60.0
TUNED = "all_reduce", "reduce", "broadcast", "all_gather", "alltoall"


class Operation(NamedTuple):
    """What a rank does in a step."""

    operate: Callable[[], Any]
    is_good: Callable[[], Any]
    again: Callable[[], Any] | None = None
    """What a rank does that was interrupted, if the operation goes on, or nothing was taken."""


def total(size):
    return size * (size + 1) / 2


def are_of_their_ranks(arrays):
    return all((each == rank + 1).all() for rank, each in enumerate(arrays))


def all_reduce(make, group):
    x = make(group.rank + 1.0)
    is_good = lambda: (x == total(group.nranks)).all()  # noqa: E731
    return Operation(lambda: dist.all_reduce(x, group=group), is_good)


def reduce(make, group):
    x = make(group.rank + 1.0)
    is_good = lambda: group.rank != 0 or (x == total(group.nranks)).all()  # noqa: E731
    return Operation(lambda: dist.reduce(x, group.ranks[0], group=group), is_good)


def broadcast(make, group):
    x, last = make(group.rank + 1.0), group.ranks[-1]
    is_good = lambda: (x == group.nranks).all()  # noqa: E731
    return Operation(lambda: dist.broadcast(x, last, group=group), is_good)


def all_gather(make, group):
    x, out = make(group.rank + 1.0), [make(0.0) for _ in range(group.nranks)]
    is_good = lambda: are_of_their_ranks(out)  # noqa: E731
    return Operation(lambda: dist.all_gather(out, x, group=group), is_good)


def alltoall(make, group):
    given, out = ([make(group.rank + 1.0) for _ in range(group.nranks)] for _ in range(2))
    is_good = lambda: are_of_their_ranks(out)  # noqa: E731
    return Operation(lambda: dist.alltoall(out, given, group=group), is_good)


def asynchronous(make, group):
    x = make(group.rank + 1.0)
    work = dist.all_reduce(x, group=group, sync_op=False)
    return Operation(work.wait, lambda: (x == total(group.nranks)).all(), work.wait)


def objects(make, group):
    given, out = make(group.rank + 1.0), []
    is_good = lambda: are_of_their_ranks(out)  # noqa: E731
    return Operation(lambda: dist.all_gather_object(out, given, group=group), is_good)


def neighbours(group):
    return (group.ranks[(group.rank + by) % group.nranks] for by in (1, -1))


def recv(make, group):
    out, (to, source) = make(0.0), neighbours(group)
    sent = dist.isend(make(group.rank + 1.0), to, group=group)
    value = (group.rank - 1) % group.nranks + 1

    def operate():
        dist.recv(out, source, group=group)
        sent.wait()

    def again():
        if not (out == value).all():  # else it came in this moment
            dist.recv(out, source, group=group)
        sent.wait()

    return Operation(operate, lambda: (out == value).all(), again)


def messages(make, group):
    out, (to, source) = make(0.0), neighbours(group)
    works = [
        dist.isend(make(group.rank + 1.0), to, group=group),
        dist.irecv(out, source, group=group),
    ]
    value = (group.rank - 1) % group.nranks + 1
    wait = lambda: [each.wait() for each in works]  # noqa: E731
    return Operation(wait, lambda: (out == value).all(), wait)


OPERATIONS = (
    *(all_reduce, reduce, broadcast, all_gather, alltoall),
    *(asynchronous, objects, recv, messages),
)


def ordinary(nbytes):
    return lambda value: np.full(nbytes // 8, value)


def shared(nbytes):
    def make(value):
        array = dist.empty(nbytes // 8)
        array[:] = value
        return array

    return make


def with_and_without_ways(group, other):
    """Return two groups of the same ranks; MPI does what the second one does on arrays."""
    rules = [TuningRule(each, "ordinary", Algorithm.MPI) for each in TUNED]
    other.transport.use_rules(TuningTable(rules, other.nranks, several_nodes=False))
    return group, other


class Step(NamedTuple):
    """What all ranks do, but for the operation; `delay` is of this rank."""

    group: Any
    make: Callable[[float], Any]
    victim: int
    """Who is hit after `seconds`; -1: nobody."""
    seconds: float
    delay: float
    way: Callable[[], Any]
    words: str


def draw_step(draw, groups):
    """Draw what all ranks do; return it, and this rank's part in it."""
    group, begin, nbytes = draw.choice(groups), draw.choice(OPERATIONS), draw.choice(SIZES)
    make = draw.choice([ordinary, ordinary, shared])(nbytes)
    victim = draw.randrange(-1, group.nranks)
    seconds = draw.choice([1e-5, 1e-4, 1e-3, 5e-3, 0.02])
    delays = [draw.choice([0.0, 0.0, seconds, 2 * seconds, 0.01]) for _ in group.ranks]
    way = draw.choice([nullcontext, nullcontext, switched_off])
    words = (
        f"{begin.__name__} of {nbytes} bytes in group {groups.index(group)}, {way.__name__}, "
        f"{victim} after {seconds}, {delays}"
    )
    step = Step(group, make, victim, seconds, delays[group.rank], way, words)
    return step, begin(make, group)


def ended_by(operate, seconds=0.0):
    """Run an operation; return what it ends with, None for a result.

    Args:
        operate: does it.
        seconds: after which this rank is hit; 0: it is not.

    """
    ended = None
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        operate()
    except (InterruptError, dist.RemoteError, dist.RankFailure) as error:
        ended = error
    except dist.UsageError as error:  # the interrupt came while an object was pickled
        if not seconds:
            raise
        ended = error
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except InterruptError as error:
            ended = ended or error
    while ended is not None and ended.__traceback__ is not None:  # its frames have the arrays
        ended.__traceback__ = ended.__context__ = ended.__cause__ = None
    return ended


def count(group):
    """Return how many operations of a group this rank has begun."""
    return group.transport.context.agreement.begun


def interrupted(draw, groups):
    """Do a step in which a rank may be interrupted; return what is wrong."""
    step, operation = draw_step(draw, groups)
    group, is_victim = step.group, step.victim == step.group.rank
    dist.barrier()
    time.sleep(step.delay)
    with step.way():
        before = count(group)
        ended = ended_by(operation.operate, step.seconds if is_victim else 0.0)
        if is_victim and ended is not None and operation.again is not None:
            ended = operation.again()
        elif is_victim and ended is not None and count(group) == before:
            ended = ended_by(operation.operate)
    wrong = []
    if ended is None and not operation.is_good():
        wrong.append(f"another result of {step.words}")
    if ended is not None and (step.victim < 0 or not (is_victim or ended.in_step)):
        wrong.append(f"{ended!r} in {step.words}")
    del operation
    weights = [] if ended is None else fresh_weights(step)
    told = np.ones(1)
    dist.all_reduce(told, group=group)
    if told[0] != group.nranks:
        wrong.append(f"out of step after {step.words}")
    return wrong + touched(weights, step)


def fresh_weights(step):
    """Take the memory that was lent for other things."""
    gc.collect()
    return [step.make(WEIGHT) for _ in range(3)]


def touched(weights, step):
    return [f"overwritten in {step.words}" for each in weights if (each != WEIGHT).any()]


def mix(seed, group, until):
    """Do steps as long as the first rank wants; return what was wrong.

    Args:
        seed: the same on all ranks.
        group: of all ranks.
        until: whether there is another step, of its number.

    """

    def handle(*_):
        raise InterruptError

    draw, previous = random.Random(seed), signal.signal(signal.SIGALRM, handle)
    wrong, number, goes_on = [], 0, [None]
    groups = with_and_without_ways(group, dist.new_group(timeout=PATIENCE_S))
    try:
        while True:
            goes_on[0] = until(number)
            dist.broadcast_object_list(goes_on, 0)
            if not goes_on[0]:
                return wrong
            wrong += [f"step {number}: {each}" for each in interrupted(draw, groups)]
            number += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        dist.destroy_process_group(groups[1])


def death(draw, world):
    """Do a step in which a rank dies; return the world of those left, and what is wrong.

    Args:
        draw: the same on all ranks.
        world: all that live.

    """
    groups = with_and_without_ways(*(dist.new_group(timeout=PATIENCE_S) for _ in range(2)))
    step, operation = draw_step(draw, groups)
    victim = max(step.victim, 0)
    dist.barrier()
    time.sleep(step.delay)
    is_victim = world.rank == victim
    if is_victim:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, step.seconds)
    with step.way():
        ended = None if is_victim else ended_by(operation.operate)
        if is_victim:
            operation.operate()
            time.sleep(PATIENCE_S)
    wrong = []
    if ended is None and not operation.is_good():
        wrong.append(f"another result of {step.words}")
    if ended is not None and not isinstance(ended, dist.RankFailure):
        wrong.append(f"{ended!r} in {step.words}")
    del operation
    weights = [] if ended is None else fresh_weights(step)
    size = world.nranks
    while ended is None:
        ended = ended_by(dist.barrier)
    world = dist.recover(PATIENCE_S)
    if world.nranks != size - 1 or dist.all_reduced(1) != world.nranks:
        wrong.append(f"other ranks are left after {step.words}")
    return world, wrong + touched(weights, step)
