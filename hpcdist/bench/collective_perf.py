"""`collective_perf`: Paddle's quick measurement; ``hpcdist bench`` is the thorough one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcdist.bench.libraries.hpcdist import start_own
from hpcdist.bench.memory_kinds import MEMORIES
from hpcdist.bench.task import make_task
from hpcdist.comm.collectives import barrier
from hpcdist.comm.reduced import all_reduced
from hpcdist.comm.session import require_session
from hpcdist.comm.states import verifying
from hpcdist.errors import UsageError
from hpcdist.fleet.job import current_fleet
from hpcdist.integers import integer
from hpcdist.parallel.vocabulary import known
from hpcdist.text import bandwidth, duration, volume
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.flight.call_site import outer_frame

_CASES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}
"""Paddle's names, and those of `bench.cases`."""

_SIZES = [1 << shift for shift in range(20, 31)]
NO_LIMITS: Mapping[int, float] = MappingProxyType({})


def collective_perf(
    comm_type: str, round: int = 50, size_and_time: Mapping[int, float] = NO_LIMITS
) -> None:
    """Measure a collective of the workers and print what one call takes. Collective.

    Args:
        comm_type: "allreduce", "broadcast", "reduce", "allgather" or "reduce_scatter".
        round: how many calls are timed together.
        size_and_time: sizes in bytes of what a rank hands in, each with the seconds beyond which a
            warning is given; 1 MiB to 1 GiB without limits if empty.

    Raises:
        UsageError: an argument is wrong.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.fleet.init()
        >>> limits = {1024: 1.0}  # bytes: seconds
        >>> dist.fleet.collective_perf("allreduce", 2, limits)  # doctest: +ELLIPSIS
        allreduce of 1 KiB on 1 ranks: ...

    """
    group = current_fleet("collective_perf").grid.group
    with verifying(group, "setting") as alike:
        case = _CASES[known(comm_type, _CASES, "there is no collective")]
        rounds, limits = integer(round, "round", 1), _limits(size_and_time)
        alike += [(f"{comm_type} of {size} bytes, {rounds} times", (), "") for size in limits]
    memory = MEMORIES["ordinary" if require_session().whereabouts.gpu is None else "cuda"]
    name = next(each for each, kind in MEMORIES.items() if kind is memory)
    wait = memory.waiter() or (lambda: None)
    make = start_own(group).calls[case]
    for nbytes, limit_s in limits.items():
        call = make(make_task(case, group, nbytes, np.dtype(np.float32), name, "SUM"))
        call()
        wait()
        barrier(group)
        begin = time.perf_counter()
        for _ in range(rounds):
            call()
        wait()
        taken: float = all_reduced((time.perf_counter() - begin) / rounds, ReduceOp.MAX, group)
        told = f"{comm_type} of {volume(nbytes)} on {group.nranks} ranks: {duration(taken)}"
        if group.rank == 0:
            print(f"{told}, {bandwidth(nbytes / taken)}", flush=True)
        if taken > limit_s:
            warnings.warn(
                f"{told}, which is longer than {duration(limit_s)}", stacklevel=outer_frame()[1]
            )


def allreduce_perf(round: int = 50, size_and_time: Mapping[int, float] = NO_LIMITS) -> None:
    """Measure all_reduce; see `collective_perf`."""
    collective_perf("allreduce", round, size_and_time)


def reduce_perf(round: int = 50, size_and_time: Mapping[int, float] = NO_LIMITS) -> None:
    """Measure reduce; see `collective_perf`."""
    collective_perf("reduce", round, size_and_time)


def broadcast_perf(round: int = 50, size_and_time: Mapping[int, float] = NO_LIMITS) -> None:
    """Measure broadcast; see `collective_perf`."""
    collective_perf("broadcast", round, size_and_time)


def allgather_perf(round: int = 50, size_and_time: Mapping[int, float] = NO_LIMITS) -> None:
    """Measure all_gather; see `collective_perf`."""
    collective_perf("allgather", round, size_and_time)


def reduce_scatter_perf(round: int = 50, size_and_time: Mapping[int, float] = NO_LIMITS) -> None:
    """Measure reduce_scatter; see `collective_perf`."""
    collective_perf("reduce_scatter", round, size_and_time)


def _limits(given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise UsageError(
            f"size_and_time must be a dictionary such as {{1 << 20: 0.01}}, got {given!r}"
        )
    if not given:
        return dict.fromkeys(_SIZES, float("inf"))
    for limit in given.values():
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise UsageError(f"a limit is a positive number of seconds, got {limit!r}")
    return {integer(size, "a size", 1): float(limit) for size, limit in given.items()}
