"""Programs that start or end MPI themselves, with every MPI, on one rank and on two."""

import subprocess
import sys

import pytest
from environments import ENVIRONMENTS, ROOT
from tiers import first_of

from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site

pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")

HEAD = """
import mpi4py
{settings}
import numpy as np
import hpcdist as dist
from mpi4py import MPI

def told(act, *said):
    try:
        act()
    except dist.UsageError as error:
        assert all(each in str(error) for each in said), error
    else:
        raise AssertionError("not refused")
"""
USED = """
world = dist.init_parallel_env(timeout=60)
half = dist.new_group()
x = np.ones(1 << 18)
dist.all_reduce(x)
dist.all_reduce(x, group=half, sync_op=False).wait()
work = dist.isend(x[:10], world.rank)
dist.recv(x[:10].copy(), world.rank)
work.wait()
assert x[0] == world.nranks ** 2
"""
AFTER = """
for act in (
    lambda: dist.all_reduce(x),
    lambda: dist.all_reduce(x, group=half, sync_op=False),
    dist.barrier,
    dist.init_parallel_env,
):
    told(act, "MPI has ended in this process", "take MPI.Finalize() out of the program")
assert dist.simulate(2, dist.get_rank) == [0, 1]
"""


def jobs():
    """Yield each MPI with one rank and with two; all but the first with two are thorough."""
    for name in ENVIRONMENTS:
        for n in (1, 2):
            usual = (name, n) == (next(iter(ENVIRONMENTS)), 2)
            marks = () if usual else pytest.mark.thorough
            yield pytest.param((name, n), marks=marks, id=f"{name}, {n}")


@pytest.fixture(params=jobs())
def run(request, tmp_path):
    """Run a program on the ranks; it must end well and print "good" once for each."""
    name, n = request.param
    environ = ENVIRONMENTS[name]

    def run(text, settings=""):
        script = tmp_path / "program.py"
        script.write_text(HEAD.format(settings=settings) + text + "\nprint('good', flush=True)\n")
        options = Options((sys.executable, str(script)), nprocs=n, here=True, label=False)
        command = build_command(options, find_site(environ), environ)
        env = {name: value for name, value in environ.items() if name not in command.unset}
        done = subprocess.run(
            command.argv,
            env=env | command.env | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "".join(done.stdout.split()) == "good" * n, done.stderr  # launchers may join lines
        return done.stderr

    return run


def test_a_program_may_end_mpi_itself(run):
    run(USED + "MPI.Finalize()\n")


@pytest.mark.thorough
def test_what_comes_after_the_end_of_mpi_is_refused_with_the_remedy(run):
    run(USED + "MPI.Finalize()\n" + AFTER)


@pytest.mark.thorough
def test_a_world_that_was_destroyed_cannot_start_again_after_the_end_of_mpi(run):
    run(USED + "MPI.Finalize()\ndist.destroy_process_group()\n"
        "told(dist.init_parallel_env, 'MPI has ended in this process')")  # fmt: skip


@pytest.mark.thorough
def test_the_world_cannot_start_after_the_end_of_mpi(run):
    run("MPI.Finalize()\ntold(dist.init_parallel_env, 'MPI has ended in this process')")


def test_the_end_of_mpi_waits_for_what_is_under_way(run):
    run(
        USED
        + """
y = np.ones(1 << 18)
works = [dist.all_reduce(y, sync_op=False, group=half) for _ in range(4)]
received = np.zeros(10)
MPI.Finalize()
for work in works:
    work.wait()
assert y[0] == world.nranks ** 4
"""
        + AFTER
    )


def test_a_rank_that_ends_mpi_alone_is_missed_by_name(run):
    run(
        USED
        + """
if world.rank == 0:
    MPI.Finalize()
else:
    try:
        dist.barrier()
    except dist.RemoteError as error:
        assert "rank 0 has ended" in str(error)
    else:
        raise AssertionError
"""
    )


@pytest.mark.parametrize("level", first_of(["MULTIPLE", "SINGLE", "FUNNELED", "SERIALIZED"]))
def test_a_program_may_start_mpi_itself_at_any_thread_level(run, level):
    run(
        f"MPI.Init_thread(MPI.THREAD_{level})\n{USED}MPI.Finalize()", "mpi4py.rc.initialize = False"
    )


@pytest.mark.thorough
def test_an_mpi_that_was_told_not_to_start_is_asked_for(run):
    run(
        "told(dist.init_parallel_env, 'mpi4py.rc.initialize is False', 'call MPI.Init_thread(')\n"
        f"MPI.Init()\n{USED}MPI.Finalize()",
        "mpi4py.rc.initialize = False",
    )


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_what_was_never_received_is_told_at_the_end(run, end):
    program = """
world = dist.init_parallel_env(timeout=60)
last = world.nranks - 1
if world.rank == 0:
    works = [dist.isend(np.ones(3), last, tag=tag) for tag in (5, 5, 5, 6)]
    dist.send_object_list([1], last, tag=7)
    works.append(dist.isend(np.ones(5_000, "f4"), last, tag=8))
if world.rank == last:
    for tag in (5, 6):
        dist.recv(np.ones(3), 0, tag=tag)
"""
    out = run(program + end)
    told = [line for line in out.splitlines() if "has never received" in line]
    assert len(told) == 1, out
    for words in (
        "2 times 24 B of float64 from rank 0 with tag 5",
        "pickled objects from rank 0 with tag 7",
        "20000 B of float32 from rank 0 with tag 8",
    ):
        assert words in told[0]
    assert "tag 6" not in told[0]


def test_nothing_is_told_of_messages_that_have_all_been_received(run):
    out = run(USED)
    assert "received" not in out
