"""Where a process stands, from the variables that each launcher sets for its ranks."""

from __future__ import annotations

import pytest

from hpcdist.errors import UsageError
from hpcdist.runtime.place import (
    Place,
    check_size,
    count_spares,
    expected_size,
    read_place,
    world_place,
)
from hpcdist.runtime.slurm import SlurmJob, expand_nodes, in_slurm_step, parse_counts, read_job

# Rank 3 of `srun -N2 -n4 --ntasks-per-node=2`, without MPI.
SRUN = {
    "SLURM_JOB_ID": "16",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SRUN_PMIX = {**SRUN, "PMIX_RANK": "3", "PMIX_VERSION": "4.2.2", "SLURM_MPI_TYPE": "pmix"}
SRUN_PMI2 = {**SRUN, "PMI_FD": "13", "PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_MPI_TYPE": "pmi2"}

# The batch script itself, and the shell of salloc: no rank at all.
BATCH = {
    "SLURM_JOB_ID": "21",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SALLOC = {"SLURM_JOB_ID": "22", "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}

# mpirun inside an allocation: Slurm's numbers are those of its daemons, one on each node.
DAEMON = {
    "SLURM_JOB_ID": "23",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OPENMPI = {
    **DAEMON,
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_RANK": "3",
}
HYDRA = {
    **DAEMON,
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PMI_SIZE": "4",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
PADDLE = {
    "PADDLE_TRAINER_ID": "3",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_NNODES": "2",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPENMPI, "openmpi"),
        (HYDRA, "mpich"),
        (SRUN_PMI2, "mpich"),
        (PALS, "pals"),
        (SRUN_PMIX, "pmix"),
        (FLUX, "flux"),
        (SRUN, "slurm"),
        (TORCHRUN, "torchrun"),
        (PADDLE, "paddle"),
    ],
)
def test_every_launcher_tells_rank_3_of_4_on_the_second_of_two_nodes(environ, launcher):
    assert read_place(environ) == Place(3, 4, 1, 2, 1, 2, launcher)


@pytest.mark.parametrize("environ", [{}, BATCH, SALLOC])
def test_a_process_that_no_launcher_started_is_alone(environ):
    assert read_place(environ) == Place(0, 1, 0, 1, 0, 1, "none")


def test_uneven_nodes_are_read_from_slurm_short_form():
    place = read_place(
        {
            **SRUN,
            "SLURM_PROCID": "4",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_TASKS_PER_NODE": "4,1",
        }
    )
    assert place == Place(4, 5, 0, 1, 1, 2, "slurm")


def test_the_batch_step_and_the_interactive_shell_are_no_ranks():
    assert in_slurm_step(SRUN)
    for special in ("4294967290", "4294967291", "4294967292"):
        assert not in_slurm_step({**SRUN, "SLURM_STEP_ID": special})
    assert read_place({**SRUN, "SLURM_STEP_ID": "4294967290"}).launcher == "none"


def test_without_a_local_rank_all_ranks_are_taken_to_share_one_node():
    assert read_place({"PMI_RANK": "2", "PMI_SIZE": "4"}) == Place(2, 4, 2, 4, 0, 1, "mpich")


def test_without_a_local_size_the_number_of_nodes_gives_it():
    place = read_place({"FLUX_TASK_RANK": "4", "FLUX_JOB_SIZE": "5", "FLUX_JOB_NNODES": "2"})
    assert place == Place(4, 5, 1, 3, 1, 2, "flux")


def test_without_nodes_their_numbers_follow_from_the_local_size():
    environ = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    assert read_place(environ) == Place(5, 8, 1, 4, 1, 2, "openmpi")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PMI_RANK": "two", "PMI_SIZE": "4"}, "PMI_RANK='two'"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "-4"}, "OMPI_COMM_WORLD_SIZE='-4'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4, WORLD_SIZE=4"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"}, "'many'"),
    ],
)
def test_nonsense_is_a_usage_error_that_names_the_variable(environ, named):
    with pytest.raises(UsageError) as caught:
        read_place(environ)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x2)", [2, 2]), ("2(x2),1", [2, 2, 1]), ("4,1", [4, 1])],
)
def test_slurm_short_form_is_one_number_per_node(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPENMPI, (4, "OMPI_COMM_WORLD_SIZE")),
        (HYDRA, (4, "PMI_SIZE")),
        (SRUN_PMI2, (4, "PMI_SIZE")),
        (SRUN_PMIX, (4, "SLURM_STEP_NUM_TASKS")),
        (BATCH, (4, "SLURM_NTASKS")),
        (SALLOC, (4, "SLURM_NTASKS")),
        (FLUX, (4, "FLUX_JOB_SIZE")),
        (TORCHRUN, (4, "WORLD_SIZE")),
        (PADDLE, (4, "PADDLE_TRAINERS_NUM")),
        ({"WORLD_SIZE": "4"}, None),
        ({}, None),
    ],
)
def test_the_expected_size_is_the_launchers(environ, expected):
    assert expected_size(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**SALLOC, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {**SALLOC, "PMI_SIZE": "1", "PMI_RANK": "0"},
        {**BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["alone", "mpirun -n 1 in salloc", "mpiexec -n 1 in salloc", "srun -n1 in sbatch"],
)
def test_one_rank_that_was_meant_to_be_one_is_no_alarm(environ):
    check_size(environ, 1, "Open MPI v5.0.11")


def test_several_ranks_that_see_each_other_are_no_alarm():
    check_size(OPENMPI, 4, "Open MPI v5.0.11")


@pytest.mark.parametrize(
    ("environ", "library", "remedy"),
    [
        (SRUN, "Open MPI v5.0.11, package", "--mpi=pmix"),
        (SRUN, "MPICH Version: 5.0.2", "--mpi=pmi2"),
        (SRUN, "Intel(R) MPI Library 2021.18", "SLURM_MPI_TYPE=pmi2"),
        (SRUN_PMI2, "Open MPI v5.0.11", "--mpi=pmix"),
        (SRUN_PMIX, "MPICH Version: 4.0.2", "--mpi=pmi2"),
        (SRUN_PMIX, "Open MPI v5.0.11", "srun --mpi=list"),
        (OPENMPI, "MPICH Version: 5.0.2", "the mpiexec that belongs to MPICH"),
        (OPENMPI, "Open MPI v4.1.4", "another Open MPI"),
        (HYDRA, "Open MPI v5.0.11", "the mpiexec that belongs to Open MPI"),
        (BATCH, "Open MPI v5.0.11", "put `srun --mpi=pmix` in front"),
        (SALLOC, "MPICH Version: 5.0.2", "put `srun --mpi=pmi2` in front"),
        (FLUX, "Open MPI v5.0.11", "flux run -o pmi=pmix"),
        (TORCHRUN, "Open MPI v5.0.11", "torchrun starts processes without MPI"),
        (PADDLE, "MPICH Version: 5.0.2", "mpiexec -n 4"),
    ],
)
def test_silent_singletons_stop_with_the_remedy(environ, library, remedy):
    with pytest.raises(UsageError) as caught:
        check_size(environ, 1, library)
    message = str(caught.value)
    assert remedy in message
    assert "=4 says that this job has 4 ranks" in message
    assert "HPCDIST_ALLOW_SINGLETON=1" in message
    assert ". " not in message  # one sentence


# ---- the Slurm job


def test_a_step_tells_its_job_its_nodes_and_its_tasks_on_each():
    environ = {**SRUN, "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-8]"}
    assert read_job(environ) == SlurmJob(16, 0, None, 0, "n[1-2]", (2, 2))


def test_a_batch_script_of_an_array_that_was_requeued_tells_that():
    told = {"ARRAY_JOB_ID": "20", "ARRAY_TASK_ID": "3", "RESTART_COUNT": "2"}
    told |= {"JOB_NODELIST": "n[1-2]", "STEP_NODELIST": "of another step"}
    environ = {**BATCH, **{f"SLURM_{name}": text for name, text in told.items()}}
    assert read_job(environ) == SlurmJob(21, None, (20, 3), 2, "n[1-2]", (2, 2))


def test_without_slurm_there_is_no_slurm_job():
    assert read_job({}) is None


def test_a_job_number_that_is_none_is_a_usage_error():
    with pytest.raises(UsageError, match="SLURM_JOB_ID='soon'"):
        read_job({"SLURM_JOB_ID": "soon"})


def test_nodes_cannot_be_expanded_without_scontrol(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="put Slurm's commands on PATH"):
        expand_nodes("n[1-2]")


def test_spares_are_processes_of_the_job_and_no_ranks_of_the_world():
    environ = {"OMPI_COMM_WORLD_SIZE": "5", "HPCDIST_SPARES": "2"}
    places = [world_place({**environ, "OMPI_COMM_WORLD_RANK": str(each)}) for each in range(5)]
    assert [each.rank for each in places] == [0, 1, 2, 3, 4]
    assert {each.size for each in places} == {3}


def test_a_number_of_spares_that_is_none_is_refused():
    with pytest.raises(UsageError, match="HPCDIST_SPARES='some' is not a number"):
        count_spares({"HPCDIST_SPARES": "some"})
