"""What it costs to be able to go on when a rank dies, while none does: ``python survival.py``.

Three jobs of the same program stand side by side: as usual, under Open MPI's ULFM as ``hpcdist run
--survive`` has it, and without the flight recorder. They take turns, so that whatever else the
machine does meets all of them; each figure is compared with that of the usual job in the same turn,
and the table has the median of these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcdist as dist
from hpcdist.launch.launchers import find_site
from hpcdist.launch.survival import SAFE, Survive
from hpcdist.text import duration

JOBS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "as usual": ((), {}),
    "survives": (Survive().words(), SAFE),
    "no recorder": ((), {"HPCDIST_RECORDER": "off"}),
}
"""By name: flags of mpiexec, and settings."""


def cases(world: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return operations and how often each is done in a turn."""
    small, medium, large = (np.ones(size) for size in (1, 5_000, 500_000))
    shared, received = dist.zeros(500_000), np.empty(100)
    weights = {"w": np.ones(100_000)}
    kept = dist.Memory(weights)

    def ring() -> None:
        works = [
            dist.isend(small, (world.rank + 1) % world.nranks),
            dist.irecv(received[:1], (world.rank - 1) % world.nranks),
        ]
        dist.wait_all(works)

    return {
        "all_reduce, 8 B": (lambda: dist.all_reduce(small), 200),
        "all_reduce, 40 KB": (lambda: dist.all_reduce(medium), 100),
        "all_reduce, 4 MB": (lambda: dist.all_reduce(large), 10),
        "all_reduce, 4 MB shared": (lambda: dist.all_reduce(shared), 10),
        "asynchronous, 8 B": (lambda: dist.all_reduce(small, sync_op=False).wait(), 100),
        "ring of messages": (ring, 100),
        "all_gather_object": (lambda: dist.all_gather_object([], 1), 100),
        "new_group": (lambda: dist.destroy_process_group(dist.new_group([0, 1])), 3),
        "commit of 800 KB": (lambda: kept.commit(1), 5),
    }


def work() -> None:
    """Measure whenever this job has its turn; on each rank."""
    world = dist.init_parallel_env()
    operations = cases(world)
    while True:
        turn = [sys.stdin.readline().strip() if world.rank == 0 else ""]
        dist.broadcast_object_list(turn, 0)
        if turn[0] != "go":
            return
        found = {}
        for name, (operate, count) in operations.items():
            operate()
            dist.barrier()
            seconds = []
            for _ in range(count):
                began = time.perf_counter()
                operate()
                seconds.append(time.perf_counter() - began)
            found[name] = statistics.median(seconds)
        if world.rank == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


def start(name: str) -> subprocess.Popen[str]:
    flags, settings = JOBS[name]
    return subprocess.Popen(
        [
            *(find_site(os.environ).mpiexec or "mpiexec", *flags, "--oversubscribe", "-n", "2"),
            *(sys.executable, __file__, "--job"),
        ],
        env={**os.environ, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def take_turn(job: subprocess.Popen[str]) -> dict[str, float]:
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write("go\n")
    job.stdin.flush()
    while not (line := job.stdout.readline()).startswith("{"):
        pass
    found: dict[str, float] = json.loads(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--job", action="store_true", help="be a rank of one of the jobs")
    options = parser.parse_args()
    if options.job:
        work()
        return
    jobs = {name: start(name) for name in JOBS}
    turns = []
    for number in range(options.turns + 1):
        names = [*JOBS] if number % 2 else [*JOBS][::-1]
        turns.append({name: take_turn(jobs[name]) for name in names})
    for job in jobs.values():
        job.communicate("end\n")
    usual, *others = JOBS
    sys.stdout.write(f"| {usual} | | {' | '.join(others)} |\n|---|---|{'---|' * len(others)}\n")
    for case in turns[0][usual]:
        median = statistics.median(turn[usual][case] for turn in turns[1:])
        ratios = [
            statistics.median(turn[name][case] / turn[usual][case] for turn in turns[1:])
            for name in others
        ]
        row = " | ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
        sys.stdout.write(f"| {case} | {duration(median)} | {row} |\n")


if __name__ == "__main__":
    main()
