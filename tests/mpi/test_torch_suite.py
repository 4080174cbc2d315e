"""Some of torch's own tests of torch.distributed, on backend "hpcdist": one or two of each kind.

`tests/torch_suite` runs all of them, on gloo, too.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from mpi4py import MPI

pytest.importorskip("torch", minversion="2.11")
pytest.importorskip("expecttest")

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_suite"))
import torch.distributed as c10d
from torchs_tests import TorchsTests

pytestmark = pytest.mark.filterwarnings("ignore")  # torch tests what it deprecates

NAMES = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_group_sum",
    "test_all_reduce_sum_async",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_get_future",
    "test_get_rank_size_group",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_full_group_min",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.fixture(scope="module")
def torchs():
    comm = MPI.COMM_WORLD
    if c10d.is_initialized():  # by a model that was wrapped in another file
        c10d.destroy_process_group()
    before = dict(os.environ)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    yield TorchsTests("hpcdist", "gloo", comm.rank, comm.size, Path(folder))
    os.environ.clear()
    os.environ.update(before)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


@pytest.mark.thorough
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_test_passes(name, torchs):
    outcome, why = torchs.run(name)
    if outcome == "skipped":
        pytest.skip(why)
    assert outcome == "passed", why
