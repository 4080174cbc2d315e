"""torchrun's variables, from what each launcher tells its ranks."""

from __future__ import annotations

import os

import pytest

from hpcdist.launch.environment import inherited
from hpcdist.runtime.place import Place
from hpcdist.runtime.torchrun import (
    NOTE,
    renew_torchrun_variables,
    set_by_hpcdist,
    torchrun_variables,
)

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node3-4711@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_JOB_ID": "16",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08],x",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def port(environ, launcher=None):
    return int(torchrun_variables(environ, launcher)["MASTER_PORT"])


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "address"),
    [
        (OPENMPI, None, (1, 4, 1, 4, 0, 1), "127.0.0.1"),
        (MPICH, 99, (3, 4, 3, 4, 0, 1), "127.0.0.1"),
        (SRUN, None, (3, 4, 1, 2, 1, 2), "gpu07"),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, None, (3, 4, 1, 2, 1, 2), "gpu07"),
    ],
)
def test_every_launcher_of_mpi_tells_what_torchrun_would(environ, launcher, place, address):
    found = torchrun_variables(environ, launcher)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert tuple(int(found[name]) for name in (*names, "GROUP_WORLD_SIZE")) == place
    assert found["MASTER_ADDR"] == address
    assert 20_000 <= int(found["MASTER_PORT"]) < 32_768


def test_without_mpi_there_is_nothing_to_set():
    assert torchrun_variables({}, 99) == {}
    assert torchrun_variables(TORCHRUN, 99) == {}


def test_what_is_set_stays():
    user = {"RANK": "7", "MASTER_ADDR": "elsewhere"}
    found = torchrun_variables({**OPENMPI, **user})
    assert not found.keys() & user.keys()
    assert found["LOCAL_RANK"] == "1"
    assert "MASTER_PORT" in found


def test_a_place_that_hpcdist_told_a_job_around_this_one_is_told_anew():
    found = torchrun_variables({**OPENMPI, "RANK": "7", NOTE: "RANK"})
    assert found["RANK"] == "1"


def test_a_new_job_inherits_what_the_user_has_set_and_not_what_hpcdist_has():
    environ = {"RANK": "7", "MASTER_PORT": "1", NOTE: "LOCAL_RANK,RANK"}
    assert set_by_hpcdist(environ) == ("LOCAL_RANK", "RANK")
    assert inherited(environ, True) == (NOTE, "RANK")


def test_jobs_beside_each_other_have_ports_of_their_own():
    jobs = [{**OPENMPI, "PMIX_NAMESPACE": f"prterun-n-{pid}@1"} for pid in range(1000, 2000)]
    assert len({port(each) for each in jobs}) == len(jobs)
    steps = [
        {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        for job in range(100)
        for step in range(30)
    ]
    assert len({port(each) for each in steps}) == len(steps)
    assert port(MPICH, 99) != port(MPICH, 100)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),  # of several nodes, unknown ones
        (MPICH, None),  # of an unknown job
        ({**SRUN, "SLURM_STEP_NODELIST": "a[1-2]b3"}, None),  # a name that only scontrol reads
    ],
)
def test_an_address_that_not_all_ranks_would_know_is_left_out(environ, launcher):
    found = torchrun_variables(environ, launcher)
    assert not found.keys() & {"MASTER_ADDR", "MASTER_PORT"}
    assert "RANK" in found


def test_the_world_of_torchruns_variables_has_no_spares():
    found = torchrun_variables({**OPENMPI, "HPCDIST_SPARES": "1"})
    assert (found["RANK"], found["WORLD_SIZE"]) == ("1", "3")


def test_a_new_place_changes_what_hpcdist_has_set_and_nothing_else(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "mine", NOTE: "RANK"}.items():
        monkeypatch.setenv(name, value)
    renew_torchrun_variables(Place(1, 3, 1, 3, 0, 1, "openmpi"))
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "mine")
    assert set_by_hpcdist(os.environ) == ("RANK",)
