"""What equal bits cost: ``mpiexec -n 2 python same_bits.py``.

Sums and products of arrays that are cut along their first dimension, as NumPy and BLAS add them,
and with the same bits for every cut. Ratios are how many times as long the second takes. What
reductions in the order of the ranks cost between nodes is the difference between two runs of
``collectives.py`` with HPCDIST_RANKS_PER_NODE=1, one of them with HPCDIST_REDUCTIONS=ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import core_per_rank  # noqa: F401  first: NumPy's BLAS looks when it is loaded
import numpy as np
from mpi4py import MPI
from report import Report, Row, read_options

import hpcdist as dist
from hpcdist.bench.interleaved import Candidates, interleave
from hpcdist.text import duration, times, volume

MiB = 1 << 20
SIZES = 512, 64 << 10, 16 * MiB, 256 * MiB, 1024 * MiB
QUICK_SIZES = 512, 16 * MiB
MATRICES = 128, 512, 1024
OF_ARRAYS = {
    "sum": lambda a: a.sum(),
    "sum along the first": lambda a: a.sum(0),
    "sum along the last": lambda a: a.sum(1),
    "variance": lambda a: a.var(),
    "vdot": lambda a: np.vdot(a, a),
}
COLUMNS: dict[str, Any] = {"what": str, "size": volume, "fast": duration, "same bits": duration}
COLUMNS["same bits / fast"] = times


def reproducible(function: Callable[[Any], Any], *arrays: Any) -> Callable[[], None]:
    """Return a call of a function of arrays whose sums are reproducible."""

    def call() -> None:
        with dist.array_policy(sums="reproducible"):
            function(*arrays)

    return call


def row_of(comm: MPI.Intracomm, what: str, nbytes: int, candidates: Candidates, rounds: int) -> Row:
    found = interleave(comm, candidates, rounds=rounds)
    line: dict[str, Any] = {name: found.median(name) for name in candidates}
    return {
        "what": what,
        "size": nbytes,
        **line,
        "same bits / fast": found.ratio("same bits", to="fast"),
    }


def of_arrays(comm: MPI.Intracomm, dtype: Any, sizes: Any, rounds: int) -> list[Row]:
    rows, mesh = [], dist.ProcessMesh(range(comm.size))
    for nbytes in sizes:
        shape = (max(comm.size, nbytes // np.dtype(dtype).itemsize // 64), 64)
        a = dist.random.Generator(seed=1).standard_normal(
            shape, dtype, mesh=mesh, placements=[dist.Shard(0)]
        )
        for name, function in OF_ARRAYS.items():
            calls = {"fast": lambda f=function, a=a: f(a), "same bits": reproducible(function, a)}
            rows.append(row_of(comm, name, a.nbytes, calls, rounds))
    return rows


def of_matrices(comm: MPI.Intracomm, dtype: Any, rounds: int) -> list[Row]:
    rows, mesh = [], dist.ProcessMesh(range(comm.size))
    for n in MATRICES:
        a = dist.shard_tensor(np.ones((n, n), dtype), mesh, [dist.Shard(0)])
        calls = {
            "fast": lambda a=a: a.T @ a,
            "same bits": reproducible(lambda a: a.T @ a, a),
        }
        rows.append(row_of(comm, f"A.T @ A, {n} x {n}", a.nbytes, calls, rounds))
    return rows


def main() -> None:
    options = read_options(__doc__, rounds=9)
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    report = Report("same_bits", options, comm)
    sizes = QUICK_SIZES if options.quick else SIZES
    for dtype in (np.float64, np.float32):
        name = np.dtype(dtype).name
        report.table(f"sums of {name}", COLUMNS, of_arrays(comm, dtype, sizes, options.rounds))
        report.table(f"products of {name}", COLUMNS, of_matrices(comm, dtype, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
