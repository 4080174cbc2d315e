"""Run the usual tests as on other machines, one after the other: make test-elsewhere.

    python tests/elsewhere.py                    every condition, several of them on one machine
    python tests/elsewhere.py young no-shm+C     these, the last two together
    python tests/elsewhere.py turn               the one whose turn it is at this commit, and of its
                                                 tests those that it is most likely to break
    python tests/elsewhere.py young -- tests/launch tests/mpi/test_flight.py -k ring
    python tests/elsewhere.py --list             name them

The conditions are in `tests/conditions.py`. What cannot be had on this machine is skipped with the
reason. Clones, which have environments of their own, are kept in .cache/elsewhere, and logs there.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from conditions import CONDITIONS, KEPT, ROOT, NotHereError, chosen, clean_installs, refusal
from rich.console import Console
from rich.table import Table

USUAL = "not slow and not thorough"
LIMIT_S = 3600
BASE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
}


# ---- clones


def do(*command, **more):
    """Run a command, and end with what it said if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **more
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))}:\n{done.stdout.decode(errors='replace')}"
        )
    return done.stdout


def git(*arguments, cwd=ROOT):
    return do("git", *arguments, cwd=cwd)


def python_of(clone):
    """Return the interpreter of a clone."""
    if not clone.pythons:
        return sys.executable
    here = clean_installs.pythons()
    for version in clone.pythons:
        if version in here:
            return here[version]
    raise NotHereError(f"no Python {' or '.join(clone.pythons)} is here")


def set_up(condition, python):
    """Return a clone's folder: what is here now, committed or not, as `make` sets it up."""
    clone = condition.clone
    folder = KEPT / (clone.folder or condition.name)
    if not (folder / ".git").exists():
        git("clone", "--quiet", "--shared", ROOT, folder)
    git("fetch", "--quiet", ROOT, "HEAD", cwd=folder)
    git("checkout", "--quiet", "--force", "--detach", "FETCH_HEAD", cwd=folder)
    git("clean", "--quiet", "--force", "-d", cwd=folder)
    changed = git("ls-files", "-z", "--modified", "--others", "--exclude-standard").decode()
    for each in filter(None, changed.split("\0")):
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / each).exists():
            shutil.copy2(ROOT / each, folder / each)
        else:
            (folder / each).unlink()
    environ = dict(clone.environ)
    if constraint := environ.pop("constraint", None):
        environ["PIP_CONSTRAINT"] = str(KEPT / f"{condition.name}.txt")
        Path(environ["PIP_CONSTRAINT"]).write_text(constraint)
    environ = {**os.environ, **environ}
    do("make", f"PYTHON={python}", ".venv/.test", ".mpich/.done", cwd=folder, env=environ)
    if clone.newest:
        pip = (folder / ".venv/bin/python", "-m", "pip", "install", "--quiet", "--upgrade")
        do(*pip, *clone.newest.split(), cwd=folder)
    return folder


# ---- suites

OF_RANK = """
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
[ "$rank" = 0 ] || exec >"$LOG.rank$rank" 2>&1
exec "$@"
"""


def commands(suites, folder, tests):
    """Return a command, and the variables it needs, by the suites that have one of these tests."""
    bin_ = folder / ".venv/bin"
    options = [each for each in tests if not each.startswith("tests/")]
    paths = [each for each in tests if each.startswith("tests/")]
    of_ranks = [each for each in paths if each.startswith("tests/mpi")]
    of_one = [each for each in paths if each not in of_ranks]
    if not paths:
        of_ranks = ["tests/mpi"]
        of_one = ["tests/unit", "tests/contract", "tests/docs", "tests/launch"]
    pytest = [str(bin_ / "python"), "-m", "pytest", "-q", "--color=no", "-m", USUAL, *options]
    ranks = ["-n", "2", "sh", "-c", OF_RANK, "-", *pytest, "--with-mpi", "-p", "no:cacheprovider"]
    contract = of_ranks if paths else ["tests/mpi/test_contract.py"]
    site = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder / ".mpich/lib")}
    found = {
        "process": (of_one, [*pytest, "-n", "2", "--dist", "loadgroup"], {}),
        "openmpi": (of_ranks, [str(bin_ / "mpiexec"), *ranks], {}),
        "mpich": (contract, [str(folder / ".mpich/bin/mpiexec"), *ranks], site),
    }
    wanted = {name: each for name, each in found.items() if each[0] and name in suites}
    if absent := [command[0] for _, command, _ in wanted.values() if not Path(command[0]).exists()]:
        raise RuntimeError(f"no {' and no '.join(absent)}")
    return {
        name: ([*command, *which], {**site, "PATH": f"{bin_}:{os.environ['PATH']}"})
        for name, (which, command, site) in wanted.items()
    }


