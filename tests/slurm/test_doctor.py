"""`hpcdist doctor` on the nodes of a real Slurm."""

import json
import sys
from ctypes.util import find_library

import pytest

DOCTOR = (sys.executable, "-m", "hpcdist", "doctor", "--op", "scan")
TWO_BY_TWO = ("-N2", "-n4", "--ntasks-per-node=2")


FAILED = (1, 143)
"""Slurm kills the other ranks as soon as the first has ended with 1."""


def found(ended, codes=(0,)):
    assert ended.returncode in codes, ended.stderr + ended.stdout
    return json.loads(ended.stdout)


def verdicts(report):
    return {row["check"]: row["verdict"] for row in report["checks"]}


def test_a_job_on_two_nodes_is_well(cluster, mpi):
    report = found(cluster.srun(*TWO_BY_TWO, *DOCTOR, "--json", mpi=mpi))
    job = report["job"]
    assert (job["ranks"], job["nodes"], job["one_node"]) == (4, 2, False)
    assert job["launch"]["mpi"] == mpi.kind
    assert job["library"]["vendor"] == mpi.name
    assert [machine["host"] for machine in job["machines"]] == ["n1", "n1", "n2", "n2"]
    assert "wrong" not in verdicts(report).values()
    assert job["differs"] == []


def test_clocks_and_the_link_between_the_nodes_are_measured(cluster, mpi):
    network = found(cluster.srun(*TWO_BY_TWO, *DOCTOR, "--json", mpi=mpi))["job"]["network"]
    assert network["names"] == ["n1", "n2"]
    assert network["skews"][0] == 0
    assert abs(network["skews"][1]) < 0.1  # it is one clock
    (link,) = network["links"]
    assert link["nodes"] == [0, 1]
    assert link["bytes_per_s"] > 1e6


def test_the_report_in_words_is_told_by_one_rank(cluster, mpi):
    ended = cluster.srun(*TWO_BY_TWO, *DOCTOR, mpi=mpi)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("launcher and MPI") == 1
    assert "MPI between the nodes, shared memory and MPI" in ended.stdout


def test_without_the_right_pmi_the_remedy_is_named(cluster, mpi):
    ended = cluster.srun("--mpi=none", "-n2", *DOCTOR, environ=mpi.environ)
    assert ended.returncode in FAILED
    told = " ".join(ended.stdout.split())
    assert "wrong" in told
    assert f"--mpi={mpi.kind}" in told


def test_what_ranks_have_otherwise_is_wrong_and_named(cluster, mpi):
    line = f"HPCDIST_PIECE_MB=$((1 + SLURM_PROCID / 2)) {' '.join(DOCTOR)} --json"
    report = found(cluster.srun(*TWO_BY_TWO, "sh", "-c", line, mpi=mpi), FAILED)
    (problem,) = [each for each in report["problems"] if each["stops"]]
    assert problem["what"] == (
        "the ranks have different values of HPCDIST_PIECE_MB: 1.0 on 0-1; 2.0 on 2-3"
    )
    assert verdicts(report)["alike on all ranks"] == "wrong"


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="there is a driver")
def test_gpus_without_a_driver_are_named(cluster, mpi):
    report = found(cluster.srun("-n2", "--gpus-per-node=2", *DOCTOR, "--json", mpi=mpi))
    (row,) = [row for row in report["checks"] if row["check"] == "GPUs"]
    assert row["verdict"] == "warning"
    host = report["job"]["machines"][0]["host"]
    assert row["result"].startswith(f"CUDA_VISIBLE_DEVICES=0,1 on {host}, but no GPU can be used")


def test_on_the_login_node_it_says_what_would_start_the_ranks(cluster, mpi):
    ended = cluster.run(*DOCTOR, "--json", environ=mpi.environ)
    row = found(ended)["checks"][0]
    assert row["check"] == "launcher and MPI"
    assert f"several ranks by srun --mpi={mpi.kind}" in row["result"]
