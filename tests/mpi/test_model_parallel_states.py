"""States of layers that are cut over the ranks fit any number of ranks, and the whole layers."""

import numpy as np
import pytest
from checks import ROUNDED

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.torch.mesh import device_mesh_of  # noqa: E402
from hpcdist.torch.model_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]
WIDTH, WORDS = 12, 24


class Cut(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.words = VocabParallelEmbedding(WORDS, WIDTH, mp_group=group)
        self.up = ColumnParallelLinear(
            WIDTH, 24, has_bias=True, gather_output=False, mp_group=group
        )
        self.down = RowParallelLinear(24, WIDTH, input_is_parallel=True, mp_group=group)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.words(x))))


class Whole(Cut):
    def __init__(self):
        nn.Module.__init__(self)
        self.words, self.up = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)


def seeded(make, seed=3):
    torch.manual_seed(seed)
    return make().double()


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(WORDS)).square().sum().backward()
    optimizer.step()


def trained(make, steps, seed=3):
    model = seeded(make, seed)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def whole_weights(model):
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for name, each in model.state_dict().items()
    }


def assert_same(model, expected):
    got, wanted = whole_weights(model), whole_weights(expected)
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        assert torch.allclose(value, wanted[name], rtol=ROUNDED, atol=ROUNDED), name


def smaller(world):
    """A group of each degree that divides the world, whose ranks are next to each other."""
    return [
        (degree, world.split(world.rank // degree))
        for degree in range(1, world.nranks + 1)
        if world.nranks % degree == 0
    ]


def test_a_state_has_the_cut_parameters_as_dtensors_of_the_whole(world):
    model = seeded(lambda: Cut(world))
    state = model.state_dict()
    for name, whole in seeded(Whole).state_dict().items():
        value = state[name]
        assert value.shape == whole.shape
        if world.nranks > 1 and name != "down.bias":
            assert isinstance(value, DTensor)
            assert value.to_local().data_ptr() == model.get_parameter(name).data_ptr()
            value = value.full_tensor()
        assert torch.equal(value, whole)
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is each for name, each in model.named_parameters())


def test_a_model_takes_dtensors_whole_tensors_and_its_own_parts(world):
    source, whole = seeded(lambda: Cut(world)), seeded(Whole)
    parts = {name: each.detach().clone() for name, each in source.named_parameters()}
    mesh = device_mesh_of(dist.ProcessMesh(world.ranks, ["mp"]))
    turned = {
        name: distribute_tensor(each, mesh, [Shard(each.ndim - 1)], src_data_rank=None)
        for name, each in whole.state_dict().items()
    }
    alike = {
        name: distribute_tensor(each, mesh, [Replicate()], src_data_rank=None)
        for name, each in whole.state_dict().items()
    }
    for state in (source.state_dict(), whole.state_dict(), parts, turned, alike):
        model = seeded(lambda: Cut(world), seed=4)
        model.load_state_dict(state)
        assert_same(model, source)
        assert model.up.weight.is_distributed == (world.nranks > 1)
    model = seeded(lambda: Cut(world), seed=4)
    model.load_state_dict(whole.state_dict(), assign=True)
    assert_same(model, source)
    assert model.up.weight.is_distributed == (world.nranks > 1)


def test_a_state_of_another_shape_is_refused_by_name(world):
    model = Cut(world)
    state = {name: each.detach().clone() for name, each in model.named_parameters()}
    state["up.weight"] = torch.zeros(5, WIDTH)
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        model.load_state_dict(state)
    del state["up.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight"):
        model.load_state_dict(state)


def test_a_checkpoint_of_any_degree_is_loaded_at_any_other_and_training_goes_on(world, folder):
    expected, _ = trained(Whole, 3)
    for degree, group in smaller(world):
        model, optimizer = trained(lambda: Cut(group), 2)  # noqa: B023
        dist.checkpoint.save({"model": model, "optimizer": optimizer}, f"{folder}-{degree}")
        makers = {f"mp {other}": (lambda it=it: Cut(it)) for other, it in smaller(world)}
        for make in (Whole, *makers.values()):
            again, fresh = trained(make, 0, seed=4)
            dist.checkpoint.load({"model": again, "optimizer": fresh}, f"{folder}-{degree}")
            step(again, fresh)
            assert_same(again, expected)


def test_a_checkpoint_of_the_whole_layers_is_loaded_into_parts_that_have_trained(world, folder):
    dist.checkpoint.save(dict(zip(("m", "o"), trained(Whole, 2), strict=True)), folder)
    model, optimizer = trained(lambda: Cut(world), 1, seed=4)
    dist.checkpoint.load({"m": model, "o": optimizer}, folder)
    step(model, optimizer)
    assert_same(model, trained(Whole, 3)[0])


def test_the_states_of_the_optimizer_are_saved_as_those_of_the_whole(world, folder):
    _, optimizer = trained(lambda: Cut(world), 2)
    _, expected = trained(Whole, 2)
    dist.checkpoint.save({"o": optimizer}, folder)
    saved = dist.checkpoint.load(None, folder)["o"]["state"]
    for index, of_one in expected.state_dict()["state"].items():
        for key, value in of_one.items():
            assert np.allclose(saved[index][key], value, rtol=ROUNDED, atol=ROUNDED)


def test_a_model_that_is_fully_sharded_besides_is_saved_and_loaded_in_its_parts(world, folder):
    from torch.distributed.fsdp import fully_shard

    degree = 2 - world.nranks % 2
    rows = dist.ProcessMesh(np.arange(world.nranks).reshape(-1, degree), ["sharding", "mp"])

    def make():
        model = Cut(rows.get_group("mp"))
        return fully_shard(model, mesh=device_mesh_of(rows)["sharding"])

    model, _ = trained(make, 2)
    dist.checkpoint.save({"model": model}, folder)
    expected, _ = trained(Whole, 2)
    plain = seeded(Whole, seed=4)
    dist.checkpoint.load({"model": plain}, folder)
    assert_same(plain, expected)
    again, _ = trained(make, 0, seed=4)
    dist.checkpoint.load({"model": again}, folder)
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_in_simulated_ranks_a_state_tells_where_its_parts_are(rank):
    """They have no process groups of torch, so parts are slices."""

    def one_rank():
        group = dist.get_group()
        layer = RowParallelLinear(4, 3, mp_group=group)
        for parameter in layer.parameters():
            nn.init.constant_(parameter, dist.get_rank())
        state = layer.state_dict()
        layer.load_state_dict(state)
        return [*state["weight"].global_shape], [*state["weight"].offsets]

    if rank == 0:
        assert dist.simulate(2, one_rank) == [([3, 4], [0, 0]), ([3, 4], [0, 2])]
