"""`hpcdist bench` on a device that is made of host memory: everything but CUDA itself."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from mpi4py import MPI

from hpcdist.bench.cases import CASES, choose_cases
from hpcdist.bench.command import bench
from hpcdist.bench.memory_kinds import MEMORIES, Device, Memory
from hpcdist.bench.plan import Plan, measure
from hpcdist.bench.startup import Started
from hpcdist.testing.slow_device import DEVICE

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on", "slow")

FEW = Plan((), sizes=(256,), memories=("slow",), rounds=1, quick=True)
STARTED = Started(0.1, 0.2)


def device_without(reason):
    return Device(lambda: DEVICE, lambda device: device.arrive(), lambda: reason, lambda _: "slow")


@pytest.fixture
def slow(monkeypatch):
    """Let there be a device that is made of host memory."""

    def zeros(count, dtype, _):
        return DEVICE.array(np.zeros(count, dtype))

    monkeypatch.setitem(MEMORIES, "slow", Memory(zeros, device_without("")))


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["collectives", "messages"])
def test_every_case_with_arrays_is_measured_on_the_device_beside_both_limits(world, kind):
    cases = [case for case in choose_cases([kind]) if CASES[case].typed]
    rows = measure(world, FEW._replace(cases=cases), STARTED, [])
    possible = {case for case in cases if CASES[case].least <= world.nranks}
    assert {row["case"] for row in rows} == possible
    assert {row["memory"] for row in rows} <= {"slow"}
    for case in possible - {"message_rate"}:
        libraries = [row["library"] for row in rows if row["case"] == case]
        assert libraries == ["hpcdist", "copy", "pinned copy"]
    assert all(row["median_s"] > 0 for row in rows)


def test_cases_without_arrays_are_measured_as_on_the_host(world):
    (row,) = measure(world, FEW._replace(cases=("barrier",)), STARTED, [])
    assert row["memory"] is None


@pytest.mark.two_ranks
@pytest.mark.thorough
def test_an_operation_hides_behind_products_of_matrices(world):
    plan = FEW._replace(cases=("overlap_matmul",))
    (row,) = measure(world, plan, STARTED, [])
    assert (row["library"], row["memory"]) == ("hpcdist", "slow")
    assert row["compute_s"] > 0
    assert np.isfinite(row["hidden"])


def test_products_of_matrices_are_left_out_where_the_library_has_none(world, monkeypatch):
    def refuse(*_, **__):
        raise ImportError("libcublas.so was not found")

    monkeypatch.setattr("numpy.matmul", refuse)
    notes = []
    assert measure(world, FEW._replace(cases=("overlap_matmul",)), STARTED, notes) == []
    assert notes == ["overlap_matmul is left out: libcublas.so was not found"]


def test_what_cannot_take_part_on_the_device_is_left_out_with_the_reason(world):
    notes = []
    plan = FEW._replace(cases=("all_reduce", "data_parallel"), against=("mpi4py",))
    rows = measure(world, plan, STARTED, notes)
    assert {row["case"] for row in rows} == {"all_reduce"}
    assert notes == [
        f"mpi4py is left out on {world.nranks} ranks: it is measured on arrays in host memory only",
        "data_parallel is left out: it needs a torch that can use slow",
    ]


def test_a_reduction_of_bfloat16_is_measured_on_the_device(world):
    plan = FEW._replace(cases=("all_reduce",), dtypes=("bfloat16",), op="AVG")
    rows = measure(world, plan, STARTED, [])
    assert {row["dtype"] for row in rows} == {"bfloat16"}


# ---- the command


def test_a_run_on_the_device_is_saved_with_what_it_is(rank, size):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        words = ["all_reduce", "--device", "slow", "--sizes", "64", "--quick", "--rounds", "1"]
        done = CliRunner().invoke(bench, [*words, "--json", str(path)])
        assert done.exit_code == 0, done.output
        if rank == 0:
            run = json.loads(path.read_text())
            assert run["setting"]["device"] == "slow"
            assert {row["memory"] for row in run["rows"]} == {"slow"}
            assert "arrays on slow" in done.output
            assert "slow memory" in done.output


def test_a_rank_without_the_device_ends_all_ranks_and_is_named_once(rank, size, monkeypatch):
    last = size - 1
    memory = MEMORIES["slow"]
    reason = "no driver" if rank == last else ""
    monkeypatch.setitem(MEMORIES, "slow", memory._replace(device=device_without(reason)))
    done = CliRunner().invoke(bench, ["all_reduce", "--device", "slow"])
    assert done.exit_code == 2
    where = f" on rank {last}" if size > 1 else ""
    told = f"device slow cannot be used{where}: no driver"
    assert done.output.count(told) == (rank == 0)
    assert "all_reduce" not in done.output
    MPI.COMM_WORLD.Barrier()
