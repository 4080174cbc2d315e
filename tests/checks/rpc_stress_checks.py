"""Everything at once: calls of all kinds and sizes, from several threads of every rank, and errors.

Each answer is compared with what is right, each object counts what it was told, and at the end the
ranks compare how many calls were made with how many were run: none is lost, and none doubled.
"""

import contextlib
import random
import threading
import time

import numpy as np
from checks import everyone

import hpcdist as dist
from hpcdist.comm.session import simulated_rank, standing_for
from hpcdist.rpc.agent import require_agent

THREADS = 4
PATIENCE_S = 100
SIZES = (0, 1, 100, 3_000, 70_000, 400_000)
"""Numbers of elements: in the pickle, beside it, and in memory that is passed."""


class Tally:
    """Counts what it is told, and by whom."""

    def __init__(self):
        self.total, self.last = 0, {}

    def add(self, n, caller, turn):
        self.total += n
        in_order = self.last.get(caller, -1) < turn
        self.last[caller] = turn
        return in_order

    @dist.rpc.inline
    def now(self):
        return self.total


class Misfit(Exception):
    def __init__(self, code, *, array=None):
        super().__init__(code)
        self.code, self.array = code, array


def double(array):
    array *= 2  # it is this rank's own
    return array


def relay(path, array):
    """Hand an array on along ranks, and back."""
    if not path:
        return array + 1
    return dist.rpc.rpc_sync(path[0], relay, (path[1:], array)) + 1


def misfit(code, size):
    raise Misfit(code, array=np.full(size, code))


def add_by_handle(handle, n, caller, turn):
    return handle.add(n, caller, turn)


@dist.rpc.inline
def negative(x):
    return -x


def nap(x):
    time.sleep(0.002)
    return x


class Caller:
    """One thread's calls."""

    def __init__(self, seed, tallies, executor, problems):
        self.random = random.Random(seed)
        self.name = seed
        self.tallies, self.executor, self.problems = tallies, executor, problems
        self.told = [0] * len(tallies)
        self.ranks = range(len(tallies))
        self.waiting = []

    def run(self, rank, turns):
        kinds = [getattr(self, name) for name in dir(self) if name.startswith("call_")]
        try:
            with standing_for(rank):
                for turn in range(turns):
                    self.random.choice(kinds)(turn)
                    if len(self.waiting) > 8:
                        self.take_one()
                while self.waiting:
                    self.take_one()
        except BaseException as error:
            self.problems.append(repr(error))

    def take_one(self):
        future, right = self.waiting.pop(self.random.randrange(len(self.waiting)))
        self.check(future.result(PATIENCE_S), right)

    def check(self, found, right):
        if not np.array_equal(found, right):
            self.problems.append(f"{self.name}: {found!r} instead of {right!r}")

    def to(self):
        return self.random.choice(self.ranks)

    def array(self):
        return np.full(self.random.choice(SIZES), self.random.randrange(1000))

    def call_sync(self, _):
        array = self.array()
        self.check(dist.rpc.rpc_sync(self.to(), double, (array,)), 2 * array)

    def call_async(self, _):
        array = self.array()
        self.waiting.append((dist.rpc.rpc_async(self.to(), double, (array,)), 2 * array))
        array[:] = -1  # it has left

    def call_in_turn(self, _):
        path = [self.to() for _ in range(self.random.randrange(5))]
        array = self.array()
        self.check(relay(path, array), array + len(path) + 1)

    def call_wrong(self, turn):
        size = self.random.choice(SIZES[:4])
        try:
            dist.rpc.rpc_sync(self.to(), misfit, (turn, size))
        except Misfit as error:
            self.check(error.array, np.full(size, turn))
            self.check(isinstance(error, dist.RemoteError), True)
        else:
            self.problems.append("no error came back")

    def call_inline(self, turn):
        self.waiting.append((dist.rpc.rpc_async(self.to(), negative, (turn,)), -turn))

    def call_closure(self, turn):
        self.check(dist.rpc.rpc_sync(self.to(), lambda x: x + turn, (1,)), turn + 1)

    def call_object(self, turn):
        to = self.to()
        self.told[to] += turn
        self.check(self.tallies[to].add(turn, self.name, turn), True)

    def call_object_async(self, turn):
        to = self.to()
        self.told[to] += turn
        future = self.tallies[to].add.rpc_async(turn, self.name, turn)
        self.waiting.append((future, True))

    def call_by_handle(self, turn):
        to, through = self.to(), self.to()
        self.told[to] += turn
        name = f"{self.name} through {through}, {turn}"
        args = self.tallies[to], turn, name, turn
        self.check(dist.rpc.rpc_sync(through, add_by_handle, args), True)

    def call_executor(self, turn):
        self.waiting.append((self.executor.submit(negative, turn), -turn))

    def call_too_short(self, turn):
        with contextlib.suppress(dist.CollectiveTimeout):
            self.check(dist.rpc.rpc_sync(self.to(), nap, (turn,), timeout=0.001), turn)


def everything_at_once(turns=60):
    """Make calls from all threads of all ranks; compare what has come of them."""
    dist.init_parallel_env()
    dist.rpc.init_rpc(threads=2, max_threads=4)
    try:
        _stress(turns)
    finally:
        dist.rpc.shutdown()


def _stress(turns):
    me, size = dist.get_rank(), dist.get_world_size()
    tallies = []
    dist.all_gather_object(tallies, dist.rpc.remote((me + 1) % size, Tally))
    tallies = tallies[-1:] + tallies[:-1]  # each at the place of its rank
    problems, rank = [], simulated_rank()
    with dist.rpc.Executor(include_self=True, tasks_per_rank=2) as executor:
        callers = [Caller(1000 * me + n, tallies, executor, problems) for n in range(THREADS)]
        threads = [threading.Thread(target=each.run, args=(rank, turns)) for each in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    dist.barrier()
    told = everyone([sum(each.told[at] for each in callers) for at in range(size)])
    for at, tally in enumerate(tallies):
        assert tally.now() == sum(each[at] for each in told)
    dist.barrier()
    _compare_counts()


def _compare_counts():
    """Make sure that what was called has been run, once."""
    names = ("double", "relay", "misfit", "negative", "add_by_handle")
    names = [*(f"rpc_stress_checks.{name}" for name in names), "Tally.add"]
    end = time.monotonic() + PATIENCE_S
    while True:  # what was given up may still run
        stats = dist.rpc.stats()
        mine = [
            [stats.get(name, {}).get(what, 0) for name in names] for what in ("calls", "served")
        ]
        calls, served = np.sum(everyone(mine), axis=0)
        late = everyone(time.monotonic() > end)
        if (calls == served).all() or any(late):
            break
    assert dict(zip(names, calls, strict=True)) == dict(zip(names, served, strict=True))
    assert not require_agent()._pending
