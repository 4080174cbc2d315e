"""`tests/run.sh`: a suite that fails hides none of those after it; the end tells of all."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *$FAILS*) echo "the words of a rank"; exit 3;; esac
"""
MPIEXEC = """#!/bin/sh
[ "$1" = --version ] && echo "mpiexec of the tests" && exit
echo "ranks: $2 of ${MPI4PY_MPIABI:-openmpi}" >> "$CALLS"
shift 2
exec env PMI_RANK="$RANK" "$@"
"""
TIERS = ((), ("all",))


@pytest.fixture
def run(tmp_path):
    """Run suites with a `python` that notes its arguments and fails where it is told to."""
    folder = tmp_path / "tree/tests"
    mpich = tmp_path / "tree/.mpich/bin"
    for path in (folder, mpich):
        path.mkdir(parents=True)
    (folder / "run.sh").write_text((ROOT / "tests/run.sh").read_text())
    for path, text in {
        tmp_path / "python": PYTHON,
        tmp_path / "mpiexec": MPIEXEC,
        mpich / "mpiexec": MPIEXEC,
    }.items():
        path.write_text(text)
        path.chmod(0o755)

    def run(*arguments, fails="nothing fails", **environ):
        calls = tmp_path / "calls"
        ended = subprocess.run(
            ["bash", folder / "run.sh", tmp_path, *arguments],
            env={"PATH": "/usr/bin:/bin", "CALLS": str(calls), "FAILS": fails, "RANK": "0"}
            | environ,
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stdout, calls.read_text()

    return run


SUITES = ("tests/unit", "tests/slurm", "tests/mpi")


def ranks_of(called):
    """Return on how many ranks a launcher has run tests/mpi, and of which MPI it was."""
    return [(int(n), mpi) for n, mpi in re.findall(r"^ranks: (\d+) of (\w+)$", called, re.M)]


def alone(called):
    """Return how often tests/mpi was run on one rank, which needs no launcher."""
    return len(re.findall("-n 2 .*--with-mpi tests/mpi$", called, re.M))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fails", SUITES)
def test_a_suite_that_fails_hides_none_of_the_others(run, fails, tier):
    code, said, called = run(*tier, fails=fails)
    assert code == 1
    assert all(suite in called for suite in SUITES)
    summary = said.partition("=== all suites")[2]
    assert "FAILED (code 3)" in summary
    assert "passed" in summary


@pytest.mark.parametrize("tier", TIERS)
def test_all_suites_passing_is_success(run, tier):
    code, said, _ = run(*tier)
    assert code == 0
    assert "FAILED" not in said


def test_what_other_ranks_said_is_shown_where_tests_fail(run):
    assert run(fails="tests/mpi", RANK="1")[1].count("--- rank.1\nthe words of a rank") == 2


def test_the_usual_tests_leave_out_thorough_ones_and_all_leave_out_slow_ones_only(run):
    called = run()[2]
    assert called.count("-m not slow and not thorough ") == len(re.findall("-m pytest", called))
    assert ranks_of(called) == [(2, "openmpi"), (2, "mpich")]

    called = run("all")[2].removeprefix(called)
    assert called.count("-m not slow ") == len(re.findall("-m pytest", called))


def test_all_tests_are_run_on_one_to_four_ranks_and_some_on_two_only(run):
    called = run("all")[2]
    assert alone(called) == 1
    assert ranks_of(called) == [(2, "openmpi"), (4, "openmpi"), (3, "mpich")]
    marks = re.findall(r"--with-mpi .*-m (.*) tests/mpi$", called, re.M)
    assert marks == ["not slow", *["not slow and not two_ranks"] * 2]


def test_numbers_of_ranks_that_are_asked_for_run_everything(run):
    called = run("all", SUITE_RANKS="3", MPICH_RANKS="1 4")[2]
    assert ranks_of(called) == [(3, "openmpi"), (4, "mpich")]
    assert alone(called) == 1
    assert "two_ranks" not in called
