"""Tests under ``mpiexec -n N python -m pytest --with-mpi``: every rank runs every test.

After each test all ranks compare notes; if one failed, all stop, so that no rank waits for one
that has gone on to the next test.
"""

import gc
import json
import os
import shutil
import sys
import tempfile

import numpy as np
import pytest
from mpi4py import MPI
from requirements import missing

os.environ.setdefault("HPCDIST_TIMEOUT_S", "120")

if "EMULATED_GPU_COUNT" in os.environ:
    from emulated_gpu import aware

    aware.install()


NEED_FOUR_RANKS = {
    "test_array_programs",
    "test_checkpoint",
    "test_contract",
    "test_exchange",
    "test_fleet",
    "test_gradient_groups",
    "test_grid",
    "test_hybrid",
    "test_hybrid_arrays",
    "test_hybrid_states",
    "test_lists",
    "test_mesh",
    "test_model_parallel",
    "test_model_parallel_states",
    "test_operators",
    "test_pipeline",
    "test_programs",
    "test_sharding",
    "test_shared",
    "test_stencil",
    "test_together",
    "test_torch_groups",
    "test_torch_mesh",
}
"""Files whose tests show on four ranks, or two nodes of two, what they do not on fewer."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in NEED_FOUR_RANKS:
            item.add_marker(pytest.mark.four_ranks)


@pytest.fixture(scope="session", autouse=True)
def _start():
    import hpcdist as dist

    dist.init_parallel_env()


@pytest.fixture(scope="module", autouse=True)
def _torch_has_no_group_that_another_module_made():
    yield
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        torch.destroy_process_group()


@pytest.fixture
def world():
    """The group of all ranks at hand: a test before may have started anew."""
    import hpcdist as dist

    return dist.get_group()


@pytest.fixture
def rank():
    return MPI.COMM_WORLD.rank


@pytest.fixture
def size():
    return MPI.COMM_WORLD.size


@pytest.fixture
def and_the_world_goes_on(rank, size):
    """After the test the ranks are in step: nothing is left over from what was refused."""
    import hpcdist as dist

    yield
    dist.barrier()
    x = np.array([rank + 1])
    dist.all_reduce(x)
    assert x[0] == size * (size + 1) // 2


@pytest.fixture(scope="module")
def collected():
    """What modules before this one have dropped is gone, and what is frozen does not stay so."""
    gc.collect()
    yield
    gc.unfreeze()


@pytest.fixture
def quick_collections(collected):
    """Let `gc.collect` look through what the test makes alone: libraries have a million objects."""
    gc.freeze()


@pytest.fixture
def folder(rank):
    """A folder to be made that all ranks see; removed after the test."""
    import hpcdist as dist

    made = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(made, 0)
    yield os.path.join(made[0], "saved")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(made[0])


@pytest.fixture
def world_with(monkeypatch):
    """Start the world anew with other settings, and end it after the test."""

    import hpcdist as dist

    def start(**settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"HPCDIST_{name.upper()}", str(value))
        dist.destroy_process_group()
        dist.init_parallel_env()

    yield start
    dist.destroy_process_group()
    monkeypatch.undo()
    dist.init_parallel_env()


@pytest.fixture
def tuned(world_with):
    """Start the world anew with these rules before the default ones."""
    from hpcdist.transport.tuning import FORMAT, rules_as_json

    def start(rules, **settings):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as tuning:
            json.dump({"format": FORMAT, "rules": rules_as_json(rules)}, tuning)
            tuning.flush()
            world_with(tuning=tuning.name, **settings)

    return start


@pytest.fixture
def cupy():
    try:
        import cupy
    except ImportError as error:
        missing("gpu", f"CuPy cannot be imported: {error}")
    if not cupy.cuda.is_available():
        missing("gpu", "cupy.cuda.is_available() is False")
    return cupy


@pytest.fixture(params=["nccl", "mpi", "staged"])
def way(request, cupy, world_with):
    """Start the world anew with all arrays going one way.

    The number of ranks is asked of the world: a test of the contract may have a `size` of its own.
    """
    from gpu_arrays import why_not_nccl

    import hpcdist as dist
    from hpcdist.config import read_config
    from hpcdist.runtime import gpu
    from hpcdist.transport.device import cuda_mpi

    if request.param == "nccl":
        reason = why_not_nccl(gpu.count(), dist.get_world_size())
        if reason:
            missing("nccl", reason)
    if request.param == "mpi":
        reason = cuda_mpi.why_not(read_config().cuda_selftest)
        if reason:
            missing("cuda_aware", reason)
    world_with(device_backend=request.param, device="gpu", share_gpu=1)
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, f"failed_in_{call.when}", report.failed)
    return report


@pytest.fixture(autouse=True)
def _all_ranks_pass(request, _start):
    yield
    failed = getattr(request.node, "failed_in_call", False)
    failures = MPI.COMM_WORLD.allgather(failed)
    if any(failures):
        ranks = [rank for rank, each in enumerate(failures) if each]
        request.session.shouldfail = f"{request.node.nodeid} failed on ranks {ranks}"


def pytest_unconfigure(config):
    """Wait until all ranks have told what failed: a launcher ends them when the first one exits."""
    sys.stdout.flush()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Barrier()
