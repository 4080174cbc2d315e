"""How much of an all_reduce is hidden behind computing: ``mpiexec -n 2 python overlap.py``.

Start it, compute for about 1.5 times as long as it takes alone, wait for it. Hidden is what is
saved of the time the two take one after the other, as a share of the all_reduce alone: 100 %
would be free communication, 0 % is no gain, less is a loss. Moving data needs a core, too, so
with one core per rank only the sleeper can come near 100 %.
"""

from __future__ import annotations

from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist.bench.cases import choose_cases
from hpcdist.bench.plan import Plan, measure
from hpcdist.bench.startup import Started

SIZES = 256 << 10, 2 << 20, 16 << 20, 64 << 20
QUICK_SIZES = (4 << 20,)


def main() -> None:
    options = read_options(__doc__, rounds=15)
    world = dist.init_parallel_env()
    report = Report("overlap", options, MPI.COMM_WORLD.Dup())
    plan = Plan(
        choose_cases(["overlap"]),
        QUICK_SIZES if options.quick else SIZES,
        against=("mpi4py", "torch"),
        rounds=options.rounds,
        quick=options.quick,
    )
    rows = measure(world, plan, Started(0.0, None), [])
    report.rows("all_reduce of float32 behind computing", rows)
    report.close()


if __name__ == "__main__":
    main()
