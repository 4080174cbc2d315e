"""What goes over the network between nodes: counted by the switch that connects them."""

import json
import sys
from pathlib import Path

import pytest
from private_slurm import Unavailable, start_cluster
from requirements import missing

PROGRAMS = Path(__file__).with_name("programs")
NODES, RANKS = 4, 8
MIB = 1 << 20
CROSSES = MIB * (NODES - 1) / NODES

LEAST = {
    "all_reduce": [2 * CROSSES] * NODES,
    "reduce_scatter": [CROSSES] * NODES,
    "all_gather": [CROSSES] * NODES,
    "alltoall": [CROSSES * RANKS / NODES] * NODES,
    "broadcast": [MIB, *[MIB * (NODES - 2) / (NODES - 1)] * (NODES - 1)],
    "reduce": [CROSSES, *[MIB] * (NODES - 1)],
    "gather": [0, *[MIB / NODES] * (NODES - 1)],
    "scatter": [CROSSES, *[0] * (NODES - 1)],
}
"""Bytes that leave each node where no node sends more than it must; the root is on the first."""


CONNECT = """
import socket, sys
try:
    socket.create_connection(("10.0.0.2", 1), 2)
except ConnectionRefusedError:  # the host has answered
    sys.exit(0)
except OSError:
    sys.exit(1)
"""


@pytest.fixture(scope="module")
def networked():
    try:
        with start_cluster(NODES, "switch") as started:
            yield started
    except Unavailable as reason:
        missing("slurm", f"no nodes behind a switch: {reason}")


def traffic(cluster, mpi, layout, nbytes):
    """Return the bytes that leave and reach each node, by operation."""
    job = ("-N4", "-n8", "--ntasks-per-node=2", "-m", layout)
    words = (sys.executable, PROGRAMS / "traffic.py", cluster.folder / "switch", nbytes, 3)
    ended = cluster.srun(*job, *words, mpi=mpi)
    assert ended.returncode == 0, ended.stderr
    rows = map(json.loads, ended.stdout.splitlines())
    return {name: {"sent": sent, "received": received} for name, sent, received in rows}


@pytest.mark.parametrize("layout", ["block", "cyclic"])
def test_nodes_send_the_least_bytes_and_each_its_share(networked, any_mpi, layout):
    found = traffic(networked, any_mpi, layout, MIB)
    for name, least in LEAST.items():
        for sent, bound in zip(found[name]["sent"], least, strict=True):
            assert sent < 1.05 * bound + (32 << 10), (name, found[name])
    # what agrees on an operation carries a few bytes of data, too
    assert max(found["8 B"]["sent"]) < 1.5 * max(found["barrier"]["sent"]), found


def test_a_cable_can_be_cut_and_mended(networked):
    try:
        networked.cables("n2", is_up=False)
        assert networked.run(sys.executable, "-c", CONNECT).returncode == 1
    finally:
        networked.cables(is_up=True)
    assert networked.run(sys.executable, "-c", CONNECT).returncode == 0


def test_ranks_name_those_behind_a_cut_cable_and_go_on_when_it_is_mended(networked, any_mpi):
    try:
        words = (sys.executable, PROGRAMS / "outage.py", networked.folder / "switch")
        ended = networked.srun("-N2", "-n2", "-w", "n1,n2", *words, mpi=any_mpi)
    finally:
        networked.cables(is_up=True)
    assert ended.returncode == 0, ended.stderr
    told = sorted(ended.stdout.splitlines())
    assert told == ["0 misses 1", "0 went on: 4.0", "1 misses 0", "1 went on: 4.0"]


@pytest.mark.parametrize(
    ("operation", "way"),
    [
        ("all_reduce", "now"),
        pytest.param("all_reduce", "later", marks=pytest.mark.thorough),
        pytest.param("broadcast", "now", marks=pytest.mark.thorough),
        ("all_gather_object", "now"),
    ],
)
def test_a_cable_that_breaks_in_the_middle_of_a_transfer_is_a_timeout(
    networked, any_mpi, operation, way
):
    told = [networked.folder / f"told.{rank}" for rank in range(3)]
    for file in told:
        file.unlink(missing_ok=True)
    try:
        words = (sys.executable, PROGRAMS / "transfer.py", networked.folder)
        ended = networked.srun("-N3", "-n3", "-w", "n1,n2,n3", *words, operation, way, mpi=any_mpi)
    finally:
        networked.cables(is_up=True, rate=float("inf"))
    assert ended.returncode != 0
    missing = ["1", "0 2", "1"]
    for file, ranks in zip(told, missing, strict=True):
        assert file.read_text() == f"misses {ranks} in time\ncannot go on\n", ended.stderr
