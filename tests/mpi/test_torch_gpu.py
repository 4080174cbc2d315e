"""CUDA tensors in the backend "hpcdist": by CuPy, or by torch's NCCL and a GPU for each rank."""

import importlib.util

import pytest
from requirements import missing

import hpcdist as dist

torch = pytest.importorskip("torch", minversion="2.11")

import torch.distributed as c10d  # noqa: E402

import hpcdist.torch  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(rank, size, world_with):
    found = torch.cuda.device_count()
    if not found:
        missing("gpu", "torch sees no GPU")
    by_cupy = importlib.util.find_spec("cupy") is not None
    if not by_cupy and (found < size or not c10d.is_nccl_available()):
        missing("gpu", f"without CuPy {size} ranks need {size} GPUs, and a torch with NCCL")
    world_with(device="gpu", share_gpu=1)
    torch.cuda.set_device(rank % found)
    return torch.device("cuda", rank % found)


def test_collectives_on_gpus_and_on_hosts_share_a_group(device, rank, size):
    hpcdist.torch.init()
    for where in (device, "cpu"):
        x = torch.full((4,), rank + 1.0, device=where)
        c10d.all_reduce(x)
        assert x.tolist() == [size * (size + 1) / 2] * 4
        gathered = torch.empty(size, 4, device=where)
        c10d.all_gather_into_tensor(gathered, torch.full((4,), float(rank), device=where))
        assert gathered[:, 0].tolist() == list(range(size))


def test_a_model_on_gpus_trains(device, rank, size):
    model = dist.DataParallel(torch.nn.Linear(1, 1, bias=False).to(device))
    model(torch.full((1, 1), rank + 1.0, device=device)).sum().backward()
    assert model.weight.grad.item() == (size + 1) / 2
