"""Checkpoints of torch's sharded modules and optimizers: each rank writes what it owns."""

import numpy as np
import pytest
from checks import ROUNDED

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
    return torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    ).double()


def one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(14.0, dtype=torch.float64).reshape(2, 7)).square().sum().backward()
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
        assert np.allclose(saved[f"model.{name}"], value, rtol=ROUNDED, atol=ROUNDED)
    plain, again = trained_alone(0)
    one_step(plain, again)  # makes the states that are filled
    with torch.no_grad():
        for value in plain.parameters():
            value.zero_()
    checkpoint.load({"model": plain.state_dict(), "optimizer": again.state_dict()}, folder)
    one_step(plain, again)
    expected, _ = trained_alone(2)
    for mine, other in zip(plain.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=ROUNDED, atol=ROUNDED)


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
        assert np.allclose(saved[index]["exp_avg"], states["exp_avg"], rtol=ROUNDED, atol=ROUNDED)


# ---- objects


def alone(_):
    model = network()
    return model, torch.optim.Adam(model.parameters())


def wrapped(_):
    model = dist.DataParallel(network())
    return model, torch.optim.Adam(model.parameters())


def fully_sharded(_):
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters())


def zero(_):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network()
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)


def group_sharded(level):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    return dist.group_sharded_parallel(model, optimizer, level)[:2]


MAKERS = {
    "alone": (alone, None),
    "DataParallel": (wrapped, None),
    "fully_shard": (fully_sharded, None),
    "ZeRO": (zero, None),
}
LEVELS = {level: (group_sharded, level) for level in ("os", "os_g", "p_g_os")}
CHANGES = [
    *((one, other) for one in MAKERS for other in MAKERS),
    *((one, other) for one in LEVELS for other in LEVELS),
]


def made(name, steps):
    """Return a model and its optimizer after some steps, and the schedule of its rate."""
    maker, level = {**MAKERS, **LEVELS}[name]
    torch.manual_seed(steps)
    model, optimizer = maker(level)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def weights_of(model):
    """Return all parameters, whole."""
    parameters = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in parameters]


@pytest.mark.thorough
@pytest.mark.two_ranks
@pytest.mark.parametrize("stepped", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize(("one", "other"), CHANGES)
def test_a_model_and_its_optimizer_are_loaded_into_any_other(
    folder, torch_world, one, other, stepped
):
    model, optimizer = made(one, 2)
    checkpoint.save({"model": model, "optimizer": optimizer, "epoch": 2}, folder)
    fresh, again = made(other, stepped)
    with torch.no_grad():
        for each in fresh.parameters():
            each += 1
    state = {"model": fresh, "optimizer": again, "epoch": 0}
    checkpoint.load(state, folder)
    assert state["epoch"] == 2
    for mine, saved in zip(weights_of(fresh), weights_of(model), strict=True):
        assert torch.equal(mine, saved)
    one_step(fresh, again)
    one_step(model, optimizer)
    for mine, expected in zip(weights_of(fresh), weights_of(model), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=ROUNDED)  # sums of gradients round


@pytest.mark.parametrize("name", ["DataParallel", "fully_shard", "ZeRO"])
def test_another_number_of_ranks_loads_the_same(folder, torch_world, rank, name):
    """What all ranks have saved, the first one loads alone, and goes on alike."""
    model, optimizer = made(name, 2)
    checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    one_step(model, optimizer)
    expected = weights_of(model)
    group = dist.new_group([0])
    if rank == 0:
        fresh, again = alone(None)
        checkpoint.load({"model": fresh, "optimizer": again}, folder, group)
        one_step(fresh, again)
        for mine, other in zip(weights_of(fresh), expected, strict=True):
            assert torch.allclose(mine, other, rtol=0, atol=ROUNDED)


def test_a_smaller_job_can_be_gone_on_with_sharded(folder, torch_world, rank):
    model, optimizer = made("alone", 2)
    group = dist.new_group([0])
    if rank == 0:
        checkpoint.save({"model": model, "optimizer": optimizer}, folder, group)
    dist.barrier()
    fresh, again = fully_sharded(None)
    checkpoint.load({"model": fresh, "optimizer": again}, folder)
    one_step(fresh, again)
    one_step(model, optimizer)
    for mine, expected in zip(weights_of(fresh), weights_of(model), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=ROUNDED)


def test_another_sharded_model_is_refused_on_all_ranks_unchanged(folder, torch_world, size):
    model, optimizer = made("fully_shard", 1)
    checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    from torch.distributed.fsdp import fully_shard

    wider = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    fully_shard(wider)
    again = torch.optim.Adam(wider.parameters())
    before = [each.clone() for each in weights_of(wider)]
    with pytest.raises(dist.CheckpointError, match=r"'model\.0\.weight' is float64 of shape"):
        checkpoint.load({"model": wider, "optimizer": again}, folder)
    assert all(map(torch.equal, before, weights_of(wider)))
    assert not again.state


# ---- DTensors of any placement


def whole_tensor():
    return torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)


