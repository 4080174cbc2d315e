"""What starting costs under Slurm: ``python slurm_startup.py`` inside an allocation of two nodes.

``python tests/slurm/private_slurm.py salloc -N2 --ntasks-per-node=4 python
benchmarks/slurm_startup.py`` makes one on this machine. The seconds are those from `srun` to the
end of the first all_reduce on rank 0; the candidates take turns, round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libraries import Mpi, find_libraries
from report import Options, Report
from startup import FIRST, PROBES, added, ratio, rounds_of

from hpcdist.text import duration, times

KIND = {"openmpi": "pmix", "mpich": "pmi2"}
CONTESTANTS = ("mpi4py", "hpcdist")


def time_to_first(mpi: Mpi, script: str, shape: list[str]) -> Callable[[], tuple[float, float]]:
    """Return a candidate: seconds from `srun` to the first all_reduce, and to its end."""
    # --overlap: a step that follows another may otherwise wait a minute for free CPUs
    srun = ["srun", f"--mpi={KIND[mpi.name]}", "--overlap", "--kill-on-bad-exit=1", *shape]

    def run() -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # all nodes see it
            told = Path(folder, "time")
            began = time.time()
            ended = subprocess.run(
                [*srun, sys.executable, str(PROBES / script), folder],
                env=os.environ | mpi.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            whole = time.time() - began
            if ended.returncode or not told.exists():
                raise SystemExit(f"{script} failed under {' '.join(srun)}:\n{ended.stderr}")
            return float(told.read_text()) - began, whole

    return run


def rows_of(mpi: Mpi, shape: list[str], rounds: int) -> list[dict[str, Any]]:
    both = rounds_of({name: time_to_first(mpi, FIRST[name], shape) for name in CONTESTANTS}, rounds)
    found = {name: [first for first, _ in pairs] for name, pairs in both.items()}
    return [
        {
            " ".join(["srun", *shape]): name,
            "to first all_reduce": statistics.median(found[name]),
            "/ mpi4py": ratio(found, name, "mpi4py"),
            "beyond mpi4py": added(found, name, "mpi4py"),
            "to the end": statistics.median(whole for _, whole in both[name]),
        }
        for name in CONTESTANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpiexec", action="append", default=[], help="names an MPI; or all found")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    given = parser.parse_args()
    if "SLURM_JOB_ID" not in os.environ:
        raise SystemExit(f"there is no allocation of Slurm around us\n\n{__doc__}")
    rounds = 3 if given.quick else given.rounds
    shape = [f"-N{given.nodes}", f"--ntasks-per-node={given.ranks_per_node}"]
    for mpi in find_libraries(given.mpiexec):
        report = Report(
            "slurm_startup",
            Options(rounds, given.quick, given.json, None),
            mpi=f"{mpi.name} {mpi.version}",
        )
        columns = {" ".join(["srun", *shape]): str, "to first all_reduce": duration}
        columns |= {"/ mpi4py": times, "beyond mpi4py": duration, "to the end": duration}
        title = f"From srun to the first all_reduce, {mpi.name}"
        report.table(title, columns, rows_of(mpi, shape, rounds))
        report.close()


if __name__ == "__main__":
    main()
