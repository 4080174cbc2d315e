"""Checkpoints of torch's sharded modules and optimizers: each rank writes what it owns."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]


@pytest.fixture
def torch_world():
    import hpcdist.torch  # noqa: F401

    mine = not torch.distributed.is_initialized()
    if mine:
        torch.distributed.init_process_group("hpcdist")
    yield
    if mine:
        torch.distributed.destroy_process_group()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(14.0).reshape(2, 7)).square().sum().backward()
    optimizer.step()


def trained_alone(steps):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def test_a_fully_sharded_module_is_saved_in_parts_and_loaded_whole(folder, torch_world, rank):
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    one_step(model, optimizer)
    dist.save_group_sharded_model(model, folder, optimizer)
    alone, _ = trained_alone(1)
    saved = dist.load_merged_state_dict(folder, "model.")
    for name, value in alone.state_dict().items():
        assert np.allclose(saved[f"model.{name}"], value, atol=1e-6)
    plain, again = trained_alone(0)
    one_step(plain, again)  # makes the states that are filled
    with torch.no_grad():
        for value in plain.parameters():
            value.zero_()
    checkpoint.load({"model": plain.state_dict(), "optimizer": again.state_dict()}, folder)
    one_step(plain, again)
    expected, _ = trained_alone(2)
    for mine, other in zip(plain.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_a_whole_checkpoint_is_loaded_into_a_fully_sharded_module(folder, torch_world):
    from torch.distributed.fsdp import fully_shard

    whole, _ = trained_alone(3)
    checkpoint.save({"model": whole.state_dict()}, folder)
    model = network()
    fully_shard(model)
    parameters = list(model.parameters())
    checkpoint.load({"model": model.state_dict()}, folder)
    for mine, other in zip(parameters, whole.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), other)


def test_the_states_of_a_zero_redundancy_optimizer_are_saved(folder, torch_world, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    one_step(model, optimizer)
    dist.save_group_sharded_model(model, folder, optimizer)
    _, alone = trained_alone(1)
    saved = checkpoint.load(None, folder)["optimizer"]["state"]
    for index, states in alone.state_dict()["state"].items():
        assert np.allclose(saved[index]["exp_avg"], states["exp_avg"], atol=1e-6)


def test_a_tensor_that_is_divided_by_columns_is_refused_with_the_remedy(folder, torch_world, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    with pytest.raises(dist.UsageError, match=r"'w' is a DTensor .* save its full_tensor\(\)"):
        checkpoint.save({"w": columns}, folder)


def test_what_has_no_state_is_named(folder):
    with pytest.raises(dist.UsageError, match="optimizer is a int, which has no state_dict"):
        dist.save_group_sharded_model(network(), folder, 3)
