"""Jobs that survive, over two nodes of a real Slurm: a rank dies, and a daemon is lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests/launch/survive_training.py"

ALLOCATION = ("salloc", "--quiet", "-N2", "--ntasks-per-node=2", "--time=3")
SPARING = Path(__file__).parents[1] / "launch" / "sparing.py"
RUN = (sys.executable, "-m", "hpcdist", "run", "--survive")
PROGRAM = """
import os, signal, sys, time
import numpy as np
from hpcdist.runtime import failure, mpi, reports
MPI = mpi.load_mpi()
all_ranks = MPI.COMM_WORLD.Dup()
rank = all_ranks.rank
failure.end_job_on_failure(rank)
again = os.environ.get("HPCDIST_RESTART_COUNT", "0")

def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])

def die():
    if sys.argv[1] == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(parent(parent(os.getpid())), signal.SIGKILL)
    time.sleep(60)

if again == "0":
    began = time.monotonic()
    try:
        all_ranks.Barrier()
        while rank != 3 or die():
            all_ranks.Allreduce(MPI.IN_PLACE, np.ones(8))
    except MPI.Exception:  # of a rank that is still in the barrier, too
        all_ranks.Revoke()
    left = all_ranks.Shrink()
    left.Barrier()
    reports.note_recovery([3], time.monotonic() - began)
    print("went on with", left.size)
    left.Barrier()
else:
    print("run", again, "of rank", rank)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def open_mpi(any_mpi):
    return any_mpi if any_mpi.name == "Open MPI" else pytest.skip("only Open MPI survives")


def test_a_job_goes_on_when_a_rank_on_another_node_dies(cluster, open_mpi, program):
    done = cluster.run(*ALLOCATION, *RUN, program, "rank", environ=open_mpi.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on with 3") == 3
    assert re.search(r"3 +3 +signal SIGKILL +\d", done.stderr), done.stderr
    assert "hpcdist-" not in done.stderr


def test_a_job_that_lost_the_daemon_of_a_node_is_started_again(cluster, open_mpi, program):
    words = ("--restarts", "1", program, "daemon")
    done = cluster.run(*ALLOCATION, *RUN, *words, environ=open_mpi.environ)
    assert "hpcdist run: restart 1 of 1" in done.stderr
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"run 1 of rank (\d)", done.stdout)) == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "ranks"), [(("0@9/0",), [3, 1, 2]), (("1@9/0", "0@14/1"), [3, 2])]
)
def test_a_spare_on_another_node_takes_the_place_of_the_dead_rank(cluster, open_mpi, deaths, ranks):
    words = ("--spares", "1", SPARING, "20", *deaths)
    done = cluster.run(*ALLOCATION, *RUN, *words, environ=open_mpi.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"process (\d): rank (\d) of .* trained (\w+)", done.stdout)
    assert {digest for *_, digest in found} == {"bac43e7c"}
    in_order = sorted((int(rank), int(process)) for process, rank, _ in found)
    assert in_order == [*enumerate(ranks)]


@pytest.mark.slow
def test_a_submitted_job_goes_on_when_a_rank_dies(cluster, open_mpi, program, tmp_path):
    words = ("submit", program, "-N2", "--ntasks-per-node=2", "--survive", "--", "rank")
    line = subprocess.list2cmdline(["cd", str(tmp_path)])
    run = subprocess.list2cmdline([sys.executable, "-m", "hpcdist", *map(str, words)])
    done = cluster.run("sh", "-c", f"{line} && exec {run}", environ=open_mpi.environ, timeout=80)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on with 3") == 3
    assert "hpcdist run: 1 of 4 processes died" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kills", [("3@6",), ("3@5", "2@7")], ids=["one", "all of a node"])
def test_the_weights_are_those_of_a_training_without_a_death(cluster, open_mpi, kills, tmp_path):
    environ = open_mpi.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}"}

    def train(*words, name, kills=()):
        folder = tmp_path / name
        arguments = (TRAINING, "arrays os_g", "11", folder, *kills)
        done = cluster.run(*words, *arguments, environ=environ, timeout=100)
        found = re.search(r"trained on (\d) ranks: (\w+)", done.stdout)
        assert found, done.stdout + done.stderr
        return int(found[1]), found[2]

    alone = train(sys.executable, name="alone")
    assert train(*ALLOCATION, *RUN, name="both", kills=kills) == (4 - len(kills), alone[1])