def plane(size):
    """Return a mesh of two axes, of which the second one has two ranks if there are as many."""
    from torch.distributed.device_mesh import init_device_mesh

    inner = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (size // inner, inner), mesh_dim_names=("dp", "tp"))


def placements():
    """Return by name how a tensor is placed on a mesh of two axes."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return {
        "rows": [Replicate(), Shard(0)],
        "columns": [Shard(1), Replicate()],
        "the last dimension": [Shard(-1), Replicate()],
        "rows and columns": [Shard(0), Shard(1)],
        "columns twice": [Shard(1), Shard(1)],
        "more ranks than rows": [Shard(2), Shard(2)],
        "strides of rows": [_StridedShard(0, split_factor=2), Shard(0)],
        "strides of columns": [_StridedShard(1, split_factor=3), Replicate()],
        "a whole tensor": [Replicate(), Replicate()],
    }


NAMES = [
    "rows", "columns", "the last dimension", "rows and columns", "columns twice",
    "more ranks than rows", "strides of rows", "strides of columns", "a whole tensor",
]  # fmt: skip


def placed(tensor, mesh, name):
    """Return a DTensor made of each rank's part, which is cut here; no message is needed."""
    from torch.distributed.tensor import DTensor, Replicate

    local, how = tensor, placements()[name]
    for axis, placement in enumerate(how):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
            local = parts[mesh.get_local_rank(axis)]
    return DTensor.from_local(
        local.clone(),
        mesh,
        how,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@pytest.mark.parametrize("one", NAMES)
def test_a_tensor_of_any_placement_is_loaded_in_any_other(folder, torch_world, size, one):
    mesh, whole = plane(size), whole_tensor()
    checkpoint.save({"w": placed(whole, mesh, one)}, folder)
    assert torch.equal(checkpoint.load(None, folder)["w"], whole)
    for other in NAMES:
        target = placed(torch.zeros_like(whole), mesh, other)
        loaded = checkpoint.load({"w": target}, folder)["w"]
        assert loaded is target
        assert torch.equal(target.to_local(), placed(whole, mesh, other).to_local()), other
    half = checkpoint.LocalSlice(torch.zeros(5, 3, 3), (5, 7, 3), (0, 2, 0))
    checkpoint.load({"w": half}, folder)
    assert torch.equal(half.data, whole[:, 2:5])


def test_a_tensor_of_some_ranks_is_saved_by_all(folder, torch_world, rank, size):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", [size - 1])
    whole = torch.arange(12.0).reshape(3, 4)
    local = whole if rank == size - 1 else torch.zeros(0)
    only = DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=(4, 1))
    checkpoint.save({"w": only}, folder)
    assert torch.equal(checkpoint.load(None, folder)["w"], whole)


def test_a_sum_that_is_not_computed_is_refused_with_the_remedy(folder, torch_world, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (size,))
    terms = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(dist.UsageError, match=r"'w' is a DTensor .* save its full_tensor\(\)"):
        checkpoint.save({"w": terms}, folder)


def test_a_tensor_whose_memory_is_not_what_its_placements_tell_is_refused(
    folder, torch_world, size
):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (size,))
    odd = DTensor.from_local(
        torch.ones(4, 2), mesh, [Shard(0)], run_check=False, shape=(9 * size, 2), stride=(2, 1)
    )
    with pytest.raises(dist.UsageError, match=r"its local tensor has the shape \(4, 2\)"):
        checkpoint.save({"w": odd}, folder)


