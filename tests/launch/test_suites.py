"""`tests/run.sh`: a suite that fails hides none of those after it; the end tells of all."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *$FAILS*) exit 3;; esac
"""
MPIEXEC = """#!/bin/sh
[ "$1" = --version ] && echo "mpiexec of the tests" && exit
shift 2
exec env PMI_RANK=0 "$@"
"""


@pytest.fixture
def run(tmp_path):
    """Run all suites with a `python` that notes its arguments and fails where it is told to."""
    for name, text in {"python": PYTHON, "mpiexec": MPIEXEC}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "tree/tests"
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text((ROOT / "tests/run.sh").read_text())

    def run(fails):
        calls = tmp_path / "calls"
        ended = subprocess.run(
            ["bash", folder / "run.sh", tmp_path],
            env={"PATH": "/usr/bin:/bin", "CALLS": str(calls), "FAILS": fails},
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stdout, calls.read_text()

    return run


SUITES = ("tests/unit", "tests/slurm", "tests/mpi")


@pytest.mark.parametrize("fails", SUITES)
def test_a_suite_that_fails_hides_none_of_the_others(run, fails):
    code, said, called = run(fails)
    assert code == 1
    assert all(suite in called for suite in SUITES)
    summary = said.partition("=== all suites")[2]
    assert "FAILED (code 3)" in summary
    assert "passed" in summary


def test_all_suites_passing_is_success(run):
    code, said, _ = run("nothing fails")
    assert code == 0
    assert "FAILED" not in said
