"""Drills: a rank fails in some way under a plain `mpiexec`, and the whole job ends.

Each drill is a small script that all ranks run, once with every MPI that is here.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from environments import ENVIRONMENTS, EVERY_MPI, ROOT
from tiers import first_of

from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

RANKS = 3
SOON_S = 40.0
"""Far above the second or two that an end takes, below the time limit of an operation."""

HEAD = """
import os, signal, sys, time
import numpy as np
import hpcdist as dist
world = dist.init_parallel_env(timeout=60)
rank = world.rank
dist.barrier()

def fails():
    print(f"failing at {time.time()}", flush=True)
"""


IN_JIT = """
try:
    import jax, hpcdist.jax as hj
    add_up = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: hj.all_reduce(y), x))
except ModuleNotFoundError:
    add_up = lambda x: dist.all_reduce(np.ones(1))
add_up(1.0)
import gc
gc.disable()  # JAX has Python call it back then, where an interrupt is lost
# ready
add_up(1.0) if rank else time.sleep(60)
"""


@pytest.fixture(params=EVERY_MPI)
def start(request, tmp_path):
    """Start ``mpiexec -n 3`` of a script that is given as text; end what is left of it."""
    environ = ENVIRONMENTS[request.param]
    started = []

    def start(text):
        script = tmp_path / "drill.py"
        script.write_text(HEAD + text)
        options = Options((sys.executable, str(script)), nprocs=RANKS, here=True, label=False)
        command = build_command(options, find_site(environ), environ)
        env = {name: value for name, value in environ.items() if name not in command.unset}
        env |= {**command.env, "PYTHONPATH": str(ROOT)}
        job = subprocess.Popen(
            command.argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(job)
        return job

    yield start
    for job in started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


@pytest.fixture
def run(start):
    """Run a drill to its end, which must come soon after its failure."""

    def run(text):
        job = start(text)
        out, err = job.communicate(timeout=120)
        print(err)  # shown where the test fails
        failed_at = re.search(r"failing at ([\d.]+)", out)
        if failed_at is not None:
            assert time.time() - float(failed_at[1]) < SOON_S
        return job.returncode, out, err

    return run


pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")


def test_an_uncaught_exception_is_shown_once_and_ends_the_job(run):
    code, _, err = run("""
if rank == 1:
    fails()
    raise RuntimeError("the drill")
dist.all_reduce(np.ones(1))
""")
    assert code != 0
    assert err.count("RuntimeError: the drill") == 1
    assert re.search(r"^\[rank 1\] RuntimeError: the drill", err, re.MULTILINE)
    assert re.search(r"^\[rank 1\] Traceback", err, re.MULTILINE)


@pytest.mark.thorough
def test_an_exception_in_a_forked_child_ends_only_the_child(run):
    code, out, err = run("""
child = os.fork() if rank == 1 else None
if child == 0:
    raise RuntimeError("the drill")
if rank == 1:
    print("ended by", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
x = np.ones(1)
dist.all_reduce(x)
assert x[0] == world.nranks
""")
    assert code == 0
    assert "ended by 1" in out
    assert err.count("RuntimeError: the drill") == 1


def test_a_program_that_a_rank_starts_is_not_the_same_rank_again(run):
    code, out, _ = run("""
import subprocess
program = "import hpcdist as dist; dist.init_parallel_env()"
if rank == 1:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    if "PMIX_NAMESPACE" in os.environ:
        assert f"process {os.getpid()}, which has started this one, is rank 1" in done.stderr
    own = [sys.executable, "-m", "hpcdist", "run", "-n", "1", sys.executable, "-c", program]
    subprocess.run(own, check=True)
x = np.ones(1)
dist.all_reduce(x)
print("reduced", x[0])
""")
    assert code == 0
    assert out.count("reduced 3.0") == RANKS


def test_an_exception_ends_the_job_while_the_others_compute(run):
    code, _, err = run("""
if rank == 2:
    fails()
    1 / 0
time.sleep(60)
""")
    assert code != 0
    assert "[rank 2] ZeroDivisionError" in err


def test_sys_exit_is_a_remote_error_for_those_who_wait(run):
    code, out, _ = run("""
if rank == 1:
    fails()
    sys.exit(3)
try:
    dist.all_reduce(np.ones(1))
except dist.RemoteError as error:
    print(f"noticed {error.rank}", flush=True)
    raise
""")
    assert code != 0
    assert "noticed 1" in out


def test_a_rank_that_ends_early_is_a_remote_error_for_those_who_wait(run):
    code, out, _ = run("""
if rank == 0:
    fails()
    sys.exit(0)
try:
    dist.all_reduce(np.ones(1))
except dist.RemoteError as error:
    print(f"noticed {error.rank}: {error}", flush=True)
""")
    assert out.count("noticed 0: rank 0 has ended and did not join all_reduce") == RANKS - 1
    assert code == 0


@pytest.mark.thorough
def test_asynchronous_operations_notice_a_rank_that_has_ended(run):
    code, out, _ = run("""
if rank == 2:
    fails()
    sys.exit(0)
works = [dist.all_reduce(np.ones(1), sync_op=False) for _ in range(2)]
for work in works:
    try:
        work.wait()
    except dist.RemoteError as error:
        print(f"noticed {error.rank}", flush=True)
""")
    assert out.count("noticed 2") == 2 * (RANKS - 1)
    assert code == 0


def test_a_killed_rank_ends_the_job(run):
    code, _, _ = run("""
if rank == 1:
    fails()
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(np.ones(1))
""")
    assert code != 0


def test_the_end_of_a_rank_is_a_remote_error_inside_of_jit(run):
    pytest.importorskip("jax")
    code, out, _ = run("""
import jax, hpcdist.jax as hj
step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: hj.all_reduce(y), x))
step(1.0)
if rank == 1:
    fails()
    sys.exit(0)
