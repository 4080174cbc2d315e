"""Collectives and messages by size: ``mpiexec -n 2 python collectives.py``.

hpcdist beside mpi4py and torch's gloo, all on the same float32 arrays, and beside the limit:
every rank copying the same bytes once. Size is what each rank hands in. The same, for any cases,
sizes and ranks, is ``hpcdist bench``.
"""

from __future__ import annotations

from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist.bench.cases import choose_cases
from hpcdist.bench.plan import Plan, measure
from hpcdist.bench.startup import Started

CASES = ("latency", "bandwidth", "all_reduce", "reduce", "reduce_scatter", "broadcast",
         "all_gather", "all_gather_list", "alltoall_single")  # fmt: skip
SIZES = (*(8 << shift for shift in range(0, 24, 3)), 64 << 20)
QUICK_SIZES = 8, 32 << 10, 2 << 20
SHORT = "float16", "bfloat16", "float32"


def main() -> None:
    options = read_options(__doc__, rounds=21)
    world = dist.init_parallel_env()
    if world.nranks == 1:
        raise SystemExit("give it ranks: mpiexec -n 2 python benchmarks/collectives.py")
    report = Report("collectives", options, MPI.COMM_WORLD.Dup())
    sizes = QUICK_SIZES if options.quick else SIZES
    by_size = Plan(
        choose_cases(CASES),
        sizes,
        against=("mpi4py", "torch"),
        rounds=options.rounds,
        quick=options.quick,
    )
    short = by_size._replace(cases=("all_reduce",), sizes=sizes[1:], dtypes=SHORT)
    for title, plan in {"by size": by_size, "16-bit floats": short}.items():
        report.rows(title, measure(world, plan, Started(0.0, None), []))
    report.close()


if __name__ == "__main__":
    main()
