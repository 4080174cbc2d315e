"""Ranks that a real Slurm starts know where they stand, with every MPI library that is here."""

import json
import sys
from pathlib import Path

import pytest

PLACE = Path(__file__).with_name("programs") / "place.py"
PYTHON = sys.executable

# Two nodes of two ranks: rank, size, local rank, local size, node rank, number of nodes.
TWO_BY_TWO = [
    [0, 4, 0, 2, 0, 2],
    [1, 4, 1, 2, 0, 2],
    [2, 4, 0, 2, 1, 2],
    [3, 4, 1, 2, 1, 2],
]
UNEVEN = [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 2], [2, 3, 0, 1, 1, 2]]
ONE_NODE = [[rank, 4, rank, 4, 0, 1] for rank in range(4)]


def ranks_of(ended):
    """Return what each rank told of itself, in the order of ranks."""
    assert ended.returncode == 0, ended.stderr
    return read_ranks(ended.stdout)


def read_ranks(text):
    decoder, found, start = json.JSONDecoder(), [], text.find("{")
    while start >= 0:  # launchers may put what two ranks say on one line
        rank, end = decoder.raw_decode(text, start)
        found.append(rank)
        start = text.find("{", end)
    return found


def check_places(ranks, places):
    assert [rank["true"] for rank in ranks] == places
    assert [rank["told"] for rank in ranks] == places
    hosts = [rank["host"] for rank in ranks]
    assert hosts == sorted(hosts)  # Slurm chooses which nodes: an earlier job may still be ending
    nodes = [place[4] for place in places]
    assert len({*zip(hosts, nodes, strict=True)}) == len({*hosts}) == len({*nodes})
    assert {rank["total"] for rank in ranks} == {sum(range(len(places)))}


@pytest.mark.parametrize(
    ("flags", "places"),
    [
        (["-N1", "-n4"], ONE_NODE),
        (["-N2", "-n4", "--ntasks-per-node=2"], TWO_BY_TWO),
        (["-N2", "-n3"], UNEVEN),
    ],
    ids=["one node", "two nodes", "two ranks and one"],
)
def test_ranks_of_srun_know_their_place(cluster, mpi, flags, places):
    ranks = ranks_of(cluster.srun(*flags, PYTHON, PLACE, mpi=mpi))
    check_places(ranks, places)
    assert {rank["launcher"] for rank in ranks} == {{"pmix": "pmix", "pmi2": "mpich"}[mpi.kind]}


def test_ranks_of_srun_know_their_job_and_its_nodes(cluster, mpi):
    ranks = ranks_of(cluster.srun("-N2", "-n3", PYTHON, PLACE, mpi=mpi))
    for rank in ranks:
        assert rank["nodes"] == ["n1", "n2"]
        assert rank["job"]["nodes"] == "n[1-2]"
        assert rank["job"]["tasks_per_node"] == [2, 1]
        assert (rank["job"]["step_id"], rank["job"]["restarts"]) == (0, 0)
        assert rank["job"]["array"] is None


def test_ranks_may_outnumber_the_cpus(cluster, mpi):
    flags = ["-N1", "-n9", "--overcommit"]  # a node has 8
    ranks = ranks_of(cluster.srun(*flags, PYTHON, PLACE, mpi=mpi))
    check_places(ranks, [[rank, 9, rank, 9, 0, 1] for rank in range(9)])


def test_ranks_see_the_cores_they_are_bound_to(cluster, mpi):
    flags = ["-N1", "-n2", "--cpu-bind=map_cpu:0,0"]  # core 0 is there on every machine
    ranks = ranks_of(cluster.srun(*flags, PYTHON, PLACE, mpi=mpi))
    assert [rank["cores"] for rank in ranks] == [[0], [0]]


@pytest.mark.parametrize(
    "launcher",
    [
        ("{mpiexec}", "-n", "4"),
        (PYTHON, "-m", "hpcdist", "run", "--no-label"),
        (PYTHON, "-m", "hpcdist", "run", "--no-label", "--launcher", "mpiexec", "-n", "4"),
    ],
    ids=["mpiexec", "hpcdist run", "hpcdist run by mpiexec"],
)
def test_ranks_know_their_place_inside_an_allocation(cluster, mpi, launcher):
    command = [word.format(mpiexec=mpi.mpiexec) for word in launcher]
    allocation = ("salloc", "--quiet", "-N2", "--ntasks-per-node=2")
    ranks = ranks_of(cluster.run(*allocation, *command, PYTHON, PLACE, environ=mpi.environ))
    assert [rank["true"] for rank in ranks] == TWO_BY_TWO
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]


def test_every_task_of_an_array_is_a_job_of_its_own(cluster, mpi, tmp_path):
    script = tmp_path / "array.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=3,5 --ntasks=2 --time=2\n"
        f"srun --mpi={mpi.kind} true\n"
        f"srun --mpi={mpi.kind} {PYTHON} {PLACE}\n"
    )
    output = f"--output={tmp_path}/%a.out"
    job = cluster.sbatch(output, script, environ=mpi.environ)
    for task in (3, 5):
        assert cluster.wait(f"{job}_{task}") == "COMPLETED"
        ranks = read_ranks((tmp_path / f"{task}.out").read_text())
        assert len(ranks) == 2
        assert [rank["job"]["array"] for rank in ranks] == [[int(job), task]] * 2
        assert [rank["job"]["step_id"] for rank in ranks] == [1, 1]  # after `srun true`
