"""What equal bits cost: ``mpiexec -n 2 python same_bits.py``.

Sums and products of arrays that are cut along their first dimension, as NumPy and BLAS add them,
and with the same bits for every cut. Ratios are how many times as long the second takes. Then
reductions of contributions: as they are fastest, in the order of the ranks, and exact. With
HPCDIST_RANKS_PER_NODE=1 each rank is a node.
"""

from __future__ import annotations

import os
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
WAYS = {
    "fast": ("fast", dist.ReduceOp.SUM),
    "ordered": ("ordered", dist.ReduceOp.SUM),
    "exact": ("fast", dist.ReduceOp.REPRODUCIBLE_SUM),
}
ALTERNATIONS = 5
OF_WAYS: dict[str, Any] = {"size": volume, **dict.fromkeys(WAYS, duration)}
OF_WAYS |= {f"{way} / fast": times for way in (*WAYS,)[1:]}


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


def reduction(comm: MPI.Intracomm, setting: str, op: Any, nbytes: int, rounds: int) -> list[float]:
    """Return the seconds of reductions of float32 in a world of its own, each of the slowest."""
    os.environ["HPCDIST_REDUCTIONS"] = setting
    dist.init_parallel_env()
    x, found = np.zeros(nbytes // 4, np.float32), []
    for turn in range(rounds + 1):
        comm.Barrier()
        start = MPI.Wtime()
        for _ in range(calls := max(1, min(200, (4 * MiB) // nbytes))):
            dist.all_reduce(x, op)
        taken = comm.allreduce((MPI.Wtime() - start) / calls, MPI.MAX)
        found += [taken] if turn else []
    dist.destroy_process_group()
    return found


def of_contributions(comm: MPI.Intracomm, sizes: Any, rounds: int) -> list[Row]:
    """Return what reductions take, in worlds that take turns."""
    rows: list[Row] = []
    for nbytes in sizes:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ALTERNATIONS):
            for way, (setting, op) in WAYS.items():
                found[way] += reduction(comm, setting, op, nbytes, rounds)
        line: dict[str, Any] = {way: float(np.median(each)) for way, each in found.items()}
        ratios = {f"{way} / fast": line[way] / line["fast"] for way in (*WAYS,)[1:]}
        rows.append({"size": nbytes, **line, **ratios})
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
    dist.destroy_process_group()
    at_most = [size for size in sizes if size <= 256 * MiB]
    report.table("all_reduce of float32", OF_WAYS, of_contributions(comm, at_most, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
