"""What grows with the number of ranks: ``python scale.py`` (it starts the ranks itself).

Jobs of more and more ranks on this machine, of hpcdist and of mpi4py alone: start-up, memory of
a rank, open files, barriers and groups. Ranks outnumber the cores, so seconds grow with them in
any library (they share the cores): compare hpcdist with mpi4py beside it, and look at the
processor seconds of one rank. What Python keeps of a group is weighed up to 4096 ranks, without
starting them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from libraries import Mpi, find_libraries
from report import Options, Report, parse

from hpcdist.bench.plots import draw_panels
from hpcdist.text import duration

PROBE = Path(__file__).parent / "probes/grow.py"
WHO = "mpi4py", "hpcdist"
LIMIT_S = 900
# more ranks than cores: without these a rank that waits keeps the core from the one it waits for
CROWDED = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}
SIZES_IN_PYTHON = 8, 64, 512, 4096

Found = dict[str, float]


class Job(NamedTuple):
    """One number of ranks, and who they are."""

    ranks: int
    who: str


def measure(mpi: Mpi, job: Job, rounds: int) -> Found:
    """Start the job and return what its ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found")
        argv = [mpi.mpiexec, "-n", str(job.ranks), sys.executable, str(PROBE), job.who, str(path)]
        argv += [str(time.time()), str(rounds)]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
        if ended.returncode or not path.exists():
            raise SystemExit(f"{' '.join(argv)} failed:\n{ended.stdout}{ended.stderr}")
        found: Found = json.loads(path.read_text())
        return found


def measure_all(mpi: Mpi, ranks: Sequence[int], jobs: int, rounds: int) -> dict[Job, Found]:
    """Measure each job `jobs` times, one after the other; return the medians."""
    found: dict[Job, list[Found]] = {}
    for count in ranks:
        for _ in range(jobs):
            for who in WHO:
                job = Job(count, who)
                found.setdefault(job, []).append(measure(mpi, job, rounds))
    return {job: _medians(told) for job, told in found.items()}


def _medians(told: Sequence[Found]) -> Found:
    return {name: statistics.median(each[name] for each in told) for name in told[0]}


# ---- tables


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def kibibytes(nbytes: float) -> str:
    return f"{nbytes / 1024:.1f} KiB"


def number(count: float) -> str:
    return f"{count:g}"


# heading -> how it is shown, and what it is in what the ranks found
START = {
    "Python": (duration, "python_s"),
    "+ numpy": (duration, "numpy_s"),
    "+ import": (duration, "import_hpcdist_s"),
    "+ MPI_Init": (duration, "mpi_s"),
    "+ init_parallel_env": (duration, "init_s"),
    "+ first all_reduce": (duration, "first_s"),
    "processor, a rank": (duration, "first_cpu"),
}
MEMORY = {
    "numpy": (mebibytes, "numpy_uss"),
    "+ import": (mebibytes, "import_hpcdist_uss"),
    "+ MPI_Init": (mebibytes, "mpi_uss"),
    "+ init_parallel_env": (mebibytes, "init_uss"),
    "+ first all_reduce": (mebibytes, "first_uss"),
    "with shared parts": (mebibytes, "first_pss"),
    "open files": (number, "first_files"),
}
GROUPS = {
    "barrier": (duration, "barrier_s"),
    "Comm.Dup": (duration, "dup_s"),
    "group of all": (duration, "all_s"),
    "of 8": (duration, "eight_s"),
    "of pairs": (duration, "pair_s"),
    "memory, of all": (kibibytes, "all_uss"),
    "memory, of a pair": (kibibytes, "pair_uss"),
}
TABLES = {
    "From mpiexec to ... (the slowest rank)": START,
    "Memory of a rank of its own, after ... (the largest rank)": MEMORY,
    "Making groups: Create_group, new_group": GROUPS,
}


def report_all(report: Report, found: dict[Job, Found]) -> None:
    for title, shown in TABLES.items():
        columns = {"ranks": str, "": str} | {name: show for name, (show, _) in shown.items()}
        rows = [
            {"ranks": job.ranks, "": job.who}
            | {name: told.get(key) for name, (_, key) in shown.items()}
            for job, told in found.items()
        ]
        report.table(title, columns, rows)


def python_rows() -> Iterator[dict[str, Any]]:
    """Weigh what Python keeps of a group of so many ranks."""
    from hpcdist.comm.group import Group

    for size in SIZES_IN_PYTHON:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        group = Group(range(size), 0, 1, None)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield {"ranks of a group": group.nranks, "Python's memory": after - before}


# ---- picture

# title -> what it is in what the ranks found, and its unit
PANELS = {
    "from mpiexec to the first all_reduce": ("first_s", "seconds", 1.0),
    "memory of a rank of its own": ("first_uss", "MiB", 1 << 20),
    "making a group of all": ("all_s", "milliseconds", 1e-3),
}


def draw(found: dict[Job, Found], path: str) -> None:
    """Draw what grows over the number of ranks."""
    draw_panels([(title, partial(growth, found, *what)) for title, what in PANELS.items()], path)


def growth(found: dict[Job, Found], key: str, unit: str, scale: float, axes: Any) -> None:
    ranks = sorted({job.ranks for job in found})
    for who in WHO:
        axes.plot(ranks, [found[Job(count, who)][key] / scale for count in ranks], "o-", label=who)
    axes.set(xlabel="ranks", ylabel=unit, ylim=(0, None))
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,8,32,64", help="default: 2,8,32,64")
    parser.add_argument("--mpiexec", action="append", default=[], help="default: the first found")
    parser.add_argument("--rounds", type=int, default=9, help="groups of each kind")
    parser.add_argument("--quick", action="store_true", help="2 and 8 ranks, few rounds")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--plot", metavar="FILE.png|svg", help="draw what grows")
    given = parse(parser)
    mpi = (find_libraries(given.mpiexec) or [None])[0]
    if mpi is None:
        raise SystemExit("no mpiexec beside Python, in .mpich/bin or on PATH; name one: --mpiexec")
    os.environ.update(mpi.environ | CROWDED)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    ranks = [2, 8] if given.quick else [int(word) for word in given.ranks.split(",")]
    jobs, rounds = (1, 3) if given.quick else (3, given.rounds)
    options = Options(rounds, given.quick, given.json, None)
    report = Report("scale", options, mpi=f"{mpi.name} {mpi.version}")
    found = measure_all(mpi, ranks, jobs, rounds)
    report_all(report, found)
    columns = {"ranks of a group": str, "Python's memory": kibibytes}
    report.table("What Python keeps of a group", columns, list(python_rows()))
    report.close()
    if given.plot:
        draw(found, given.plot)


if __name__ == "__main__":
    main()
