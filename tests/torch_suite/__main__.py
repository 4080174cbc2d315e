"""torch's own tests of torch.distributed, on backend "hpcdist" and, to compare, on gloo.

``python tests/torch_suite [--ranks 2 4] [--only PATTERN]`` runs the tests of `DistributedTest` in
torch's wheel, with ranks of an MPI job in place of the processes that torch spawns: every rank runs
every test in the same order. A test that fails or hangs ends its job, and a fresh one goes on with
the next test. At the end a table counts what each backend did, and the exit code is 1 if a test
fails on "hpcdist" that passes on gloo.

Read `ranks.py` for what a rank does, `guises.py` for the tests that are run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

BACKENDS = ["gloo", "hpcdist"]
GUISES = ["gloo", "mpi"]
HERE = Path(__file__).parent

# Open MPI: allow root, and more ranks than cores
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class Result(NamedTuple):
    """How one test ended, and why."""

    outcome: str
    why: str = ""


def run_all(backend: str, ranks: int, options: argparse.Namespace) -> dict[str, Result]:
    """Run every test on one backend; those that torch skips in one guise run in the next."""
    results: dict[str, Result] = {}
    for guise in GUISES:
        settled = {name: each for name, each in results.items() if each.outcome != "skipped"}
        further = _run_in_guise(backend, guise, ranks, options, set(settled))
        results |= {
            name: each
            for name, each in further.items()
            if name not in results or each.outcome != "skipped"
        }
    return results


def _run_in_guise(
    backend: str, guise: str, ranks: int, options: argparse.Namespace, settled: set[str]
) -> dict[str, Result]:
    results: dict[str, Result] = {}
    over = False
    while not over:
        with tempfile.TemporaryDirectory(prefix="torch-suite.") as folder:
            order = {"backend": backend, "guise": guise, "only": options.only}
            order["without"] = sorted(settled | results.keys())
            Path(folder, "order.json").write_text(json.dumps(order))
            over = _run_job(Path(folder), ranks, options)
            further = _read(Path(folder), ranks)
        results |= further
        over = over or not further
        print(f"{backend} in {guise}'s guise, {ranks} ranks: {len(results)} tests", flush=True)
    return results


def _run_job(folder: Path, ranks: int, options: argparse.Namespace) -> bool:
    """Run one job; return whether it came to its end, and end it where a test takes too long."""
    mpiexec = [*options.mpiexec.split(), "-n", str(ranks)]
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            [*mpiexec, sys.executable, HERE / "ranks.py", folder],
            env=os.environ | OPEN_MPI | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while job.poll() is None:
                time.sleep(0.2)
                if time.time() - _last_sign_of_life(folder) > options.limit:
                    (folder / "too long").touch()
                    break
        finally:
            _end(job)
    if not list(folder.glob("rank-*")):
        sys.exit(f"no rank came up:\n{(folder / 'output').read_text()}")
    return job.returncode == 0


def _last_sign_of_life(folder: Path) -> float:
    return max(path.stat().st_mtime for path in [folder, *folder.glob("rank-*")])


def _end(job: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            os.killpg(job.pid, how)
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                continue


def _read(folder: Path, ranks: int) -> dict[str, Result]:
    """Return the result of each test the job began, from what its ranks wrote."""
    told: dict[str, list[Result]] = {}
    for rank in range(ranks):
        path = folder / f"rank-{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            name, outcome, why = json.loads(line)
            mine = told.setdefault(name, [])
            if outcome != "began":
                mine.append(Result(outcome, f"rank {rank}: {why}" if why else ""))
    return {name: _of_all_ranks(each, ranks, folder) for name, each in told.items()}


def _of_all_ranks(each: list[Result], ranks: int, folder: Path) -> Result:
    failed = [one for one in each if one.outcome == "failed"]
    if failed:
        return Result("failed", "\n".join(one.why for one in failed))
    if len(each) < ranks:
        if (folder / "too long").exists():
            return Result("failed", "took too long")
        return Result("failed", f"the job ended:\n{(folder / 'output').read_text()[-3000:]}")
    return min(each, key=lambda one: one.outcome)  # passed, if it is only skipped on some ranks


def tell(ranks: int, results: dict[str, dict[str, Result]], verbose: bool) -> list[str]:
    """Print what happened on `ranks` ranks; return the tests that fail on "hpcdist" alone."""
    print(f"\n=== {ranks} ranks")
    print(f"{'':20}{'passed':>8}{'skipped':>8}{'failed':>8}")
    for backend, each in results.items():
        counts = Counter(result.outcome for result in each.values())
        print(f"{backend:20}{counts['passed']:8}{counts['skipped']:8}{counts['failed']:8}")
    names = sorted(set().union(*results.values()))
    absent = Result("skipped", "not run")
    outcomes = {name: [results[b].get(name, absent) for b in BACKENDS] for name in names}
    worse = [
        name
        for name, (gloo, own) in outcomes.items()
        if gloo.outcome == "passed" and own.outcome != "passed"
    ]
    for title, chosen in {
        "fail on gloo": [n for n, (gloo, _) in outcomes.items() if gloo.outcome == "failed"],
        "pass on gloo, but not on hpcdist": worse,
    }.items():
        print(f"\n{title}: {len(chosen)}")
        for name in chosen:
            gloo, own = outcomes[name]
            print(f"  {name}: {own.outcome} on hpcdist")
            for result in (own, gloo):
                if verbose and result.why:
                    print("    " + result.why.replace("\n", "\n    "))
    _tell_skips({name: own for name, (_, own) in outcomes.items() if own.outcome == "skipped"})
    return worse


def _tell_skips(skipped: dict[str, Result]) -> None:
    """Print what torch's tests themselves skip here, by the reason they give."""
    by_reason: dict[str, list[str]] = {}
    for name, result in skipped.items():
        by_reason.setdefault(result.why.removeprefix("rank 0: "), []).append(name)
    print(f"\nskipped on hpcdist: {len(skipped)}")
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        print(f"  {reason}: {len(names)}")
        print(fill(", ".join(names), 100, initial_indent="    ", subsequent_indent="    "))


def main() -> None:
    """Run the tests as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python tests/torch_suite")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)")
    parser.add_argument("--only", default="", help="a pattern in the names of tests")
    parser.add_argument("--limit", type=float, default=240, help="seconds a test may take (240)")
    parser.add_argument("--mpiexec", default="mpiexec", help="(mpiexec)")
    parser.add_argument("--verbose", action="store_true", help="print why tests failed")
    options = parser.parse_args()
    worse = []
    for ranks in options.ranks:
        results = {backend: run_all(backend, ranks, options) for backend in BACKENDS}
        worse += tell(ranks, results, options.verbose)
    sys.exit(1 if worse else 0)


main()
