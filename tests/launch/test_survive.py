"""Real jobs of `hpcdist run --survive`: a rank dies, and the others come to their end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from environments import ENVIRONMENTS
from test_run import SOON_S, command, environment, outcome_of, processes

from hpcdist.launch.command import Family
from hpcdist.launch.launchers import find_site
from hpcdist.launch.survival import Survive
from hpcdist.runtime.process import snapshot

needs_open_mpi = pytest.mark.skipif(
    find_site(snapshot()).family is not Family.OPENMPI, reason="only Open MPI survives"
)

HEAD = """
import os, signal, sys, time
import numpy as np
import hpcdist as dist
from hpcdist.runtime import failure, mpi, reports
MPI = mpi.load_mpi()
all_ranks = MPI.COMM_WORLD.Dup()
rank = all_ranks.rank
failure.end_job_on_failure(rank)
all_ranks.Barrier()

def go_on(*dead):
    began = time.monotonic()
    try:
        while True:
            all_ranks.Allreduce(MPI.IN_PLACE, np.ones(8))
    except MPI.Exception:
        all_ranks.Revoke()
    left = all_ranks.Shrink()
    left.Barrier()
    reports.note_recovery(dead, time.monotonic() - began)
    print("went on", left.size)
    left.Barrier()
"""
"""What the ranks do without hpcdist's own recovery."""


@pytest.fixture
def survive(tmp_path, monkeypatch):
    """Run a program with `hpcdist run --survive`; nothing of the job may be left."""
    folders = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", folders)

    def survive(text, *options, nprocs=3, arguments=()):
        path = tmp_path / "program.py"
        path.write_text(HEAD + text)
        words = command("--survive", "-n", nprocs, *options, path, *arguments)
        return subprocess.run(
            words,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    yield survive
    until = time.monotonic() + SOON_S
    while (left := processes(str(tmp_path))) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []
    assert list(Path(folders).glob("hpcdist-*")) == []


WAYS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "signal SIGKILL",
    "raise ValueError('the drill')": "exit code 1",
    "sys.exit(5)": "exit code 5",
    "os._exit(0)": "exit code 0 in the middle",
    "os.abort()": "signal SIGABRT",
}


@needs_open_mpi
@pytest.mark.parametrize("victim", [pytest.param(each, marks=pytest.mark.slow) for each in (0, 2)])
@pytest.mark.parametrize("way", [pytest.param(each, marks=pytest.mark.slow) for each in WAYS])
def test_a_job_goes_on_whoever_dies_and_however(survive, way, victim):
    done = survive(f"if rank == {victim}: {way}\ngo_on({victim})")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on 2") == 2
    assert "hpcdist run: 1 of 3 processes died\n" in done.stderr
    assert WAYS[way] in done.stderr


@needs_open_mpi
@pytest.mark.parametrize("way", ["raise ValueError('drill')", "os.kill(os.getpid(), 9)"])
def test_a_process_that_fails_before_mpi_starts_ends_the_job(survive, way, monkeypatch):
    monkeypatch.setitem(globals(), "HEAD", "import os\nimport hpcdist as dist\n")
    text = f"if os.environ['OMPI_COMM_WORLD_RANK'] == '1': {way}\nprint(dist.init_parallel_env())"
    done = survive(text)
    assert done.returncode == (1 if "drill" in way else 128 + signal.SIGKILL)
    assert done.stdout == ""
    assert "hpcdist run: rank 1 ended with" in done.stderr


