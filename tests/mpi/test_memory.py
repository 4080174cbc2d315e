"""Checkpoints in memory of what the engines of training shard, on the ranks of this MPI job.

The last rank is lost as far as the memory goes: the others bring its part back. Whether all is as
it was is seen in checkpoints on disk, written before and after.
"""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint.memory.vault import Vault


class Line:
    """A model of arrays whose gradients are multiples of the rank's input."""

    def __init__(self):
        numbers = np.random.default_rng(1)
        self.parameters_ = {
            "w": dist.Parameter(numbers.standard_normal((17, 5))),
            "b": dist.Parameter(numbers.standard_normal(7)),
        }

    def named_parameters(self):
        return list(self.parameters_.items())

    def __call__(self, x):
        return x

    def backward(self, x):
        for name, each in reversed(self.named_parameters()):
            each.grad = np.full(each.data.shape, 0.1 * x * (1 + (name == "b")))


def step_of_arrays(model, optimizer, number):
    model(number)
    model._layers.backward(number + dist.get_rank())
    optimizer.step()
    optimizer.clear_grad()


def array_data_parallel(group):
    model = dist.DataParallel(Line(), group=group)
    return model, dist.optim.AdamW(model.named_parameters()), step_of_arrays


def zero_of_arrays(level):
    def make(group):
        line = Line()
        optimizer = dist.optim.AdamW(line.named_parameters())
        model, optimizer, _ = dist.group_sharded_parallel(
            line, optimizer, level, group=group, segment_size=0
        )

        def step(model, optimizer, number):
            model(number)
            line.backward(number + dist.get_rank())
            optimizer.step()
            optimizer.clear_grad()

        return model, optimizer, step

    return make


def network():
    import torch

    torch.manual_seed(3)
    layers = torch.nn.Linear(6, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3)
    return torch.nn.Sequential(*layers).double()


def step_of_torch(model, optimizer, number):
    import torch

    optimizer.zero_grad()
    x = torch.arange(12, dtype=torch.float64).reshape(2, 6) * 0.1 + number + dist.get_rank()
    model(x).square().mean().backward()
    optimizer.step()


def adam(module):
    import torch

    return torch.optim.AdamW(module.parameters(), 0.01)


def torch_data_parallel(group):
    model = dist.DataParallel(network(), group=group)
    return model, adam(model), step_of_torch


def fully_sharded(group):
    import torch.distributed as torch_dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import hpcdist.torch  # noqa: F401

    if not torch_dist.is_initialized():
        torch_dist.init_process_group("hpcdist")
    mesh = DeviceMesh("cpu", group.ranks)
    if not group.is_member():
        return None
    model = fully_shard(network(), mesh=mesh)
    return model, adam(model), step_of_torch


def zero_of_torch(level):
    def make(group):
        module = network()
        model, optimizer, _ = dist.group_sharded_parallel(
            module, adam(module), level, group=group, segment_size=0
        )
        return model, optimizer, step_of_torch

    return make


ENGINES = {
    "data parallel": array_data_parallel,
    **{f"arrays {level}": zero_of_arrays(level) for level in ("os", "os_g", "p_g_os")},
    "torch data parallel": torch_data_parallel,
    "torch fsdp2": fully_sharded,
    **{f"torch {level}": zero_of_torch(level) for level in ("os", "os_g", "p_g_os")},
}


OFTEN = "data parallel", "arrays p_g_os"


def everything(model, optimizer, path, group):
    """Return the whole state of all ranks, by way of a checkpoint on disk."""
    checkpoint.save({"model": model, "optimizer": optimizer}, path, group)
    return leaves(checkpoint.load(None, path, group))


def leaves(state, path=""):
    if isinstance(state, dict):
        pairs = [leaves(each, f"{path}.{name}") for name, each in state.items()]
    elif isinstance(state, (list, tuple)):
        pairs = [leaves(each, f"{path}.{index}") for index, each in enumerate(state)]
    else:
        return {path: np.asarray(state)}
    return {name: each for found in pairs for name, each in found.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in ENGINES],
)
def test_what_a_rank_had_is_brought_back_by_the_others(engine, folder, world):
    if "torch" in engine:
        pytest.importorskip("torch")
    make = ENGINES[engine]
    model, optimizer, step = make(world)
    memory = dist.Memory(model, optimizer)
    for number in range(2):
        step(model, optimizer, number)
    memory.commit(2)
    before = everything(model, optimizer, f"{folder}/before", world)
    step(model, optimizer, 2)  # is lost

    model, optimizer, step = make(world)  # with a rank that has nothing in the place of the last
    again = dist.Memory(model, optimizer)
    again._vault = Vault() if 0 < world.rank == world.nranks - 1 else memory._vault
    assert again.restore() == 2
    assert_same(everything(model, optimizer, f"{folder}/after", world), before)
    step(model, optimizer, 2)
    again.commit(3)
    before = everything(model, optimizer, f"{folder}/then", world)

    left = dist.new_group(world.ranks[: max(1, world.nranks - 1)])  # without the last
    made = make(left) if left.is_member() or make is fully_sharded else None
    if made is not None:
        model, optimizer, step = made
        fewer = dist.Memory(model, optimizer, group=left)
        fewer._vault = again._vault
        assert fewer.restore() == 3
        assert_same(everything(model, optimizer, f"{folder}/left", left), before)
        if left.nranks > 1:
            step(model, optimizer, 3)
    dist.barrier()
    dist.destroy_process_group(left)
