"""What the flight recorder adds to an operation: ``python recorder.py``.

The least of many runs, for whatever else the machine does only adds to them. "called from a
program" is a small operation of a world of one rank, with the recorder and without it, in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from timeit import repeat
from typing import Any

import numpy as np
from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import interleave
from hpcdist.comm import describe
from hpcdist.comm.session import resolve_group
from hpcdist.text import duration, times
from hpcdist.transport.flight import recorder
from hpcdist.transport.flight.call_site import call_site

AIM_S = 150e-9
"""What a begin and an end may take together: the aim, not a test."""
CALLS = 10_000


def in_a_row(step: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            step()

    return run


def record_in_a_row(call: Any, group: int) -> None:
    begin, end = recorder.begin, recorder.end
    for _ in range(CALLS):
        end(begin(call, group, 1, 0))


def note_in_a_row(group: int) -> None:
    note, end = recorder.note, recorder.end
    for _ in range(CALLS):
        end(note(0, group, 1, 0, 0, 0))


def least_s(run: Callable[[], Any], rounds: int) -> float:
    return min(repeat(run, number=1, repeat=rounds)) / CALLS


def reduced(group: Any, flight: int, x: Any) -> None:
    group.flight = flight
    dist.all_reduce(x)


def main() -> None:
    options = read_options(__doc__, rounds=101)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("recorder", options, comm)
    group, x = resolve_group(None), np.zeros(1)
    call: Any = describe.all_reduce(group, x, dist.ReduceOp.SUM)
    loop = least_s(in_a_row(int), options.rounds)
    steps = {
        "begin and end of an all_reduce": partial(record_in_a_row, call, group.flight),
        "begin and end of what is no call": partial(note_in_a_row, group.flight),
        "the call site, for a message": in_a_row(call_site),
    }
    rows = [
        {"step": step, "time": least_s(run, options.rounds), "aim": AIM_S}
        for step, run in steps.items()
    ]
    rows.append({"step": "an empty call, for comparison", "time": loop, "aim": None})
    report.table("Parts", {"step": str, "time": duration, "aim": duration}, rows)

    ways = {"with": group.flight, "without": 0}
    candidates = {name: partial(reduced, group, flight, x) for name, flight in ways.items()}
    found = interleave(comm, candidates, rounds=options.rounds)
    report.table(
        "all_reduce of 8 bytes, called from a program",
        {"recorder": str, "time": duration, "ratio": times},
        [
            {"recorder": name, "time": found.median(name), "ratio": found.ratio(name, to="without")}
            for name in ways
        ],
    )
    report.close()


if __name__ == "__main__":
    main()
