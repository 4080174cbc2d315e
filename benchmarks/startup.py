"""What starting costs: ``python startup.py --mpiexec mpiexec`` (it starts the ranks itself).

Fresh interpreters, one contestant after the other, round by round, medians. Opening files is
counted because a thousand ranks that import from one shared file system wait for that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from report import Options, Report, duration, times

PROBES = Path(__file__).parent / "probes"
IMPORTS = {
    "python": "pass",
    "numpy, mpi4py": "import numpy, mpi4py",
    "hpcdist": "import numpy, mpi4py, hpcdist",
    "torch.distributed": "import numpy, mpi4py, torch.distributed",
}
FIRST = {"mpi4py": "first_mpi4py.py", "hpcdist": "first_hpcdist.py", "gloo": "first_gloo.py"}


def rounds_of(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call every contestant once per round, and once before to warm the file cache."""
    for call in contestants.values():
        call()
    found: dict[str, list[Any]] = {name: [] for name in contestants}
    for number in range(rounds):
        names = list(contestants)
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            found[name].append(contestants[name]())
    return found


def added(found: Mapping[str, list[float]], name: str, to: str) -> float:
    """Return the median over the rounds of what `name` took longer than `to`."""
    return statistics.median(a - b for a, b in zip(found[name], found[to], strict=True))


def ratio(found: Mapping[str, list[float]], name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[to], strict=True))


# ---- import


def wall_time_of(statement: str) -> Callable[[], float]:
    """Return a contestant that runs `statement` in a fresh interpreter."""

    def run() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - began

    return run


def import_rows(rounds: int) -> list[dict[str, Any]]:
    imports = dict(IMPORTS)
    if not _has("torch.distributed"):
        del imports["torch.distributed"]
    found = rounds_of({name: wall_time_of(code) for name, code in imports.items()}, rounds)
    base = "numpy, mpi4py"
    return [
        {
            "import": name,
            "whole process": statistics.median(seconds),
            "beyond numpy, mpi4py": None if name in ("python", base) else added(found, name, base),
        }
        for name, seconds in found.items()
    ]


def _has(module: str) -> bool:
    known = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
    return known.returncode == 0


# ---- files


def file_rows() -> list[dict[str, Any]]:
    """Count what one process opens, by the package it belongs to."""
    answer = subprocess.run(
        [sys.executable, PROBES / "count_files.py"], check=True, capture_output=True, text=True
    )
    rows: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return rows


# ---- the first all_reduce


def time_to_first(mpiexec: str, script: str) -> Callable[[], tuple[float, float] | None]:
    """Return a contestant: seconds from `mpiexec` to the first all_reduce, and to its end."""

    def run() -> tuple[float, float] | None:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder, "time")
            began = time.time()
            ended = subprocess.run(
                [mpiexec, "-n", "2", sys.executable, str(PROBES / script), folder],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            whole = time.time() - began
            if ended.returncode or not told.exists():
                raise SystemExit(f"{script} failed under {mpiexec}:\n{ended.stderr}")
            return float(told.read_text()) - began, whole

    return run


def first_rows(mpiexec: str, rounds: int) -> list[dict[str, Any]]:
    scripts = {name: script for name, script in FIRST.items() if name != "gloo" or _has("torch")}
    both = rounds_of({name: time_to_first(mpiexec, path) for name, path in scripts.items()}, rounds)
    found = {name: [first for first, _ in pairs] for name, pairs in both.items()}
    return [
        {
            "mpiexec -n 2": name,
            "to first all_reduce": statistics.median(found[name]),
            "/ mpi4py": ratio(found, name, "mpi4py"),
            "beyond mpi4py": added(found, name, "mpi4py"),
            "to the end": statistics.median(whole for _, whole in both[name]),
        }
        for name in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpiexec", default=shutil.which("mpiexec"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    given = parser.parse_args()
    rounds = 3 if given.quick else given.rounds
    report = Report("startup", Options(rounds, given.quick, given.json, None))
    report.table(
        "Importing, in a fresh interpreter",
        {"import": str, "whole process": duration, "beyond numpy, mpi4py": duration},
        import_rows(rounds),
    )
    counted = {"files opened by": str, "import": str, "init and first all_reduce": str}
    report.table("Files one process opens, beyond numpy and mpi4py", counted, file_rows())
    if given.mpiexec:
        columns = {"mpiexec -n 2": str, "to first all_reduce": duration, "/ mpi4py": times}
        columns |= {"beyond mpi4py": duration, "to the end": duration}
        rows = first_rows(given.mpiexec, max(3, rounds // 3))
        report.table("From mpiexec to the first all_reduce", columns, rows)
    report.close()


if __name__ == "__main__":
    main()
