"""What cannot work under a real Slurm is refused at once, in one sentence that holds the remedy."""

import re
import sys

import pytest

from hpcdist.runtime.pmi import lost_server
from hpcdist.transport.waiting.polling import poll

PYTHON = sys.executable
START = ("-c", "import hpcdist as dist; print(dist.init_parallel_env().nranks, 'ranks')")
RUN = (PYTHON, "-m", "hpcdist", "run", "--no-label")


def check_refusal(call, *parts):
    """The job does not start, and is refused by one sentence that holds all of `parts`."""
    ended = call()  # one that hangs is ended after two minutes, with an error
    assert "ranks" not in ended.stdout, ended.stdout
    assert ended.returncode != 0
    said = refusals(ended.stderr)
    assert len(said) == 1, ended.stderr  # every rank says the same
    sentence = said.pop()
    for part in parts:
        assert part in sentence
    assert ". " not in sentence.rstrip(".")


def refusals(text):
    """Return the different errors that ranks and commands ended with."""
    return set(
        re.findall(r"^(?:\[rank \d+\] )?(?:hpcdist\.UsageError|Error): (.*)$", text, re.MULTILINE)
    )


def is_gone(variables):
    """Return whether the server of a step has ended, which may outlive its srun on a busy machine.

    One for PMI-2 is known by an open file, which a new process does not inherit.
    """
    return "PMIX_SERVER_TMPDIR" not in variables or lost_server(variables) is not None


@pytest.fixture(scope="module", autouse=True)
def _warm(cluster):
    """Read what Python imports once, so that it comes from memory."""
    cluster.run(PYTHON, "-c", "import hpcdist, mpi4py, numpy, click, rich")


def test_srun_without_mpi_is_refused_instead_of_silent_singletons(cluster, mpi):
    check_refusal(
        lambda: cluster.srun("-N2", "-n2", PYTHON, *START, environ=mpi.environ),
        "SLURM_STEP_NUM_TASKS=2 says that this job has 2 ranks",
        "srun ran without --mpi",
        f"`srun --mpi={mpi.kind}`",
    )


def test_srun_with_the_mpi_of_another_library_is_refused(cluster, mpi):
    wrong = {"pmix": "pmi2", "pmi2": "pmix"}[mpi.kind]
    check_refusal(
        lambda: cluster.srun(f"--mpi={wrong}", "-N2", "-n2", PYTHON, *START, environ=mpi.environ),
        "=2 says that this job has 2 ranks",
        f"srun ran with --mpi={wrong}",
        f"`srun --mpi={mpi.kind}`",
    )


def test_the_mpiexec_of_another_library_is_refused(cluster, mpi, other_mpi):
    allocation = ("salloc", "--quiet", "-N2", "-n2")
    check_refusal(
        lambda: cluster.run(
            *allocation, other_mpi.mpiexec, "-n", "2", PYTHON, *START, environ=mpi.environ
        ),
        "=2 says that this job has 2 ranks",
        f"the mpiexec that belongs to {mpi.name}",
        "`hpcdist run`",
    )


def test_a_batch_script_without_srun_is_refused(cluster, mpi, tmp_path):
    script, log = tmp_path / "job.sbatch", tmp_path / "log"
    script.write_text(f'#!/bin/bash\nexec {PYTHON} {START[0]} "{START[1]}"\n')
    job = cluster.sbatch("--ntasks=4", f"--output={log}", script, environ=mpi.environ)
    assert cluster.wait(job) == "FAILED"
    assert f"put `srun --mpi={mpi.kind}` in front of it" in log.read_text()


def test_more_ranks_than_slots_are_refused(cluster, mpi):
    if mpi.name != "Open MPI":
        pytest.skip("hydra lets ranks share slots")
    run = (*RUN, "--launcher", "mpiexec", "-n", "5", PYTHON, *START)
    check_refusal(
        lambda: cluster.run("salloc", "--quiet", "-N2", "-n4", *run, environ=mpi.environ),
        "5 ranks were asked for, and this allocation has 4 slots",
        "`salloc -n 5`",
        "`hpcdist run --launcher srun -n 5`",
    )


def test_more_nodes_than_the_allocation_has_are_refused(cluster, mpi):
    run = (*RUN, "-N", "3", "-n", "3", PYTHON, *START)
    check_refusal(
        lambda: cluster.run("salloc", "--quiet", "-N2", "-n4", *run, environ=mpi.environ),
        "3 nodes were asked for, and this allocation has 2",
        "`salloc -N 3`",
    )


def test_the_variables_of_a_step_that_has_ended_are_refused(cluster, mpi):
    told = cluster.srun("-n1", "env", "--null", mpi=mpi).stdout
    variables = dict(each.split("=", 1) for each in told.split("\0") if "=" in each)
    stale = {name: text for name, text in variables.items() if name.startswith(("PMI", "SLURM_"))}
    kind = {"pmix": "PMIX", "pmi2": "PMI"}[mpi.kind]
    assert poll(lambda: is_gone(stale), 60), stale
    check_refusal(
        lambda: cluster.run(PYTHON, *START, environ={**mpi.environ, **stale}),
        "as the server of the launcher",
        f'`unset "${{!{kind}@}}" "${{!SLURM_@}}"`',
    )
