"""`hpcdist bench` on ranks: everything that communicates is measured, and rank 0 alone speaks."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from mpi4py import MPI

from hpcdist.bench.cases import CASES, choose_cases
from hpcdist.bench.command import bench
from hpcdist.bench.interleaved import interleave
from hpcdist.bench.plan import Plan, measure
from hpcdist.bench.rows import KEY
from hpcdist.bench.startup import Started

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")

KEYS = {*KEY, "nodes", "median_s", "min_s", "p99_s", "straggler", "samples"}
FEW = Plan((), sizes=(8, 4096), rounds=2, quick=True)


@pytest.fixture
def folder():
    """A folder that all ranks see."""
    comm = MPI.COMM_WORLD
    made = tempfile.TemporaryDirectory() if comm.rank == 0 else None
    yield Path(comm.bcast(made.name if made else None))
    comm.Barrier()
    if made:
        made.cleanup()


def names(rows, case):
    return {row["library"] for row in rows if row["case"] == case}


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["collectives", "messages", "groups", "objects"])
def test_every_case_has_rows_of_every_library(world, kind):
    plan = FEW._replace(cases=choose_cases([kind]), against=("mpi4py", "paddle"))
    notes = []
    rows = measure(world, plan, Started(0.1, 0.2), notes)
    possible = [case for case in plan.cases if CASES[case].least <= world.nranks]
    assert {row["case"] for row in rows} == set(possible)
    for case in possible:
        assert {"hpcdist", "mpi4py"} <= names(rows, case)
    for row in rows:
        assert row.keys() >= KEYS
        assert 0 < row["min_s"] <= row["median_s"]
        assert row["p99_s"] > 0
        assert row["straggler"] >= 1
        assert row["ranks"] == world.nranks
        assert row["samples"] >= 2
    assert any("paddle" in note for note in notes)


@pytest.mark.two_ranks
def test_a_shuffle_is_measured_beside_pickles_and_a_batch_alone(world):
    plan = FEW._replace(cases=choose_cases(["datasets"]))
    rows = measure(world, plan, Started(0.1, 0.2), [])
    assert names(rows, "dataset_shuffle") == {"hpcdist", "pickles"}
    assert names(rows, "dataset_batch") == {"hpcdist"}
    assert all(0 < row["min_s"] <= row["median_s"] for row in rows)


def test_every_rank_has_the_same_rows(world):
    rows = measure(world, FEW._replace(cases=("all_reduce",)), Started(0.1, 0.2), [])
    assert all(rows == other for other in MPI.COMM_WORLD.allgather(rows))
    assert names(rows, "all_reduce") == {"hpcdist", "copy"}
    assert [row["nbytes"] for row in rows if row["library"] == "copy"] == [8, 4096]


def test_fewer_ranks_measure_while_the_others_wait(world):
    plan = FEW._replace(cases=("broadcast",), ranks=(1, world.nranks), against=("mpi4py",))
    rows = measure(world, plan, Started(0.1, 0.2), [])
    if world.rank == 0:
        assert {row["ranks"] for row in rows} == {1, world.nranks}


@pytest.mark.parametrize(("dtype", "op"), [("bfloat16", "SUM"), ("float32", "AVG")])
def test_reductions_of_mpi4py_do_what_hpcdists_do(world, dtype, op):
    cases = ("all_reduce", "reduce", "reduce_scatter", "scan")
    plan = FEW._replace(cases=cases, sizes=(64,), dtypes=(dtype,), op=op, against=("mpi4py",))
    notes = []
    rows = measure(world, plan, Started(0.1, 0.2), notes)
    assert notes == []
    assert all(names(rows, case) == {"hpcdist", "mpi4py", "copy"} for case in cases)


def test_overlap_says_what_was_hidden(world):
    plan = FEW._replace(cases=("overlap_sleep",), sizes=(64 << 10,), against=("mpi4py",))
    for row in measure(world, plan, Started(0.1, 0.2), []):
        assert row["compute_s"] > 0
        assert row["alone_s"] > 0
        assert np.isfinite(row["hidden"])


def test_starting_is_told_of_the_slowest_rank(world):
    seconds = 0.1 * (1 + world.rank)
    plan = FEW._replace(cases=("startup_init", "startup_process"))
    init, process = measure(world, plan, Started(0.5, seconds), [])
    assert (init["median_s"], init["straggler"]) == (0.5, 1.0)
    assert process["median_s"] == pytest.approx(0.1 * world.nranks)
    assert measure(world, plan, Started(0.5, None), [])[0]["case"] == "startup_init"


def test_a_race_counts_the_slowest_rank(world, rank, size):
    calls = []
    found = interleave(world.mpi_comm, {"a": lambda: calls.append(0)}, rounds=3, sample_s=1e-4)
    assert len(set(MPI.COMM_WORLD.allgather(len(calls)))) == 1
    assert found.by_rank["a"].shape == (size, 3)
    assert (found.seconds["a"] == found.by_rank["a"].max(axis=0)).all()
    world = MPI.COMM_WORLD.allgather(found.seconds["a"])
    assert all(np.array_equal(other, world[0]) for other in world)


# ---- the command


def test_a_wrong_option_is_told_once_and_ends_all_ranks(rank):
    for words in (["--nonsense"], ["nonsense"], ["--baseline", "/nowhere.json"], ["--ranks", "99"]):
        done = CliRunner().invoke(bench, words)
        assert done.exit_code == 2
        assert ("Error" in done.output) == (rank == 0)


@pytest.mark.two_ranks
@pytest.mark.thorough
def test_a_run_is_saved_and_is_its_own_baseline(folder, rank, size):
    words = ["barrier", "all_reduce", "--sizes", "8,64", "--quick", "--rounds", "2"]
    path = str(folder / "run.json")
    done = CliRunner().invoke(bench, [*words, "--json", path, "--against", "mpi4py"])
    assert done.exit_code == 0, done.output
    assert (done.output == "") == (rank > 0)
    run = json.loads(Path(path).read_text())
    assert run["format"] == 1
    assert run["setting"]["ranks"] == size
    assert names(run["rows"], "barrier") == {"hpcdist", "mpi4py"}

    again = [*words, "--baseline", path, "--tolerance", "1e9"]
    assert CliRunner().invoke(bench, again).exit_code == 0

    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        for row in run["rows"]:
            row["median_s"] = row["min_s"] = 1e-12
        Path(path).write_text(json.dumps(run))
    MPI.COMM_WORLD.Barrier()
    done = CliRunner().invoke(bench, [*words, "--baseline", path])
    assert done.exit_code == 1
    assert ("Slower than before" in done.output) == (rank == 0)
