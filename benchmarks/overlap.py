"""How much of an all_reduce is hidden behind computing: ``mpiexec -n 2 python overlap.py``.

Start it, compute for about 1.5 times as long as it takes alone, wait for it. Hidden is what is
saved of the time the two take one after the other, as a share of the all_reduce alone: 100 %
would be free communication, 0 % is no gain, less is a loss. Moving data needs a core, too, so
with one core per rank only the sleeper can come near 100 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gloo import start_gloo, stop_gloo, tensor_of
from mpi4py import MPI
from race import Race, race
from report import Report, Row, duration, percent, read_options, volume

import hpcdist as dist

SIZES = 256 << 10, 2 << 20, 16 << 20, 64 << 20
QUICK_SIZES = (4 << 20,)
COMPUTE_SHARE = 1.5


class Way(NamedTuple):
    """The all_reduce of one library: all of it, and its beginning, whose result is waited for."""

    run: Callable[[], Any]
    start: Callable[[], Any]


def ways(comm: MPI.Intracomm, x: np.ndarray, gloo: Any) -> dict[str, Way]:
    found = {
        "hpcdist": Way(partial(dist.all_reduce, x), partial(dist.all_reduce, x, sync_op=False)),
        "mpi4py": Way(
            partial(comm.Allreduce, MPI.IN_PLACE, x),
            lambda: _Request(comm.Iallreduce(MPI.IN_PLACE, x)),
        ),
    }
    if gloo is not None:
        tensor = tensor_of(x)
        found["gloo"] = Way(
            partial(gloo.all_reduce, tensor), partial(gloo.all_reduce, tensor, async_op=True)
        )
    return found


class _Request:
    """Gives an MPI request the method name of the others."""

    def __init__(self, request: MPI.Request) -> None:
        self.wait = request.Wait


def sleeper(_: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """Leave the core alone, as a GPU kernel would."""
    return partial(time.sleep, seconds)


def numpy_work(comm: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """Keep the core busy without the interpreter's lock, in calls of about 50 us."""
    block = np.linspace(1.0, 2.0, 1 << 15)
    return _repeated(comm, partial(np.sqrt, block, out=block), seconds)


def python_work(comm: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """Keep the core busy under the interpreter's lock."""
    return _repeated(comm, lambda: sum(range(2000)), seconds)


def _repeated(comm: MPI.Intracomm, step: Callable[[], Any], seconds: float) -> Callable[[], None]:
    alone = race(comm, {"step": step}, rounds=5).median("step")
    turns = range(max(1, round(seconds / alone)))

    def compute() -> None:
        for _ in turns:
            step()

    return compute


COMPUTING = {"sleep": sleeper, "NumPy": numpy_work, "Python": python_work}


def both(way: Way, compute: Callable[[], None]) -> Callable[[], None]:
    def start_compute_wait() -> None:
        work = way.start()
        compute()
        work.wait()

    return start_compute_wait


def overlap_row(comm: MPI.Intracomm, nbytes: int, kind: str, gloo: Any, rounds: int) -> Row:
    x = np.zeros(nbytes // 4, np.float32)
    x.fill(0)
    found_ways = ways(comm, x, gloo)
    alone = race(comm, {"run": found_ways["hpcdist"].run}, rounds=5).median("run")
    compute = COMPUTING[kind](comm, COMPUTE_SHARE * alone)
    contestants = {"compute": compute}
    for name, way in found_ways.items():
        contestants |= {name: way.run, f"{name} both": both(way, compute)}
    found = race(comm, contestants, rounds=rounds, sample_s=0.02)
    row: dict[str, Any] = {"size": nbytes, "computing": kind, "compute": found.median("compute")}
    for name in found_ways:
        row |= {name: found.median(name), f"{name} hides": hidden(found, name)}
    return row


def hidden(found: Race, name: str) -> float:
    """Return the share of the communication that the computing hid."""
    alone, compute = found.seconds[name], found.seconds["compute"]
    return float(np.median((alone + compute - found.seconds[f"{name} both"]) / alone))


def main() -> None:
    options = read_options(__doc__, rounds=15)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    gloo = start_gloo(comm)
    report = Report("overlap", options, comm)
    rows = [
        overlap_row(comm, nbytes, kind, gloo, options.rounds)
        for nbytes in (QUICK_SIZES if options.quick else SIZES)
        for kind in COMPUTING
    ]
    columns: dict[str, Any] = {"size": volume, "computing": str, "compute": duration}
    for name in ("hpcdist", "mpi4py", "gloo"):
        columns |= {name: duration, f"{name} hides": percent}
    report.table("all_reduce of float32 behind computing", columns, rows)
    report.close()
    stop_gloo(gloo)


if __name__ == "__main__":
    main()
