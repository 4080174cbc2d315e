"""`hpcdist ps` and `hpcdist dump` read the recorders of a job of Slurm on both of its nodes."""

import json
import re
import shlex
import sys
import time

import pytest

PROGRAM = """
import time
import numpy as np
import hpcdist as dist
world = dist.init_parallel_env()
x = np.ones(4)
for step in range(5):
    dist.all_reduce(x)
if world.rank == 3:
    time.sleep(600)
dist.broadcast(x, 0)
"""


@pytest.fixture
def hanging(cluster, any_mpi, tmp_path):
    """Return the number of a job on two nodes whose last rank does not come."""
    program = tmp_path / "hang.py"
    program.write_text(PROGRAM)
    script = tmp_path / "job.sh"
    python = shlex.quote(sys.executable)
    script.write_text(f"#!/bin/sh\nexec srun --mpi={any_mpi.kind} --quiet {python} {program}\n")
    flags = ("-N2", "-n4", "--ntasks-per-node=2", "--time=2", f"--output={tmp_path}/log")
    job = cluster.sbatch(*flags, script, environ=any_mpi.environ)
    yield job
    cluster.run("scancel", job)
    cluster.wait(job)


def hpcdist(cluster, *words, **options):
    return cluster.run(sys.executable, "-m", "hpcdist", *words, **options)


@pytest.mark.slow
def test_a_job_that_hangs_on_two_nodes_is_explained_from_outside(cluster, hanging, tmp_path):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        told = hpcdist(cluster, "ps", hanging)
        if "which has not come to broadcast #6" in told.stdout:
            break
        time.sleep(0.5)
    assert re.search(r"ranks 0-2 wait for rank 3, .* at .*hang.py:11", told.stdout), told
    assert re.search(r"=> rank 3 is outside .* at .*hang.py:8", told.stdout), told.stdout
    wrote = hpcdist(cluster, "dump", hanging, "-o", tmp_path / "flight")
    assert wrote.returncode == 0, wrote.stderr
    ranks = json.loads((tmp_path / "flight.json").read_text())["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
    assert len({each["host"] for each in ranks}) == 2
