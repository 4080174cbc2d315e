"""`hpcdist bench --device cuda` on GPUs; beside NCCL where it takes as many ranks."""

import numpy as np
import pytest
from requirements import missing

from hpcdist.bench.cases import CASES, choose_cases
from hpcdist.bench.libraries import start_peer
from hpcdist.bench.libraries.hpcdist import start_own
from hpcdist.bench.memory_kinds import MEMORIES
from hpcdist.bench.plan import Plan, measure
from hpcdist.bench.startup import Started
from hpcdist.bench.task import make_task
from hpcdist.runtime import gpu
from hpcdist.transport.device.nccl import binding

pytestmark = pytest.mark.gpu

CUDA = MEMORIES["cuda"]
FEW = Plan((), sizes=(256, 1 << 20), memories=("cuda",), rounds=2, quick=True)
RAW = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "alltoall_single")


@pytest.fixture
def on_gpus(world_with):
    """Start the world anew on GPUs, which ranks may share."""
    assert CUDA.device is not None
    reason = CUDA.device.missing()
    if reason:
        missing("gpu", reason)
    world_with(device="gpu", share_gpu=1)


@pytest.fixture
def raw(on_gpus, world_with, size):
    """Let hpcdist use NCCL; stop where NCCL is not there, or does not take so many ranks."""
    reason, version = binding.why_not(), binding.version()
    if gpu.count() < size and 0 < version < binding.SHARES_GPUS:
        reason = f"{size} ranks, but CUDA sees {gpu.count()} GPUs, and NCCL is {version}"
    if reason:
        missing("nccl", reason)
    world_with(device="gpu", share_gpu=1, device_backend="nccl")


@pytest.mark.parametrize("kind", ["collectives", "messages"])
def test_every_case_with_arrays_is_measured_on_gpus(on_gpus, world, kind):
    cases = [case for case in choose_cases([kind]) if CASES[case].typed]
    rows = measure(world, FEW._replace(cases=cases), Started(0.1, 0.2), [])
    possible = {case for case in cases if CASES[case].least <= world.nranks}
    assert {row["case"] for row in rows} == possible
    assert {row["memory"] for row in rows} <= {"cuda"}


def test_an_operation_hides_behind_products_of_matrices(on_gpus, world):
    plan = FEW._replace(cases=("overlap_matmul",))
    rows = measure(world, plan, Started(0.1, 0.2), [])
    assert all(row["compute_s"] > 0 and np.isfinite(row["hidden"]) for row in rows)
    assert len(rows) == 2


def test_raw_nccl_is_measured_beside_hpcdist(raw, world):
    notes = []
    plan = FEW._replace(cases=(*RAW, "overlap_matmul"), against=("nccl",))
    rows = measure(world, plan, Started(0.1, 0.2), notes)
    assert notes == []
    for case in plan.cases:
        assert {"hpcdist", "nccl"} <= {row["library"] for row in rows if row["case"] == case}


@pytest.mark.parametrize("case", RAW)
def test_raw_nccl_computes_what_hpcdist_does(raw, world, rank, case):
    found = []
    libraries = start_own(world), start_peer("nccl", world.mpi_comm, True, on_device=True)
    for library in libraries:
        task = make_task(case, world, 64 * world.nranks, np.dtype("f4"), "cuda", "SUM")
        task.x[...] = rank + 1
        library.calls[case](task)()
        CUDA.waiter()()
        found.append(task.out.get())
    for library in libraries:
        library.close()
    assert np.array_equal(*found)
    assert found[0].any()
