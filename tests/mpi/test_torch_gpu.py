"""CUDA tensors in the backend "hpcdist", one GPU per rank: by CuPy, or by torch's own NCCL."""

import pytest
from requirements import missing

import hpcdist as dist

torch = pytest.importorskip("torch", minversion="2.11")

import torch.distributed as c10d  # noqa: E402

import hpcdist.torch  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(rank, size):
    found = torch.cuda.device_count()
    if found < size or not c10d.is_nccl_available():
        missing("gpu", f"needs {size} GPUs and a torch with NCCL; torch sees {found} GPUs")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


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
