"""What lists of arrays cost beside one array: ``mpiexec -n 2 python lists.py``.

The same bytes as one array per rank in a list, each where the allocator put it, and as one array
for all ranks; for ordinary arrays and for those of `hpcdist.empty`. `size` is what one rank
receives, or for reduce_scatter and scatter what is given. Ratios are how many times as long the
list takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, interleave
from hpcdist.text import duration, times, volume

MiB = 1 << 20
SIZES = 64, 1 << 10, 64 << 10, 256 << 10, MiB, 4 * MiB, 16 * MiB, 64 * MiB
QUICK_SIZES = 64, 64 << 10, 4 * MiB
Make = Callable[[int], Any]


def ordinary(count: int) -> Any:
    """Return zeros whose memory is there already."""
    array = np.empty(count, np.float32)
    array.fill(0)
    return array


def shared(count: int) -> Any:
    """Return zeros in memory that the ranks of the node share."""
    return dist.zeros(count, "f4")


def apart(make: Make, ranks: int, count: int) -> list[Any]:
    """Return an array for each rank, none next to another."""
    both = [make(count) for _ in range(2 * ranks)]
    return both[::2]


def all_gather(make: Make, ranks: int, count: int) -> Candidates:
    x = make(count)
    return {
        "array": partial(dist.all_gather, make(count * ranks), x),
        "list": partial(dist.all_gather, apart(make, ranks, count), x),
    }


def gather(make: Make, ranks: int, count: int) -> Candidates:
    x, at_root = make(count), dist.get_rank() == 0
    return {
        "array": partial(dist.gather, x, make(count * ranks) if at_root else None),
        "list": partial(dist.gather, x, apart(make, ranks, count) if at_root else None),
    }


def scatter(make: Make, ranks: int, count: int) -> Candidates:
    out, at_root = make(count), dist.get_rank() == 0
    return {
        "array": partial(dist.scatter, out, make(count * ranks) if at_root else None),
        "list": partial(dist.scatter, out, apart(make, ranks, count) if at_root else None),
    }


def alltoall(make: Make, ranks: int, count: int) -> Candidates:
    return {
        "array": partial(dist.alltoall_single, make(count * ranks), make(count * ranks)),
        "list": partial(dist.alltoall, apart(make, ranks, count), apart(make, ranks, count)),
    }


def reduce_scatter(make: Make, ranks: int, count: int) -> Candidates:
    return {
        "array": partial(dist.reduce_scatter, make(count), make(count * ranks)),
        "list": partial(dist.reduce_scatter, make(count), apart(make, ranks, count)),
    }


OPERATIONS = (all_gather, gather, scatter, alltoall, reduce_scatter)
MEMORY = {"ordinary": ordinary, "shared": shared}
COLUMNS: dict[str, Any] = {
    "size": volume,
    "array": duration,
    "list": duration,
    "list / array": times,
}


def main() -> None:
    options = read_options(__doc__, rounds=15)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("lists", options, comm)
    for operation in OPERATIONS:
        for kind, make in MEMORY.items():
            rows: list[Row] = []
            for nbytes in QUICK_SIZES if options.quick else SIZES:
                candidates = operation(make, comm.size, max(1, nbytes // 4 // comm.size))
                found = interleave(comm, candidates, rounds=options.rounds)
                line = {name: found.median(name) for name in candidates}
                ratio = found.ratio("list", to="array")
                rows.append({"size": nbytes, **line, "list / array": ratio})
            report.table(f"{operation.__name__} of float32, {kind} arrays", COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
