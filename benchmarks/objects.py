"""Objects of three kinds: ``mpiexec -n 2 python objects.py``.

hpcdist beside mpi4py's lower-case methods and its `mpi4py.util.pkl5`, which sends arrays beside
the pickle as hpcdist does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5
from report import Report, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, interleave
from hpcdist.text import duration, times

THINGS: dict[str, Callable[[], Any]] = {
    "small dict": lambda: {"epoch": 3, "loss": 0.25, "name": "train"},
    "dict with a 10 MB array": lambda: {"epoch": 3, "weights": np.zeros(10_000_000, np.uint8)},
    "100 arrays of 100 KB": lambda: [np.full(100_000, i, np.uint8) for i in range(100)],
}


def broadcast(comm: MPI.Intracomm, thing: Any) -> Candidates:
    objects = [thing if comm.rank == 0 else None]
    out_of_band = pkl5.Intracomm(comm)
    return {
        "hpcdist": lambda: dist.broadcast_object_list(objects, 0),
        "mpi4py": lambda: comm.bcast(objects, 0),
        "pkl5": lambda: out_of_band.bcast(objects, 0),
    }


def all_gather(comm: MPI.Intracomm, thing: Any) -> Candidates:
    out_of_band = pkl5.Intracomm(comm)
    return {
        "hpcdist": lambda: dist.all_gather_object([], thing),
        "mpi4py": lambda: comm.allgather(thing),
        "pkl5": lambda: out_of_band.allgather(thing),
    }


OPERATIONS = {"broadcast_object_list": broadcast, "all_gather_object": all_gather}


def main() -> None:
    options = read_options(__doc__, rounds=31)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("objects", options, comm)
    rows = []
    for operation, make in OPERATIONS.items():
        for thing, create in THINGS.items():
            found = interleave(comm, make(comm, create()), rounds=options.rounds)
            rows.append(
                {
                    "operation": operation,
                    "object": thing,
                    **{name: found.median(name) for name in found.seconds},
                    "/ mpi4py": found.ratio("hpcdist", to="mpi4py"),
                    "/ pkl5": found.ratio("hpcdist", to="pkl5"),
                    "added": found.added("hpcdist", to="mpi4py"),
                }
            )
    shown: dict[str, Any] = {"operation": str, "object": str}
    shown |= dict.fromkeys(("hpcdist", "mpi4py", "pkl5"), duration)
    shown |= {"/ mpi4py": times, "/ pkl5": times, "added": duration}
    report.table("Objects: hpcdist takes ... times as long as", shown, rows)
    report.close()


if __name__ == "__main__":
    main()