@needs_open_mpi
def test_a_job_goes_on_and_its_exit_code_is_that_of_those_who_are_left(survive):
    done = survive(
        """
if rank == 1:
    raise ValueError("the drill")
go_on(1)
if rank == 2:
    raise SystemExit(int(sys.argv[1]))
""",
        arguments=("0",),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on 2") == 2
    assert done.stderr.count("ValueError: the drill") == 1
    assert "1 of 3 processes died" in done.stderr


@needs_open_mpi
@pytest.mark.slow
def test_a_failure_after_a_recovery_is_that_of_the_job(survive):
    done = survive("""
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
go_on(1)
if rank == 2:
    raise SystemExit(7)
""")
    assert done.returncode == 7, done.stderr
    assert "rank 2 ended with exit code 7, and nobody has recovered from it" in done.stderr


@needs_open_mpi
@pytest.mark.slow
def test_a_death_from_which_nobody_recovers_is_no_success_but_an_orderly_end(survive):
    done = survive("""
world = dist.init_parallel_env(timeout=30)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(np.ones(10))
except dist.RankFailure as error:
    print("noticed", error.ranks)
""")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert done.stdout.count("noticed") == 2
    assert "Traceback" not in done.stderr


@needs_open_mpi
@pytest.mark.slow
def test_an_exception_is_a_death_for_the_others_under_mpirun_itself(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(f"{HEAD}\nif rank == 1: raise ValueError('the drill')\ngo_on(1)")
    site = find_site(snapshot())
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [site.mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", "3", sys.executable, path],
        env=environment({**os.environ, **as_root}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("went on 2") == 2, done.stderr
    assert done.stderr.count("ValueError: the drill") == 1


@needs_open_mpi
@pytest.mark.slow
def test_an_abort_ends_the_job(survive):
    began = time.monotonic()
    done = survive("MPI.COMM_WORLD.Abort(7) if rank == 1 else time.sleep(60)")
    assert done.returncode == 7, done.stderr
    assert time.monotonic() - began < SOON_S


@needs_open_mpi
@pytest.mark.slow
def test_a_job_below_its_fewest_ranks_is_ended_and_started_again(survive):
    done = survive(
        """
if os.environ["HPCDIST_RESTART_COUNT"] == "0":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    go_on(1)
    sys.exit("too few are left")
print("again", rank)
""",
        "--min-ranks",
        3,
        "--restarts",
        2,
    )
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2" in done.stderr
    assert done.stdout.count("again") == 3


@needs_open_mpi
@pytest.mark.slow
def test_a_spare_that_nobody_has_let_go_is_ended_with_the_job(survive):
    done = survive("if rank == 3: time.sleep(90)", "--spares", 1)
    assert done.returncode == 0, done.stderr


@needs_open_mpi
@pytest.mark.slow
def test_ctrl_c_ends_a_job_that_survives(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(f"{HEAD}print('up', flush=True)\ntime.sleep(60)")
    job = subprocess.Popen(
        command("--survive", "-n", 2, path),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(2):
        assert "up" in job.stdout.readline()
    job.send_signal(signal.SIGINT)
    began = time.monotonic()
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < SOON_S
    assert processes(str(tmp_path)) == []


@pytest.mark.skipif("MPICH" not in ENVIRONMENTS, reason="no MPICH")
def test_an_mpi_that_ends_all_ranks_is_refused_before_anything_starts(tmp_path):
    done = subprocess.run(
        command("--survive", "-n", 2, "program.py"),
        env=environment(ENVIRONMENTS["MPICH"]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--survive needs Open MPI 5, and the ranks would load MPICH" in " ".join(
        done.stderr.split()
    )


# ---- launchers that say that all is well

REPORT = """
import json, os
import sys
rank, dead = int(os.environ["PMI_RANK"]), json.loads(sys.argv[1])
report = {"process": rank, "rank": rank, "state": "ended", "recoveries": dead}
with open(f"{os.environ['HPCDIST_REPORT_DIR']}/rank-{rank}.json", "w") as file:
    json.dump(report, file)
"""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Run programs that leave a report by hand, under a launcher that always says 0."""
    monkeypatch.setenv("HPCDIST_SURVIVE", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def judged(text, recoveries, *, local, does="waits"):
        (tmp_path / "program.py").write_text(text)
        words = (sys.executable, str(tmp_path / "program.py"), recoveries)
        return outcome_of(tmp_path, words, local=local, does=does, survive=Survive())[0]

    return judged


RECOVERED = '[{"dead": [1], "seconds": 0.1}]'


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("recoveries", "code"), [(RECOVERED, 0), ("[]", 137)])
def test_a_death_counts_unless_the_reports_tell_of_a_recovery(judged, local, recoveries, code):
    program = f"import os\nif os.environ['PMI_RANK'] == '1': os.kill(os.getpid(), 9)\n{REPORT}"
    assert judged(program, recoveries, local=local).code == code


@pytest.mark.slow
def test_a_program_that_hangs_after_its_report_is_ended(judged):
    program = f"{REPORT}\nimport time\nif rank == 1: time.sleep(90)"
    outcome = judged(program, "[]", local=True)
    assert outcome.exits == {0: 0, 1: -signal.SIGTERM, 2: 0}
    assert outcome.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("local", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_lost_process_is_no_success_though_others_went_on(judged, local):
    program = f"import os, time\nif os.environ['PMI_RANK'] == '1': time.sleep(60)\n{REPORT}"
    outcome = judged(program, RECOVERED, local=local, does="kills")
    assert (outcome.code, outcome.lost) == (1, (1,))


RPC = """
import os, signal, time
import hpcdist as dist
from hpcdist import rpc

def die():
    os.kill(os.getpid(), signal.SIGKILL)

@dist.survive
def program(world):
    rpc.init_rpc()
    if world.generation == 0:
        %s
    rpc.shutdown()
    return world.nranks

print("OK", program(), flush=True)
"""
IN_RPC = {
    "the caller of a rank that dies": "world.rank == 0 and rpc.rpc_sync(2, die)",
    "all who serve": "die() if world.rank == 2 else rpc.serve() if world.rank else time.sleep(0.5)",
}


@needs_open_mpi
@pytest.mark.parametrize("who", IN_RPC)
def test_a_death_in_rpc_is_a_rank_failure_of(who, survive):
    done = survive(RPC % IN_RPC[who])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("OK 2") == 2, done.stderr
    assert "1 of 3 processes died" in done.stderr
