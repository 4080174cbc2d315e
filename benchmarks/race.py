"""`Race`: several ways to do the same thing, timed side by side.

Every contestant runs once in every round, and the order rotates, so that whatever else the
machine does hits all of them alike. A sample is many calls after a barrier on the raw
communicator; its time is that of the slowest rank. Compare by `ratio` and `added`, which are
medians over the rounds of what the two took in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

Contestants = Mapping[str, Callable[[], Any]]


class Race(NamedTuple):
    """`seconds[name][i]` is what one call took in round i."""

    seconds: dict[str, np.ndarray]

    def median(self, name: str) -> float:
        return float(np.median(self.seconds[name]))

    def best(self, name: str) -> float:
        """What the fastest round took: the least disturbed one."""
        return float(self.seconds[name].min())

    def ratio(self, name: str, to: str) -> float:
        """How many times as long as `to` the contestant `name` takes."""
        return float(np.median(self.seconds[name] / self.seconds[to]))

    def added(self, name: str, to: str) -> float:
        """How many seconds longer than `to` the contestant `name` takes."""
        return float(np.median(self.seconds[name] - self.seconds[to]))

    def __contains__(self, name: object) -> bool:
        return name in self.seconds


def race(
    comm: MPI.Intracomm, contestants: Contestants, *, rounds: int, sample_s: float = 4e-3
) -> Race:
    """Time the contestants. Collective; every rank gets the same numbers.

    Args:
        comm: a communicator that nobody else uses during the race.
        contestants: what to call, by name; each is called equally often on all ranks.
        rounds: samples per contestant.
        sample_s: how long one sample should take; a call that takes longer is made once.
    """
    names = list(contestants)
    calls = {name: _calls_per_sample(comm, contestants[name], sample_s) for name in names}
    taken = np.empty((rounds, len(names)))
    for number in range(rounds):
        for step in range(len(names)):
            lane = (number + step) % len(names)
            name = names[lane]
            taken[number, lane] = _sample(comm, contestants[name], calls[name])
    comm.Allreduce(MPI.IN_PLACE, taken, MPI.MAX)
    return Race({name: taken[:, lane] for lane, name in enumerate(names)})


def _calls_per_sample(comm: MPI.Intracomm, call: Callable[[], Any], sample_s: float) -> int:
    """Warm up, and say how many calls fill a sample; the same number on every rank."""
    calls = 1
    _sample(comm, call, 1)
    while True:
        each = comm.allreduce(_sample(comm, call, calls), MPI.MAX)
        if each * calls * 4 >= sample_s:
            return max(1, int(sample_s / each))
        calls *= 4


def _sample(comm: MPI.Intracomm, call: Callable[[], Any], calls: int) -> float:
    turns = range(calls)
    comm.Barrier()
    began = perf_counter()
    for _ in turns:
        call()
    return (perf_counter() - began) / calls
