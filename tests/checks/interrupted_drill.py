"""A drill: a rank leaves an operation by what its signal handler raises, and then uses its memory.

The first rank is interrupted once it waits. What it had lent is freed, and the memory is filled
with weights; only then do the other ranks come. The weights stay as they are, everyone who has to
hear of it does, and the group goes on.
"""

import gc
import signal
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from interrupted_at import InterruptError
from mpi4py import MPI

import hpcdist as dist

TAG = 4712
SIZES = {"small": 8 << 10, "60kB": 60_000, "100kB": 100_000, "1MB": 1 << 20, "16MB": 16 << 20}
WEIGHT = 7.0


def runs(*names):
    """Return what says whether a thread runs a function of one of these names."""

    def found(thread):
        frame = sys._current_frames()[thread]
        while frame is not None and frame.f_code.co_name not in names:
            frame = frame.f_back
        return frame is not None

    return found


is_waiting = runs("_poll", "_await_end")


@contextmanager
def interrupts(waits=is_waiting, then=lambda: None):
    """Interrupt this thread in the block once it waits, and call `then`.

    What comes where Python keeps exceptions to itself, as in what it calls back when it collects
    garbage, comes again.
    """

    def interrupt():
        while not stop.wait(1e-3):
            if lost.is_set() and waits(main):
                lost.clear()
                signal.pthread_kill(main, signal.SIGUSR1)
                then()

    def handle(*_):
        raise InterruptError

    def keep(unraisable):
        if issubclass(unraisable.exc_type, InterruptError):
            lost.set()
        else:
            kept(unraisable)

    main, stop, lost = threading.get_ident(), threading.Event(), threading.Event()
    lost.set()
    previous = signal.signal(signal.SIGUSR1, handle)
    kept, sys.unraisablehook = sys.unraisablehook, keep
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(InterruptError):
            yield
    finally:
        stop.set()
        thread.join()
        sys.unraisablehook = kept
        signal.signal(signal.SIGUSR1, previous)


def tell(size, first=1):
    for each in range(first, size):
        MPI.COMM_WORLD.send(None, each, TAG)


def await_first():
    MPI.COMM_WORLD.recv(source=0, tag=TAG)


def ordinary(nbytes, value):
    return np.full(max(nbytes // 8, 1), value)


def shared(nbytes, value):
    array = dist.empty(max(nbytes // 8, 1))
    array[:] = value
    return array


def tensor(nbytes, value):
    torch = pytest.importorskip("torch")
    return torch.full((max(nbytes // 8, 1),), value, dtype=torch.float64)


MAKERS = [ordinary, shared, tensor]


def blocks(make, nbytes, value):
    """As many bytes as there are, cut into one block for each rank."""
    size = MPI.COMM_WORLD.size
    return make(max(nbytes // 8 // size, 1) * 8 * size, value)


def block(make, nbytes, value):
    return make(max(nbytes // 8 // MPI.COMM_WORLD.size, 1) * 8, value)


def all_reduce(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.all_reduce(x, group=group)


def reduce(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.reduce(x, 0, group=group)


def broadcast(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.broadcast(x, 0, group=group)


def broadcast_to_it(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.broadcast(x, group.nranks - 1, group=group)


def all_gather(make, nbytes, value):
    x, out = block(make, nbytes, value), blocks(make, nbytes, value)
    return lambda group: dist.all_gather(out, x, group=group)


def gather(make, nbytes, value):
    x, out = block(make, nbytes, value), blocks(make, nbytes, value)
    return lambda group: dist.gather(x, out if group.rank == 0 else None, 0, group=group)


def scatter(make, nbytes, value):
    x, out = blocks(make, nbytes, value), block(make, nbytes, value)
    return lambda group: dist.scatter(out, x if group.rank == 0 else None, 0, group=group)


def reduce_scatter(make, nbytes, value):
    x, out = blocks(make, nbytes, value), block(make, nbytes, value)
    return lambda group: dist.reduce_scatter(out, x, group=group)


def alltoall_single(make, nbytes, value):
    x, out = blocks(make, nbytes, value), blocks(make, nbytes, value)
    return lambda group: dist.alltoall_single(out, x, group=group)


def alltoall(make, nbytes, value):
    size = MPI.COMM_WORLD.size
    x, out = ([block(make, nbytes, value) for _ in range(size)] for _ in range(2))
    return lambda group: dist.alltoall(out, x, group=group)


def scan(make, nbytes, value):
    x = make(nbytes, value)
    return lambda group: dist.scan(x, group=group)


OPERATIONS = [
    all_reduce,
    reduce,
    broadcast,
    broadcast_to_it,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    alltoall_single,
    alltoall,
    scan,
]


def ends(operate, group, may_go_on):
    """Whether an operation that another rank has left ends as it may; it says so in either case."""
    try:
        operate(group)
    except dist.RemoteError as error:
        return error.in_step and error.rank == 0
    return may_go_on


def drill(group, operation, make, nbytes, goes_on=False):
    """Interrupt the first rank in an operation; see the module. `goes_on`: so do the others."""
    rank, size = group.rank, group.nranks
    goes_on = goes_on or nbytes <= SIZES["small"]
    operate = operation(make, nbytes, 1.0)
    weights, wrong = [], []
    if rank == 0:
        with interrupts():
            operate(group)
        del operate
        gc.collect()
        weights = [make(nbytes, WEIGHT) for _ in range(4)]
        tell(size)
    else:
        await_first()
        if not ends(operate, group, goes_on):
            wrong.append("what the others heard")
    dist.barrier(group)
    wrong += [i for i, each in enumerate(weights) if (each != WEIGHT).any()]
    for nbytes_after in (8, nbytes):
        x = ordinary(nbytes_after, rank + 1.0)
        dist.all_reduce(x, group=group)
        if (x != size * (size + 1) / 2).any():
            wrong.append(f"all_reduce of {nbytes_after} bytes afterwards")
    return wrong
