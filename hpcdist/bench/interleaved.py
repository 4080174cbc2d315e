"""`Interleaved`: several ways to do the same thing, timed side by side.

Every candidate runs once in every round, and the order rotates, so that whatever else the
machine does hits all of them alike. A sample is many calls after a barrier on the raw
communicator; its time is that of the slowest rank. Calls that only tell a device what to do are
put on its stream one after the other, and waited for once, at the end of the sample. Compare by
`ratio` and `added`, which are medians over the rounds of what the two took in the same round.

The communicator is an mpi4py one that is passed in; nothing here imports mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.named_tuple import NamedTuple

Call = Callable[[], Any]
Candidates = Mapping[str, Call]
Times = npt.NDArray[np.float64]

_BLOCK = 25
"""Calls that are timed one by one before the next candidate's turn."""


def idle() -> None:
    """No-op: the candidate of a rank that takes no part; its time does not count."""


class Interleaved(NamedTuple):
    """What each candidate took, by its name.

    Attributes:
        seconds: what one call took on the slowest rank, by round.
        by_rank: the same for each rank, of shape (ranks, rounds); NaN for idle ranks.
        samples: `seconds`, and what calls timed one by one took on the slowest rank.

    """

    seconds: dict[str, Times]
    by_rank: dict[str, Times]
    samples: dict[str, Times]

    def median(self, name: str) -> float:
        """Return what a call took in the median round."""
        return float(np.median(self.seconds[name]))

    def best(self, name: str) -> float:
        """Return what the fastest round took: the least disturbed one."""
        return float(self.seconds[name].min())

    def ratio(self, name: str, to: str) -> float:
        """Return how many times as long as `to` the candidate `name` takes."""
        return float(np.median(self.seconds[name] / self.seconds[to]))

    def added(self, name: str, to: str) -> float:
        """Return how many seconds longer than `to` the candidate `name` takes."""
        return float(np.median(self.seconds[name] - self.seconds[to]))

    def straggler(self, name: str) -> float:
        """Return how many times as long as the median rank the slowest takes, median of rounds."""
        ranks = self.by_rank[name]
        return float(np.median(np.nanmax(ranks, axis=0) / np.nanmedian(ranks, axis=0)))


def interleave(
    comm: Any,
    candidates: Candidates,
    *,
    rounds: int,
    sample_s: float = 4e-3,
    single: int = 0,
    single_s: float = 0.2,
    wait: Call | None = None,
) -> Interleaved:
    """Time the candidates. Collective; every rank gets the same numbers.

    Args:
        comm: an mpi4py communicator that nobody else uses meanwhile.
        candidates: what to call, by name; each is called equally often on all ranks. `idle` where
            a rank takes no part.
        rounds: samples per candidate.
        sample_s: how long one sample should take; a call that takes longer is made once.
        single: how many calls to time one by one besides, for percentiles.
        single_s: the longest time for these, per candidate.
        wait: blocks until all that was called has ended; for calls that return earlier.

    """
    names = list(candidates)
    calls = {name: _calls_per_sample(comm, candidates[name], sample_s, wait) for name in names}
    taken = np.empty((rounds, len(names)))
    for number in range(rounds):
        for step in range(len(names)):
            column = (number + step) % len(names)
            name = names[column]
            taken[number, column] = _sample(comm, candidates[name], calls[name], wait)
    ranks = _from_all_ranks(comm, taken)
    slowest = np.nanmax(ranks, axis=0)
    seconds = {name: slowest[:, column] for column, name in enumerate(names)}
    budget = {name: int(single_s / np.median(each)) for name, each in seconds.items()}
    wanted = {name: min(single, budget[name]) for name in names}
    more = _time_single_calls(comm, candidates, wanted, wait)
    samples = {name: np.concatenate([seconds[name], more[name]]) for name in names}
    by_rank = {name: ranks[:, :, column] for column, name in enumerate(names)}
    return Interleaved(seconds, by_rank, samples)


def _calls_per_sample(comm: Any, call: Call, sample_s: float, wait: Call | None) -> int:
    """Warm up, and say how many calls fill a sample; the same number on every rank."""
    calls = 1
    _sample(comm, call, 1, wait)
    while True:
        own = np.array([min(_sample(comm, call, calls, wait) for _ in range(3))])
        each = float(np.nanmax(_from_all_ranks(comm, own)))
        if each * calls * 4 >= sample_s:
            return max(1, int(sample_s / each))
        calls *= 4


def _sample(comm: Any, call: Call, calls: int, wait: Call | None) -> float:
    turns = range(calls)
    comm.Barrier()
    if call is idle:
        return float("nan")
    began = perf_counter()
    for _ in turns:
        call()
    if wait is not None:
        wait()
    return (perf_counter() - began) / calls


def _time_single_calls(
    comm: Any, candidates: Candidates, wanted: Mapping[str, int], wait: Call | None
) -> dict[str, Times]:
    """Time calls one by one, in blocks that take turns."""
    found: dict[str, list[Times]] = {name: [] for name in candidates}
    for first in range(0, max(wanted.values(), default=0), _BLOCK):
        for name, call in candidates.items():
            number = min(_BLOCK, wanted[name] - first)
            if number > 0:
                found[name].append(_single_calls(comm, call, number, wait))
    return {
        name: np.nanmax(_from_all_ranks(comm, np.concatenate(blocks)), axis=0)
        if blocks
        else np.empty(0)
        for name, blocks in found.items()
    }


def _single_calls(comm: Any, call: Call, number: int, wait: Call | None) -> Times:
    marks = np.full(number + 1, np.nan)
    comm.Barrier()
    if call is idle:
        return marks[1:]
    marks[0] = perf_counter()
    for turn in range(number):
        call()
        if wait is not None:
            wait()
        marks[turn + 1] = perf_counter()
    return np.diff(marks)


def _from_all_ranks(comm: Any, own: Times) -> Times:
    """Return every rank's array of float64, along a new first axis."""
    everyone = np.empty((comm.size, *own.shape))
    comm.Allgather(np.ascontiguousarray(own), everyone)
    return everyone