try:
    step(1.0)
except dist.RemoteError as error:
    print(f"noticed {error.rank}, and {jax.jit(lambda x: x + 1)(1.0)}", flush=True)
""")
    assert out.count("noticed 1, and 2.0") == RANKS - 1
    assert code == 0


def test_a_rank_killed_inside_of_jit_ends_the_job(run):
    pytest.importorskip("jax")
    code, _, _ = run("""
import jax, hpcdist.jax as hj
def dies(x):
    if rank == 1:
        fails()
        os.kill(os.getpid(), signal.SIGKILL)
    return x

@jax.jit
def step(x):
    x = jax.pure_callback(dies, x, hj.all_reduce(x))
    return hj.all_reduce(x)

step(np.ones(3, "f4"))
""")
    assert code != 0


@pytest.mark.parametrize(
    "busy",
    first_of(
        [
            "dist.all_reduce(np.ones(1)) if rank else time.sleep(60)",
            "dist.recv(np.ones(1), 0) if rank else time.sleep(60)",
            IN_JIT,
            "dist.all_reduce(np.ones(1), sync_op=False).wait() if rank else time.sleep(60)",
            "time.sleep(60)",
        ]
    ),
)
def test_ctrl_c_ends_all_ranks_whatever_they_do(start, busy):
    before, _, busy = busy.rpartition("# ready\n")
    job = start(f"""{before}
os.write(1, b"ready\\n")
{busy}
""")
    for _ in range(RANKS):
        assert "ready" in job.stdout.readline()
    time.sleep(0.3)
    began = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    job.communicate(timeout=60)
    assert time.monotonic() - began < SOON_S
    assert job.returncode != 0


@pytest.mark.thorough
def test_works_that_nobody_waited_for_do_not_disturb_the_end(run):
    code, out, err = run("""
x = np.ones(100_000)
works = [dist.all_reduce(x, sync_op=False) for _ in range(10)]
dist.isend(np.ones(3), (rank + 1) % 3)
dist.irecv(np.ones(3), (rank - 1) % 3)
group = dist.new_group()
dist.all_gather_object([], "text", group, sync_op=False)
print("end of script", flush=True)
""")
    assert code == 0, err
    assert out.count("end of script") == RANKS
    assert "Error" not in err


@pytest.mark.thorough
def test_the_world_ends_cleanly_with_and_without_destroy(run):
    code, out, err = run("""
group = dist.new_group([0, 1])
if rank != 2:
    dist.barrier(group)
if len(sys.argv) == 1:
    dist.destroy_process_group()
    dist.init_parallel_env()
    dist.barrier()
print("end of script", flush=True)
""")
    assert code == 0, err
    assert out.count("end of script") == RANKS


@pytest.mark.parametrize(
    "told",
    first_of(
        [
            ("SLURM_NTASKS", "srun"),
            ("OMPI_COMM_WORLD_SIZE", "mpiexec"),
            ("PMI_SIZE", "mpiexec"),
        ]
    ),
    ids=str,
)
def test_a_launcher_of_another_mpi_is_refused_instead_of_singletons(told):
    variable, remedy = told
    names = ("OMPI_", "PMI", "PMIX_", "SLURM_", "PALS_")
    env = {name: value for name, value in snapshot().items() if not name.startswith(names)}
    script = "import hpcdist as dist; print(dist.init_parallel_env().nranks)"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=env | {variable: "4", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert f"{variable}=4 says that this job has 4 ranks" in ended.stderr
    assert remedy in ended.stderr
    allowed = subprocess.run(
        [sys.executable, "-c", script],
        env=env | {variable: "4", "PYTHONPATH": str(ROOT), "HPCDIST_ALLOW_SINGLETON": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert allowed.stdout.strip() == "1", allowed.stderr
