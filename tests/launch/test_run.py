"""Real jobs started by `hpcdist run`: their output, their signals, their ends."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from environments import ENVIRONMENTS, EVERY_MPI

from hpcdist.launch.command import Command
from hpcdist.launch.job.job import Job
from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

pytestmark = pytest.mark.skipif(find_site(snapshot()).mpiexec is None, reason="no mpiexec")

ROOT = Path(__file__).parents[2]
RANK = "int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK') or 0)"
SLEEP = "time.sleep(60)"
# Below the sleep, far above the second or two that an end takes on an idle machine.
SOON_S = 40.0


@pytest.fixture
def script(tmp_path):
    """Write a script; its ranks know their `rank` without MPI."""

    def write(*lines):
        path = tmp_path / "script.py"
        head = ("import os, signal, sys, time", f"rank = {RANK}")
        path.write_text("\n".join([*head, *lines]) + "\n")
        return str(path)

    return write


@pytest.fixture
def leaves_nothing(tmp_path, monkeypatch):
    """Fail where a process of the test, or a folder of a job, is left."""
    folders = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", folders)
    yield
    until = time.monotonic() + SOON_S
    while (left := processes(str(tmp_path))) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []
    assert [*Path(folders).glob("hpcdist-*"), *Path(folders).glob("ompi.*")] == []
    shutil.rmtree(folders, ignore_errors=True)


def processes(mark):
    """Return the command lines of all processes that contain `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in line:
                found.append(line)
    return found


def command(*words):
    return [sys.executable, "-m", "hpcdist", "run", *map(str, words)]


def environment(environ=os.environ):
    path = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    return {**environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def run(*words, environ=os.environ, **options):
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    if options["stdin"] is None:
        del options["stdin"]
    return subprocess.run(
        command(*words),
        env=environment(environ),
        capture_output=True,
        timeout=90,
        check=False,
        **options,
    )


@pytest.fixture
def start(leaves_nothing):
    """Start a job and wait until every rank has said that it is up."""
    started = []

    def start(nprocs, *words):
        job = subprocess.Popen(
            command("-n", nprocs, *words),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(job)
        for _ in range(nprocs):
            assert "up" in job.stdout.readline()
        return job

    yield start
    for job in started:
        if job.poll() is None:
            job.kill()
        job.communicate()


def test_every_line_begins_with_its_rank(script, leaves_nothing):
    done = run("-n", 3, script("print('one', rank)", "print('two', file=sys.stderr)"))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [b"[0] one 0", b"[1] one 1", b"[2] one 2"]
    assert sorted(done.stderr.splitlines()) == [b"[0] two", b"[1] two", b"[2] two"]


@pytest.mark.thorough
def test_lines_stay_whole_however_fast_they_come(script, leaves_nothing):
    path = script("for i in range(1500): print(f'{rank}:{i}:' + str(rank) * (i % 400))",
                  "print(str(rank) * 100_000)")  # fmt: skip
    done = run("-n", 4, path)
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 4 * 1501
    pattern = re.compile(r"\[(\d)\] (?:\1:\d+:)?\1*")
    assert [line[:80] for line in lines if not pattern.fullmatch(line)] == []


def test_a_single_rank_writes_what_it_writes(script, leaves_nothing):
    done = run("-n", 1, script("sys.stdout.buffer.write(b'a\\rb\\xff\\r\\nno end')"))
    assert done.stdout == b"a\rb\xff\r\nno end"


@pytest.mark.thorough
def test_labels_can_be_asked_for_and_left_out(script, leaves_nothing):
    path = script("print('x')")
    assert run("-n", 1, "--label", path).stdout == b"[0] x\n"
    assert run("-n", 2, "--no-label", path).stdout == b"x\nx\n"


@pytest.mark.thorough
def test_each_rank_has_a_log_file(script, tmp_path, leaves_nothing):
    path = script("print('out', rank)", "print('err', rank, file=sys.stderr)")
    for expected in (1, 2):
        run("-n", 2, "--log_dir", tmp_path / "log", path)
        for rank in range(2):
            lines = (tmp_path / "log" / f"workerlog.{rank}").read_text().splitlines()
            assert sorted(lines) == sorted([f"out {rank}", f"err {rank}"] * expected)
    run("-n", 2, "--log_dir", tmp_path / "log", "--log_overwrite", path)
    assert len((tmp_path / "log" / "workerlog.0").read_text().splitlines()) == 2


def test_the_ranks_are_one_mpi_job_with_their_arguments(script, leaves_nothing):
    path = script("from mpi4py import MPI", "comm = MPI.COMM_WORLD",
                  "print(comm.allreduce(comm.rank), comm.size, *sys.argv[1:])")  # fmt: skip
    done = run("-n", 3, path, "-n", "a b")
    assert sorted(done.stdout.splitlines()) == [b"[%d] 3 3 -n a b" % rank for rank in range(3)]


@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_arguments_arrive_unchanged_whatever_they_hold(script, leaves_nothing, mpi, tmp_path):
    odd = [
        ":",
        "--",
        "",
        "it's",
        'a "$HOME" `id`',
        "a\\n",
        "a\nb",
        "\x1b\t",
        "é\u2028",
        "-n",
        "3",
        "%r",
    ]
    path = script("print([os.fsencode(word) for word in sys.argv[1:]])")
    done = run("-n", 2, path, *odd, environ=ENVIRONMENTS[mpi])
    told = str([os.fsencode(word) for word in odd])
    assert sorted(done.stdout.decode().splitlines()) == [f"[0] {told}", f"[1] {told}"], done.stderr


@pytest.mark.thorough
def test_modules_are_run_too(leaves_nothing):
    done = run("-n", 2, "-m", "mpi4py.bench", "helloworld")
    assert b"I am process 1 of 2" in done.stdout


def test_input_reaches_rank_0_to_its_end_and_nobody_else(script, leaves_nothing):
    done = run("-n", 2, script("print(rank, repr(sys.stdin.read()))"), input=b"a\nb")
    assert sorted(done.stdout.splitlines()) == [b"[0] 0 'a\\nb'", b"[1] 1 ''"]


def test_input_from_a_terminal_reaches_rank_0(script, leaves_nothing):
    path = script("if rank == 0: print('got', input())")
    pid, terminal = pty.fork()
    if pid == 0:
        words = command("-n", 2, path)
        os.execve(words[0], words, environment())
    os.write(terminal, b"hello\n")
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while data := os.read(terminal, 1000):
            said += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"[0] got hello" in said


def test_the_exit_code_is_that_of_the_failing_rank(script, leaves_nothing):
    begin = time.monotonic()
    done = run("-n", 3, script("if rank == 1: sys.exit(7)", SLEEP))
    assert time.monotonic() - begin < SOON_S
    assert done.returncode == 7
    assert b"rank 1 ended with exit code 7" in done.stderr


def test_a_rank_that_raises_ends_the_job_and_shows_its_traceback(script, leaves_nothing):
    begin = time.monotonic()
    done = run("-n", 3, script("if rank == 2: raise ValueError('boom')", SLEEP))
    assert time.monotonic() - begin < SOON_S
    assert done.returncode == 1
    assert b"[2] ValueError: boom" in done.stderr


def test_a_rank_that_is_killed_ends_the_job(script, leaves_nothing):
    begin = time.monotonic()
    done = run("-n", 3, script("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)", SLEEP))
    assert time.monotonic() - begin < SOON_S
    assert done.returncode == 128 + signal.SIGKILL
    assert b"rank 0 ended with signal SIGKILL" in done.stderr


@pytest.mark.thorough
def test_a_rank_that_is_killed_inside_mpi_ends_the_job(script, leaves_nothing):
    lines = ("from mpi4py import MPI", "MPI.COMM_WORLD.Barrier()",
             "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
             "MPI.COMM_WORLD.Barrier()")  # fmt: skip
    done = run("-n", 3, script(*lines))
    assert done.returncode == 128 + signal.SIGKILL


@pytest.mark.thorough
def test_an_abort_carries_its_code(script, leaves_nothing):
    lines = ("from mpi4py import MPI", "if rank == 1: MPI.COMM_WORLD.Abort(5)", SLEEP)
    done = run("-n", 3, script(*lines))
    assert done.returncode == 5


@pytest.mark.thorough
def test_ranks_that_ignore_the_request_to_end_are_ended_by_force(script, leaves_nothing):
    lines = ("signal.signal(signal.SIGTERM, signal.SIG_IGN)",
             "time.sleep(0.5)", "if rank == 1: sys.exit(3)", SLEEP)  # fmt: skip
    begin = time.monotonic()
    assert run("-n", 2, script(*lines)).returncode == 3
    assert time.monotonic() - begin < SOON_S


@pytest.mark.thorough
def test_what_cannot_be_run_says_so(leaves_nothing):
    assert run("-n", 2, "nonexistent.py").returncode == 2
    done = run("-n", 2, "-m", "no_such_module_here")
    assert done.returncode == 1
    assert b"No module named no_such_module_here" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_end_ends_everything(script, start, number):
    job = start(2, script("print('up')", SLEEP))
    job.send_signal(number)
    assert job.wait(SOON_S) == 128 + number


def test_sigterm_leaves_ranks_the_time_to_save(script, start):
    lines = ("got = []", "signal.signal(signal.SIGTERM, lambda *_: got.append(1))",
             "print('up')", "while not got: time.sleep(0.01)",
             "time.sleep(1)", "print('saved', len(got))")  # fmt: skip
    job = start(2, script(*lines))
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=SOON_S)
    assert sorted(said.splitlines()) == ["[0] saved 1", "[1] saved 1"]
    assert job.returncode == 0


IMPATIENT = """
import sys
from hpcdist.launch import launch
from hpcdist.launch.job import job
job.TERM_GRACE_S = 1.0
sys.argv[1:] = {words}
launch()
"""


def test_sigterm_kills_ranks_that_do_not_end_and_says_so(script, leaves_nothing):
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "print('up')", SLEEP)
    program = IMPATIENT.format(words=["-n", "2", path])
    job = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert [job.stdout.readline()[4:] for _ in range(2)] == ["up\n", "up\n"]
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=SOON_S)
    assert "ranks 0, 1 had not ended" in said
    assert job.returncode == 128 + signal.SIGTERM


def test_user_signals_reach_every_rank_once(script, start):
    lines = ("got = []", "signal.signal(signal.SIGUSR1, lambda *_: got.append(1))",
             "print('up')", "while not got: time.sleep(0.01)",
             "time.sleep(0.3)", "print('got', len(got))")  # fmt: skip
    job = start(3, script(*lines))
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=SOON_S)
    assert sorted(said.splitlines()) == [f"[{rank}] got 1" for rank in range(3)]
    assert job.returncode == 0


def test_nothing_outlives_a_launcher_that_is_killed(script, start):
    job = start(2, script("print('up')", SLEEP))
    job.kill()
    job.wait(SOON_S)  # `leaves_nothing` looks for the rest


def test_a_reader_that_leaves_ends_the_job(script, start):
    job = start(2, script("print('up')", "time.sleep(1)", "while True: print('more')"))
    job.stdout.close()
    assert job.wait(20) == 128 + signal.SIGPIPE
    job.stdout = open(os.devnull)  # noqa: SIM115


@pytest.mark.thorough
def test_a_failing_job_is_started_again_as_often_as_allowed(script, leaves_nothing):
    path = script("again = int(os.environ['HPCDIST_RESTART_COUNT'])", "print('try', again)",
                  "sys.exit(0 if again == 2 else 4)")  # fmt: skip
    done = run("-n", 1, "--max_restart", 3, path)
    assert done.returncode == 0
    assert done.stdout.split() == [b"try", b"0", b"try", b"1", b"try", b"2"]
    assert run("-n", 1, "--max_restart", 1, path).returncode == 4


@pytest.mark.thorough
def test_a_job_inside_a_job_is_a_job_of_its_own(script, leaves_nothing):
    path = script("from mpi4py import MPI", "print('size', MPI.COMM_WORLD.size)")
    inner = " ".join(command("-n", 1, path))
    outer = script("from mpi4py import MPI", "MPI.COMM_WORLD.Barrier()",
                   "if len(sys.argv) > 1: print(os.popen(sys.argv[1]).read())",
                   "else: print('size', MPI.COMM_WORLD.size)")  # fmt: skip
    done = run("-n", 2, outer, inner)
    assert done.stdout.count(b"size 1") == 2


# ---- launchers that say that all is well


FORGIVING = """
import os, signal, subprocess, sys, time
ranks = [subprocess.Popen(sys.argv[2:], env={**os.environ, "PMI_RANK": str(rank)})
         for rank in range(3)]
if sys.argv[1] == "kills":
    time.sleep(0.5)
    ranks[1].kill()
for each in ranks:
    each.wait()
"""
"""A launcher that ends with 0 whatever has become of its ranks, as an mpiexec that lost a node."""


def outcome_of(directory, program, *, local, does="waits", size=3, survive=None):
    def command(program):
        argv = (sys.executable, "-c", FORGIVING, does, *program)
        return Command(argv, {}, (), size, local, "")

    said = []
    job = Job(
        command,
        program,
        environment(),
        lambda *each: said.append(each),
        directory=str(directory),
        survive=survive,
    )
    return job.run(), said


@pytest.mark.parametrize("local", [True, False])
def test_all_is_well_only_where_every_rank_has_said_so(script, leaves_nothing, tmp_path, local):
    path = script("sys.stderr.write('no newline')")
    outcome, said = outcome_of(tmp_path, (sys.executable, path), local=local)
    assert (outcome.code, outcome.lost) == (0, ())
    assert sorted(outcome.exits.items()) == [(0, 0), (1, 0), (2, 0)]
    assert b"".join(data.strip() for _, _, data in said) == 3 * b"no newline"


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", (1, -9)),
        ("sys.exit(5)", (1, 5)),
    ],
)
def test_a_rank_that_fails_is_known_whatever_its_launcher_says(
    script, leaves_nothing, tmp_path, local, line, failed
):
    path = script(f"if rank == 1: {line}")
    outcome, _ = outcome_of(tmp_path, (sys.executable, path), local=local)
    assert outcome.launcher == 0
    assert outcome.first == failed
    assert outcome.code == (failed[1] if failed[1] > 0 else 128 - failed[1])


@pytest.mark.thorough
@pytest.mark.parametrize("local", [True, False])
def test_a_rank_that_is_lost_is_named_whatever_its_launcher_says(
    script, leaves_nothing, tmp_path, local
):
    path = script("if rank == 1: time.sleep(60)")
    outcome, _ = outcome_of(tmp_path, (sys.executable, path), local=local, does="kills")
    assert outcome.launcher == 0
    assert (outcome.code, outcome.lost) == (1, (1,))


@pytest.mark.parametrize("local", [True, False])
def test_ranks_that_were_never_started_are_missed(script, leaves_nothing, tmp_path, local):
    outcome, _ = outcome_of(tmp_path, (sys.executable, script("")), local=local, size=5)
    assert (outcome.code, outcome.lost) == (1, (3, 4))


LEAVES = (
    "import hpcdist as dist",
    "world = dist.init_parallel_env(timeout=60)",
    "dist.barrier()",
    "if world.rank == 1: os._exit(0)",
    "dist.barrier()",
)


@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_a_rank_that_leaves_without_a_word_is_no_success(script, leaves_nothing, mpi):
    done = run("-n", 2, script(*LEAVES), environ=ENVIRONMENTS[mpi])
    assert done.returncode != 0
    assert b"hpcdist run: " in done.stderr


@pytest.mark.skipif(
    find_site(snapshot()).family != "openmpi", reason="only Open MPI ends the other ranks then"
)
def test_a_rank_that_ends_without_ending_mpi_is_named(script, leaves_nothing):
    lines = "from mpi4py import MPI", "if rank == 1: os._exit(0)", "MPI.COMM_WORLD.Barrier()"
    done = run("-n", 2, script(*lines))
    assert done.returncode == 1
    assert b"rank 1 ended with exit code 0, but without ending MPI" in done.stderr


def test_the_last_words_of_a_rank_are_its_error_and_the_lines_of_the_program(script):
    path = script(
        "import numpy as np, hpcdist as dist",
        "dist.init_parallel_env()",
        "if dist.get_rank() == 0:",
        "    dist.all_reduce(np.ones(3))",
    )
    done = run("-n", 2, path)
    assert done.returncode == 1
    said = done.stderr.decode()
    error, where, line, *_ = [each[4:] for each in said.splitlines() if each.startswith("[0] ")]
    assert error.startswith("hpcdist.RemoteError: rank 1 has ended and did not join")
    assert where.startswith(f'  File "{path}", line')
    assert line == "    dist.all_reduce(np.ones(3))"
    assert "MPI_ABORT" not in said.upper()


def test_a_program_alone_ends_by_its_error_and_nothing_else(script):
    path = script(
        "import hpcdist as dist",
        "dist.init_parallel_env()",
        'dist.all_reduce(1.0, "nonsense")',
    )
    done = subprocess.run(
        [sys.executable, path], env=environment(), capture_output=True, check=False
    )
    assert done.returncode == 1
    said = done.stderr.decode()
    assert said.startswith("hpcdist.UsageError: ")
    assert "HPCDIST_TRACEBACK=full" in said
    assert "abort" not in said


def test_so_it_is_before_the_program_has_begun_hpcdist(script):
    path = script("import numpy as np, hpcdist as dist", "dist.all_reduce(np.ones(3))")
    done = run("-n", 2, path)
    assert done.returncode == 1
    said = done.stderr.decode().splitlines()
    for rank in (0, 1):
        error, where, line, *_ = [each[4:] for each in said if each.startswith(f"[{rank}] ")]
        assert error.startswith("hpcdist.UsageError: ")
        assert "init_parallel_env() first" in error
        assert where.startswith(f'  File "{path}", line')
        assert line == "    dist.all_reduce(np.ones(3))"


def test_a_program_that_tells_its_errors_itself_goes_on_doing_so(script):
    path = script(
        "import sys, hpcdist as dist",
        "sys.excepthook = lambda kind, error, trace: print('told:', kind.__name__)",
        "dist.barrier()",
    )
    done = subprocess.run(
        [sys.executable, path], env=environment(), capture_output=True, check=False
    )
    assert (done.stdout, done.stderr) == (b"told: UsageError\n", b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_job_runs_where_a_standard_stream_is_closed(tmp_path, closed):
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'done')!r}, 'w').close()\nprint('words')\n")
    words = ["bash", "-c", f'"$@" {closed}', "-", *command("-n", 1, program)]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    assert done.stdout == ("" if closed == ">&-" else "words\n")
