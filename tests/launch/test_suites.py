"""`tests/run.sh`: a suite that fails hides none of those after it; the end tells of all."""

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

from hpcdist.transport.waiting.polling import poll

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *$FAILS*)
    echo "the words of a rank"
    echo "failed a::first" >> "$TEST_RESULTS"
    exit ${CODE:-3};;
esac
printf 'passed 7\nskipped 2\n' >> "$TEST_RESULTS"
case "$*" in *$ENDS*) while ! grep -q endless "$CALLS"; do sleep 0.1; done; kill $PPID;; esac
"""
ENDLESS = """#!/bin/sh
[ "$1" = --version ] && echo "mpiexec of the tests" && exit
echo "endless $$" >> "$CALLS"
exec sleep 1000
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
            env={
                "PATH": "/usr/bin:/bin",
                "CALLS": str(calls),
                "FAILS": fails,
                "ENDS": "nothing",
                "RANK": "0",
            }
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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_end_counts_the_tests_names_those_that_failed_and_says_how_to_report_them(run, rank):
    code, said, _ = run(fails="tests/mpi", RANK=rank)
    end = said.partition("=== all suites")[2]
    assert code == 1
    assert "\n14 passed, 1 failed, 4 skipped\n" in end
    assert re.findall("failed: (.*)", end) == ["a::first"]
    assert "/hpcdist doctor`" in end
    assert "/issues" in end


@pytest.mark.parametrize("tier", TIERS)
def test_all_suites_passing_is_success(run, tier):
    code, said, _ = run(*tier)
    assert code == 0
    assert "FAILED" not in said
    assert "report it" not in said


@pytest.mark.parametrize(("tier", "passes"), [((), False), (("rest",), True)])
def test_only_where_files_take_turns_may_a_suite_have_no_test(run, tier, passes):
    code, said, _ = run(*tier, fails="--with-mpi", CODE="5")
    assert code == (0 if passes else 1)
    assert ("FAILED (code 5)" in said) is not passes


def test_whoever_ends_the_suites_ends_those_that_run_beside(run, tmp_path):
    (tmp_path / "mpiexec").write_text(ENDLESS)
    code, _, called = run(ENDS="tests/unit")
    assert code != 0
    rank = int(re.search(r"^endless (\d+)$", called, re.M)[1])
    assert poll(lambda: not Path(f"/proc/{rank}/cmdline").exists(), 30)


def test_what_other_ranks_said_is_shown_where_tests_fail(run):
    assert run(fails="tests/mpi", RANK="1")[1].count("--- rank.1\nthe words of a rank") == 2


def test_the_usual_tests_leave_out_thorough_ones_and_all_leave_out_slow_ones_only(run):
    called = run()[2]
    assert called.count("-m not slow and not thorough ") == len(re.findall("-m pytest", called))
    assert ranks_of(called) == [(2, "openmpi"), (2, "mpich")]

    called = run("all")[2].removeprefix(called)
    assert called.count("-m not slow ") == len(re.findall("-m pytest", called))


def test_all_tests_are_run_on_one_to_four_ranks_and_thorough_ones_by_one_suite(run):
    called = run("all")[2]
    assert alone(called) == 1
    assert ranks_of(called) == [(2, "openmpi"), (4, "openmpi"), (3, "mpich")]
    on = dict(
        zip((2, 4, 3), re.findall(r"--with-mpi .*-m (.*) tests/mpi$", called, re.M), strict=True)
    )
    assert suites_of(on) == [2, 3]
    assert suites_of(on, "four_ranks") == [2, 4, 3]
    assert suites_of(on, "two_ranks") == suites_of(on, "two_ranks", "four_ranks") == [2]
    assert suites_of(on, "thorough") == suites_of(on, "thorough", "four_ranks") == [4]
    assert suites_of(on, "thorough", "two_ranks") == [2]


def suites_of(marks, *of_a_test):
    """Return on how many ranks a test with such marks is run."""
    named = {mark: mark in of_a_test for mark in ("slow", "thorough", "two_ranks", "four_ranks")}
    return [n for n, expression in marks.items() if eval(expression, {}, named)]


def test_the_rest_is_every_eighth_file_of_what_the_usual_tests_leave_out(run, tmp_path):
    for folder, name in product(("unit", "contract", "docs", "launch", "slurm", "mpi"), "abcdefgh"):
        file = tmp_path / f"tree/tests/{folder}/test_{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    rest = run("rest")[2]
    for suite, n in (("thorough --dist loadgroup", 4), ("thorough and two_ranks", 1)):
        files = re.search(f"-m not slow and {suite} (.*)", rest)[1].split()
        assert len(files) == n
        assert len({Path(file).name for file in files}) == 1
    assert len(re.findall("tests/slurm/", rest)) == 1
    assert len(re.findall("tests/mpi/", rest)) == 4


def test_numbers_of_ranks_that_are_asked_for_run_everything(run):
    called = run("all", SUITE_RANKS="3", MPICH_RANKS="1 4")[2]
    assert ranks_of(called) == [(3, "openmpi"), (1, "mpich"), (4, "mpich")]
    assert alone(called) == 0
    assert "two_ranks" not in called
