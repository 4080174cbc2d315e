"""What starting costs: ``python startup.py`` (it starts the ranks itself).

Fresh interpreters, one candidate after the other, round by round, medians. Opening files is
counted because a thousand ranks that import from one shared file system wait for that. Byte
code is kept, as it is where packages are installed, whatever this shell says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libraries import Mpi, find_libraries
from report import Options, Report

from hpcdist.text import duration, times

PROBES = Path(__file__).parent / "probes"
BASE = "import numpy, mpi4py"
IMPORTS = {
    "nothing": "pass",
    "hpcdist": "import hpcdist",
    "torch.distributed": "import torch.distributed",
}
FIRST = {"mpi4py": "first_mpi4py.py", "hpcdist": "first_hpcdist.py", "gloo": "first_gloo.py"}


def rounds_of(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call every candidate once per round, and once before to warm the file cache."""
    for call in candidates.values():
        call()
    found: dict[str, list[Any]] = {name: [] for name in candidates}
    for number in range(rounds):
        names = list(candidates)
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            found[name].append(candidates[name]())
    return found


def added(found: Mapping[str, list[float]], name: str, to: str) -> float:
    """Return the median over the rounds of what `name` took longer than `to`."""
    return statistics.median(a - b for a, b in zip(found[name], found[to], strict=True))


def ratio(found: Mapping[str, list[float]], name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[to], strict=True))


# ---- import


def import_time_of(statement: str) -> Callable[[], tuple[float, float]]:
    """Return a candidate: seconds that `statement` takes, and its whole fresh interpreter."""
    code = f"from time import perf_counter as now; {BASE}; a = now(); {statement}; print(now() - a)"

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        told = subprocess.check_output([sys.executable, "-c", code], text=True)
        return float(told), time.perf_counter() - began

    return run


def import_rows(rounds: int) -> list[dict[str, Any]]:
    imports = {name: code for name, code in IMPORTS.items() if "torch" not in name or _has("torch")}
    found = rounds_of({name: import_time_of(code) for name, code in imports.items()}, rounds)
    return [
        {
            "after numpy and mpi4py": name,
            "import": statistics.median(alone for alone, _ in pairs),
            "whole process": statistics.median(whole for _, whole in pairs),
        }
        for name, pairs in found.items()
    ]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# ---- files


def file_rows() -> list[dict[str, Any]]:
    """Count what one process opens, by the package it belongs to."""
    argv = [sys.executable, PROBES / "count_files.py"]
    answer = subprocess.run(argv, check=True, capture_output=True, text=True)
    rows: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return rows


# ---- the first all_reduce


def time_to_first(mpi: Mpi, script: str) -> Callable[[], tuple[float, float]]:
    """Return a candidate: seconds from `mpiexec` to the first all_reduce, and to its end."""

    def run() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder, "time")
            began = time.time()
            ended = subprocess.run(
                [mpi.mpiexec, "-n", "2", sys.executable, str(PROBES / script), folder],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            whole = time.time() - began
            if ended.returncode or not told.exists():
                raise SystemExit(f"{script} failed under {mpi.mpiexec}:\n{ended.stderr}")
            return float(told.read_text()) - began, whole

    return run


def first_rows(mpi: Mpi, rounds: int) -> list[dict[str, Any]]:
    scripts = {name: script for name, script in FIRST.items() if name != "gloo" or _has("torch")}
    both = rounds_of({name: time_to_first(mpi, path) for name, path in scripts.items()}, rounds)
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
    parser.add_argument("--mpiexec", action="append", default=[], help="default: the first found")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", action="store_true", help="write to benchmarks/results/")
    given = parser.parse_args()
    mpi = (find_libraries(given.mpiexec) or [None])[0]
    rounds = 3 if given.quick else given.rounds
    named = f"{mpi.name} {mpi.version}" if mpi else ""
    report = Report("startup", Options(rounds, given.quick, given.json, None), mpi=named)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    columns = {"after numpy and mpi4py": str, "import": duration, "whole process": duration}
    report.table("Importing, in a fresh interpreter", columns, import_rows(rounds))
    if mpi is not None:
        os.environ.update(mpi.environ)
        columns = {"files opened by": str, "import": str, "init and first all_reduce": str}
        report.table("Files one process opens, beyond numpy and mpi4py", columns, file_rows())
        columns = {"mpiexec -n 2": str, "to first all_reduce": duration, "/ mpi4py": times}
        columns |= {"beyond mpi4py": duration, "to the end": duration}
        rows = first_rows(mpi, max(3, rounds // 3))
        report.table("From mpiexec to the first all_reduce", columns, rows)
    report.close()


if __name__ == "__main__":
    main()
