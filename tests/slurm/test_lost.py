"""`hpcdist run` by mpiexec over two nodes: no success where a rank or a daemon was lost."""

import sys

import pytest

ALLOCATION = ("salloc", "--quiet", "-N2", "--ntasks-per-node=1", "--time=3")
RUN = (sys.executable, "-m", "hpcdist", "run", "--launcher", "mpiexec", "-n", "2", sys.executable)
PROGRAM = """
import os, signal, sys, time
import hpcdist as dist

def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])

world = dist.init_parallel_env(timeout=20)
dist.barrier()
if world.rank == 1:
    if sys.argv[1] == "leave":
        os._exit(0)
    if sys.argv[1] == "daemon":
        os.kill(parent(parent(os.getpid())), signal.SIGKILL)
        time.sleep(60)
if sys.argv[1] == "daemon":
    time.sleep(2)
    os._exit(0)
dist.barrier()
"""


@pytest.fixture
def ended(cluster, mpi, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda how: cluster.run(*ALLOCATION, *RUN, program, how, environ=mpi.environ)


def test_ranks_on_other_nodes_that_end_well_are_a_success(ended):
    done = ended("well")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "hpcdist-" not in done.stderr


def test_a_rank_on_another_node_that_leaves_while_others_wait_is_no_success(ended):
    done = ended("leave")
    assert done.returncode != 0, done.stderr


def test_the_loss_of_the_daemon_of_a_node_is_no_success(ended):
    done = ended("daemon")
    assert done.returncode != 0, done.stderr
    assert "hpcdist run: " in done.stderr, done.stderr
