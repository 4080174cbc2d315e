"""What one rank of a job takes: ``mpiexec -n N python grow.py {mpi4py,hpcdist} FILE BEGAN ROUNDS``.

Every rank writes down, step by step, when it got there and what it holds; at the end rank 0
gathers all of it by MPI alone and writes it to FILE. BEGAN is when mpiexec was called.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

GROUPS = 50
REST_S = 0.01
Found = dict[str, float]
Make = Callable[[list[int]], Callable[[], Any]]


class Diary:
    """What this rank has measured, by name; seconds end in "_s"."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.found: Found = {}

    def reached(self, step: str) -> None:
        self.found[f"{step}_s"] = time.time() - self._began
        self.found[f"{step}_cpu"] = time.process_time()
        self.found |= {f"{step}_{kind}": nbytes for kind, nbytes in memory().items()}
        self.found[f"{step}_files"] = len(os.listdir("/proc/self/fd"))

    def timed(self, name: str, do: Callable[[], Any]) -> Any:
        began = perf_counter()
        done = do()
        self.found[f"{name}_s"] = perf_counter() - began
        return done

    def repeated(self, name: str, comm: Any, do: Callable[[], Any], rounds: int) -> list[Any]:
        """Write down the median of calls that begin together; return what they return."""
        taken, made = [], []
        for _ in range(rounds):
            wait_for_all(comm, resting=do is idle)
            began = perf_counter()
            made.append(do())
            taken.append(perf_counter() - began)
        self.found[f"{name}_s"] = sorted(taken)[rounds // 2]
        return made


def idle() -> None:
    """Be what a rank does that takes no part; it must not take the others' cores, either."""


def wait_for_all(comm: Any, *, resting: bool) -> None:
    """Wait until every rank is here; one that rests sleeps until they are."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(REST_S) if resting else os.sched_yield()  # not `sleep(0)`: that takes 50 us


def memory() -> dict[str, int]:
    """Return bytes: what only this process holds, and that and its part of what it shares."""
    told = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        told[name.rstrip(":")] = 1024 * int(size)
    return {"uss": told["Private_Clean"] + told["Private_Dirty"], "pss": told["Pss"]}


def measure_groups(diary: Diary, comm: Any, make: Make, rounds: int) -> None:
    """Weigh and time groups of all ranks, of pairs and of 8; `make` returns what frees one."""
    pair = [comm.rank & ~1, (comm.rank & ~1) + 1]
    eight = list(range(min(8, comm.size)))
    members = {"all": list(range(comm.size)), "pair": pair, "eight": eight}
    kept: list[Any] = [make(pair) for _ in range(GROUPS)]  # these fill what memory is left over
    for name in ("all", "pair"):
        before = memory()
        kept += [make(members[name]) for _ in range(GROUPS)]
        for kind, nbytes in memory().items():
            diary.found[f"{name}_{kind}"] = (nbytes - before[kind]) / GROUPS
    for name, ranks in members.items():
        if comm.rank in ranks:
            kept += diary.repeated(name, comm, lambda ranks=ranks: make(ranks), rounds)
        else:
            diary.repeated(name, comm, idle, rounds)
    wait_for_all(comm, resting=True)
    for free in kept:
        free()


def first_mpi4py(diary: Diary, rounds: int) -> Any:
    import numpy as np

    diary.reached("numpy")
    from mpi4py import MPI

    diary.reached("mpi")
    world, x = MPI.COMM_WORLD, np.ones(1)
    diary.reached("init")
    world.Allreduce(MPI.IN_PLACE, x)
    diary.reached("first")
    diary.repeated("barrier", world, world.Barrier, 5 * rounds)
    diary.repeated("dup", world, lambda: world.Dup().Free(), rounds)

    def make(ranks: list[int]) -> Callable[[], Any]:
        mine = world.Get_group()
        theirs = mine.Incl(ranks)
        comm = world.Create_group(theirs)
        theirs.Free()
        mine.Free()
        return comm.Free

    measure_groups(diary, world, make, rounds)
    return world


def first_hpcdist(diary: Diary, rounds: int) -> Any:
    import numpy as np

    diary.reached("numpy")
    dist = diary.timed("import", lambda: importlib.import_module("hpcdist"))
    diary.reached("import_hpcdist")
    from mpi4py import MPI

    diary.reached("mpi")
    dist.init_parallel_env()
    diary.reached("init")
    dist.all_reduce(np.ones(1))
    diary.reached("first")
    world = MPI.COMM_WORLD
    diary.repeated("barrier", world, dist.barrier, 5 * rounds)

    def make(ranks: list[int]) -> Callable[[], Any]:
        group = dist.new_group(ranks)
        return lambda: dist.destroy_process_group(group)

    measure_groups(diary, world, make, rounds)
    return world


def summary(told: list[Found]) -> Found:
    """Give the seconds of the slowest rank, and what the largest rank holds."""
    return {name: max(each[name] for each in told) for name in told[0]}


def main(who: str, path: str, began: str, rounds: str) -> None:
    diary = Diary(float(began))
    diary.reached("python")
    measure = {"mpi4py": first_mpi4py, "hpcdist": first_hpcdist}[who]
    told = measure(diary, int(rounds)).gather(diary.found)
    if told is not None:
        Path(path).write_text(json.dumps(summary(told)))


if __name__ == "__main__":
    main(*sys.argv[1:])