def two_dimensional(size, sizes=(8, 12, 4)):
    """Return a model of tensor parallelism with `fully_shard` over it, and its optimizer."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    first, inner, last = sizes
    model = torch.nn.Sequential(
        torch.nn.Linear(first, inner), torch.nn.ReLU(), torch.nn.Linear(inner, last)
    )
    mesh = plane(size)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.Adam(model.parameters())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("sizes", [(8, 12, 4), (3, 6, 7)], ids=["even", "uneven"])
def test_tensor_parallelism_under_fully_shard_is_saved_and_loaded(
    folder, torch_world, size, rank, sizes
):
    """Its columns are divided in strides, its rows along two dimensions."""

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(2.0 * sizes[0]).reshape(2, -1)).square().sum().backward()
        optimizer.step()

    model, optimizer = two_dimensional(size, sizes)
    for _ in range(2):
        step(model, optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    saved = checkpoint.load(None, folder)
    for name, value in model.state_dict().items():
        assert torch.equal(saved["model"][name], value.full_tensor()), name
    again, fresh = two_dimensional(size, sizes)
    checkpoint.load({"model": again, "optimizer": fresh}, folder)
    for state, other in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert torch.equal(state["exp_avg"].to_local(), other["exp_avg"].to_local())
    step(model, optimizer)
    step(again, fresh)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())
    alone = torch.nn.Sequential(
        torch.nn.Linear(*sizes[:2]), torch.nn.ReLU(), torch.nn.Linear(*sizes[1:])
    )
    optimizer = torch.optim.Adam(alone.parameters())
    checkpoint.load({"model": alone, "optimizer": optimizer}, folder)
    assert torch.equal(alone[0].weight, saved["model"]["0.weight"])
    assert len(optimizer.state) == 4


def test_a_model_that_is_sharded_by_columns_is_saved_and_loaded(folder, torch_world, size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def columns(parameter):
        return Shard(1) if parameter.dim() == 2 else None

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Linear(24, 3))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, shard_placement_fn=columns)
    checkpoint.save({"model": model}, folder)
    for name, value in checkpoint.load(None, folder)["model"].items():
        assert torch.equal(value, expected[name])


def test_what_has_no_state_is_named(folder):
    with pytest.raises(dist.UsageError, match="optimizer is an int, which has no state_dict"):
        dist.save_group_sharded_model(network(), folder, 3)


@pytest.mark.two_ranks
def test_a_dtensor_and_a_dist_array_take_each_others_place(folder, torch_world, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(35.0).reshape(5, 7)
    devices, mesh = init_device_mesh("cpu", (size,)), dist.ProcessMesh(range(size))
    array = dist.shard_tensor(whole.numpy(), mesh, [dist.Shard(0)])
    checkpoint.save({"w": array}, f"{folder}-ours")
    checkpoint.save({"w": distribute_tensor(whole, devices, [Shard(0)])}, f"{folder}-torch")

    tensor = distribute_tensor(torch.zeros(5, 7), devices, [Shard(1)])
    checkpoint.load({"w": tensor}, f"{folder}-ours")
    assert torch.equal(tensor.full_tensor(), whole)

    array = dist.shard_tensor(np.zeros((5, 7), "f4"), mesh, [dist.Shard(1)])
    checkpoint.load({"w": array}, f"{folder}-torch")
    assert (dist.unshard_dtensor(array) == whole.numpy()).all()
