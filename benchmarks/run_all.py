"""Run every benchmark under every MPI library there is, and write what they find to results/.

``python benchmarks/run_all.py`` finds an `mpiexec` beside Python, in ``.mpich/bin`` of the
repository and on PATH; ``--mpiexec FILE`` (again and again) names others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from libraries import Mpi, find_libraries

HERE = Path(__file__).parent
STARTERS = "startup", "scale"  # they start their ranks themselves
RANKS = {
    "overhead": (1, 2),
    "recorder": (1,),
    "collectives": (2,),
    "overlap": (2,),
    "objects": (2,),
    "training": (2,),
    "sharding": (2,),
    "hiding": (2,),
    "hooks": (1,),
    "jax_calls": (1, 2),
    "memory": (2,),
    "shared": (2,),
    "lists": (2,),
    "arrays": (2,),
    "device": (1,),
    "checkpoint": (2,),
    "tensor_parallel": (2,),
    "recompute": (1,),
}


def commands(mpi: Mpi, wanted: list[str], options: list[str]) -> list[list[str]]:
    """Return what to run under one MPI library."""
    found = []
    for name in STARTERS:
        if name in wanted:
            script = str(HERE / f"{name}.py")
            found.append([sys.executable, script, "--mpiexec", mpi.mpiexec, *options])
    for name, sizes in RANKS.items():
        if name in wanted:
            python = [sys.executable, str(HERE / f"{name}.py"), *options]
            found += [[mpi.mpiexec, "-n", str(ranks), *python] for ranks in sizes]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpiexec", action="append", default=[], help="may be given repeatedly")
    parser.add_argument("--only", nargs="*", choices=[*STARTERS, *RANKS], help="some of them")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works")
    given = parser.parse_args()
    libraries = find_libraries(given.mpiexec)
    if not libraries:
        raise SystemExit("no mpiexec beside Python, in .mpich/bin or on PATH; name one: --mpiexec")
    options = ["--json", *(["--quick"] if given.quick else [])]
    failed = []
    for mpi in libraries:
        for argv in commands(mpi, given.only or [*STARTERS, *RANKS], options):
            print(f"\n$ {' '.join(argv)}", flush=True)
            ended = subprocess.run(argv, env=os.environ | mpi.environ)
            failed += [" ".join(argv)] * (ended.returncode != 0)
    if failed:
        raise SystemExit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
