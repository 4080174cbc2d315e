"""What goes over the network between nodes: counted by the switch that connects them."""

import json
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from private_slurm import Unavailable, start_cluster
from requirements import missing

PROGRAMS = Path(__file__).with_name("programs")
COMPRESSION = Path(__file__).parents[2] / "benchmarks" / "compression.py"
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


VANISH = r"""
import os, signal, sys
from contextlib import suppress
from pathlib import Path

networks, daemons = {}, set()
for process in Path("/proc").glob("[0-9]*"):
    with suppress(OSError):  # it has ended meanwhile
        networks[int(process.name)] = network = os.readlink(process / "ns/net")
        if (process / "cmdline").read_bytes() == f"slurmd\0-D\0-N\0{sys.argv[1]}\0".encode():
            daemons.add(network)
gone, = daemons
for pid, network in networks.items():
    if network == gone:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
"""
"""Ends all processes of a node at once, and with them its network; run on the login node."""


@pytest.fixture(scope="module")
def networked():
    try:
        with start_cluster(NODES, "switch") as started:
            yield started
    except Unavailable as reason:
        missing("slurm", f"no nodes behind a switch: {reason}")


def traffic(cluster, mpi, layout, nbytes, **environ):
    """Return the bytes that leave and reach each node, by operation."""
    job = ("-N4", "-n8", "--ntasks-per-node=2", "-m", layout)
    words = (sys.executable, PROGRAMS / "traffic.py", cluster.folder / "switch", nbytes, 3)
    ended = cluster.srun(*job, *words, mpi=mpi, environ=environ)
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


def test_compressed_gradients_send_the_bytes_of_their_codes(networked, any_mpi):
    switch = networked.folder / "switch"
    words = (COMPRESSION, "--width", 300, "--steps", 2, "--switch", switch)
    ended = networked.srun("-N4", "-n8", sys.executable, *words, mpi=any_mpi)
    assert ended.returncode == 0, ended.stderr
    sent = {name: nbytes for name, _, nbytes in map(json.loads, ended.stdout.splitlines())}
    bounds = {"bfloat16": 0.5, "int8": 0.26, "fp8": 0.26, "PowerSGD(4)": 0.03}
    for name, bound in bounds.items():
        assert sent[name] < 1.05 * bound * sent["whole"] + (256 << 10), sent


def test_in_the_order_of_the_ranks_no_node_takes_an_array_more_than_twice(networked, any_mpi):
    found = traffic(networked, any_mpi, "block", MIB, HPCDIST_REDUCTIONS="ordered")
    for name, most in {"all_reduce": 2 * MIB, "reduce": MIB}.items():
        for way in ("sent", "received"):
            assert max(found[name][way]) < 1.05 * most + (32 << 10), (name, found[name])


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


THOROUGH = pytest.mark.thorough
SINGLE = {"MPI4PY_RC_THREAD_LEVEL": "funneled"}


@pytest.mark.parametrize(
    ("operation", "way", "settings"),
    [
        ("all_reduce", "now", {}),
        pytest.param("all_reduce", "later", {}, marks=THOROUGH),
        pytest.param("broadcast", "now", {}, marks=THOROUGH),
        ("all_gather_object", "now", {}),
        ("small all_reduce", "now", {}),
        pytest.param("small all_reduce", "now", SINGLE, marks=THOROUGH),
        pytest.param("all_reduce", "now", SINGLE, marks=THOROUGH),
        pytest.param("small all_gather", "later", {}, marks=THOROUGH),
        ("new_group", "now", {}),
    ],
)
def test_a_cable_that_breaks_in_the_middle_of_an_operation_is_a_timeout(
    networked, any_mpi, operation, way, settings
):
    told = [networked.folder / f"told.{rank}" for rank in range(3)]
    for file in told:
        file.unlink(missing_ok=True)
    job = ("-N3", "-n3", "-w", "n1,n2,n3", sys.executable, PROGRAMS / "transfer.py")
    try:
        words = (networked.folder, operation, way)
        ended = networked.srun(*job, *words, mpi=any_mpi, environ=settings)
    finally:
        networked.cables(is_up=True, rate=float("inf"), delay=0.0)
    assert ended.returncode != 0
    missing = ["1", "0 2", "1"]
    for file, ranks in zip(told, missing, strict=True):
        assert file.read_text() == f"misses {ranks}\ncannot go on\n", ended.stderr


@pytest.mark.thorough
def test_ranks_name_those_of_a_node_that_vanishes(any_mpi):
    try:
        with start_cluster(3, "switch") as cluster, ThreadPoolExecutor() as thread:
            words = ("-N3", "-n3", sys.executable, PROGRAMS / "vanish.py", cluster.folder)
            job = thread.submit(cluster.srun, *words, mpi=any_mpi)
            wait_for(*(cluster.folder / f"going.{rank}" for rank in range(3)))
            cluster.cables("n2", is_up=False)  # it says no good-bye
            assert cluster.run(sys.executable, "-c", VANISH, "n2").returncode == 0
            told = [cluster.folder / f"told.{rank}" for rank in (0, 2)]
            wait_for(*told)
            assert [file.read_text() for file in told] == ["CollectiveTimeout 1"] * 2
            assert job.result().returncode != 0
    except Unavailable as reason:
        missing("slurm", f"no nodes behind a switch: {reason}")


HANG = """
import time
import hpcdist as dist
world = dist.init_parallel_env()
if world.rank == 0:
    time.sleep(600)
dist.barrier()
"""


@pytest.mark.thorough
def test_ps_and_top_name_a_node_that_vanishes_and_show_the_others(any_mpi, tmp_path):
    program, script = tmp_path / "hang.py", tmp_path / "job.sh"
    program.write_text(HANG)
    run = f"exec srun --mpi={any_mpi.kind} --quiet {shlex.quote(sys.executable)} {program}"
    script.write_text(f"#!/bin/sh\n{run}\n")
    try:
        with start_cluster(3, "switch") as cluster:
            flags = ("-N3", "-n3", "--time=3", f"--output={tmp_path}/log")
            job = cluster.sbatch(*flags, script, environ=any_mpi.environ)
            tell = (sys.executable, "-m", "hpcdist")
            until = time.monotonic() + 60
            while (told := cluster.run(*tell, "ps", job).stdout).count("in barrier") < 2:
                assert time.monotonic() < until, told
            cluster.cables("n2", is_up=False)
            assert cluster.run(sys.executable, "-c", VANISH, "n2").returncode == 0
            for words in (["ps"], ["top", "--times", "1"]):
                ended = cluster.run(*tell, *words, job)
                told = ended.stdout
                assert "node n2 does not answer, where rank 1 ran" in told, ended.stderr
                assert "rank 0: outside of hpcdist" in told
                assert "rank 2: " in told
    except Unavailable as reason:
        missing("slurm", f"no nodes behind a switch: {reason}")


def wait_for(*files, limit_s=60):
    """Wait until there are files with something to be read, or touched."""
    until = time.monotonic() + limit_s
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, [file.name for file in files if not file.exists()]
        time.sleep(0.1)


def test_doctor_names_the_node_with_a_slow_cable(networked, any_mpi):
    try:
        networked.cables(rate=125e6)
        networked.cables("n2", rate=1.25e6)
        told = networked.srun("-N4", "-n4", sys.executable, "-m", "hpcdist", "doctor", mpi=any_mpi)
    finally:
        networked.cables(rate=float("inf"))
    assert "node n2 is slow to all others" in " ".join(told.stdout.split()), told.stdout