def run(commands, logs, folder):
    """Run suites beside each other into their logs; return the exit codes, None if too long."""
    began = time.monotonic()
    running = {}
    try:
        for name, (command, environ) in commands.items():
            with logs[name].open("wb") as out:
                running[name] = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, **BASE, **environ, "LOG": str(logs[name])},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        for each in running.values():
            with suppress(subprocess.TimeoutExpired):
                each.wait(max(0, LIMIT_S - (time.monotonic() - began)))
        return {name: each.poll() for name, each in running.items()}
    finally:
        for each in running.values():
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)


def counts(log):
    """Return how many tests passed, failed and were skipped, by the last line that tells."""
    text = log.read_text(errors="replace")
    last = [line for line in text.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    told = re.findall(r"(\d+) (passed|failed|errors?|skipped)", last[-1]) if last else []
    total = Counter()
    for n, what in told:
        total["failed" if what.startswith("error") else what] += int(n)
    return total


def show_failure(log, code):
    """Print what a suite said that failed."""
    how = "too long" if code is None else f"exit code {code}"
    print(f"\n--- {log.relative_to(ROOT)}: {how}")
    for each in sorted(log.parent.glob(f"{log.name}*")):
        lines = each.read_text(errors="replace").splitlines()
        kept = [line for line in lines if not line.startswith("SKIPPED")]
        print("\n".join([f"--- {each.name}", *kept[-400:]]), flush=True)


class Ready(NamedTuple):
    """What a condition needs on this machine."""

    environ: Mapping[str, str]
    wrapper: Sequence[str]
    python: str | None  # of its clone


def ready(condition):
    """Return what a condition needs; NotHereError: this machine cannot have it."""
    environ, wrapper = (
        each() if callable(each) else each for each in (condition.environ, condition.wrapper)
    )
    if wrapper and (reason := refusal([*wrapper, "true"])):
        raise NotHereError(reason)
    return Ready(environ, wrapper, condition.clone and python_of(condition.clone))


def examine(name, conditions, tests):
    """Run the tests under conditions and what `ready` said; return the counts and what is ill."""
    folder, suites = ROOT, {"process", "openmpi", "mpich"}
    for condition, its in conditions:
        if condition.clone:
            folder = set_up(condition, its.python)
        suites.intersection_update(condition.suites.split())
    environ = {key: value for _, its in conditions for key, value in its.environ.items()}
    wrapper = [word for _, its in conditions for word in its.wrapper]
    planned = {
        suite: ([*wrapper, *command], {**more, **environ})
        for suite, (command, more) in commands(suites, folder, tests).items()
    }
    folder_of_logs = KEPT / "logs"
    folder_of_logs.mkdir(parents=True, exist_ok=True)
    logs = {suite: folder_of_logs / f"{name}.{suite}" for suite in planned}
    for log in logs.values():
        for old in log.parent.glob(f"{log.name}*"):
            old.unlink()
    codes = {}
    for beside in (("process", "openmpi"), ("mpich",)):
        now = {suite: planned[suite] for suite in beside if suite in planned}
        codes |= run(now, logs, folder)
    for suite in (ill := [suite for suite, code in codes.items() if code != 0]):
        show_failure(logs[suite], codes[suite])
    total = sum((counts(log) for log in logs.values()), Counter())
    return total, "; ".join(f"{suite}: {logs[suite].relative_to(ROOT)}" for suite in ill)


def turn():
    """Return the condition whose turn it is: the commit tells."""
    having = [each for each in CONDITIONS if each.turn]
    return having[int(git("rev-parse", "HEAD")[:12], 16) % len(having)]


def main(arguments):
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, tests = arguments[:at], arguments[at + 1 :]
    if names == ["--list"]:
        for each in CONDITIONS:
            print(f"{each.name:16} {each.stands_for}")
        return 0
    if names == ["turn"]:
        which = turn()
        names, tests = [which.name], tests or which.turn.split()
        print(f"at this commit: {which.stands_for} (make test-elsewhere CONDITIONS={which.name})")
    rows = []
    for group in chosen(names):
        rows += look(group, tests)
    table = Table(
        "condition", "result", "passed", "failed", "skipped", "s", "what it stands for, or why"
    )
    for row in rows:
        table.add_row(*row)
    Console(width=max(120, shutil.get_terminal_size().columns)).print(table)
    return int(any(row[1] == "FAILED" for row in rows))


def look(group, tests):
    """Run the tests where all conditions of a group hold that can; return rows of the table."""
    here, rows = [], []
    for each in group:
        try:
            here.append((each, ready(each)))
        except NotHereError as reason:
            rows.append((each.name, "skipped", "", "", "", "", str(reason)))
    if here:
        name = "+".join(each.name for each, _ in here)
        stands_for = "; ".join(each.stands_for for each, _ in here)
        print(f"\n=== {name}: {stands_for}", flush=True)
        began, total = time.monotonic(), Counter()
        try:
            total, ill = examine(name, here, tests)
        except RuntimeError as error:
            ill = f"it could not be set up: {error}"
        figures = [str(total[what]) for what in ("passed", "failed", "skipped")]
        took = f"{time.monotonic() - began:.0f}"
        rows.append((name, "FAILED" if ill else "passed", *figures, took, ill or stands_for))
    for row in rows:
        print(*row, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
