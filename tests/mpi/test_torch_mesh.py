"""Torch modules on a mesh train as in one process, on the ranks of this MPI job."""

import numpy as np
import pytest
from checks import ROUNDED
from tiers import first_of

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.torch.mesh import (  # noqa: E402
    device_mesh_of,
    placements_of,
    process_mesh_of,
    torch_placements,
)

WIDTH, HEADS, LENGTH, WORDS = 24, 12, 12, 24  # go evenly into 1, 2, 3 and 4 ranks
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.norm(x)
        q, k, v = (
            layer(y).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = (q @ k.transpose(2, 3)).masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Rows(nn.Module):
    """For `[batch, sequence, hidden]`; its layers know nothing of the sequence."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.second, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(self.second(self.down(torch.relu(self.up(x)))))


def small():
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))


def make(kind):
    torch.manual_seed(3)
    return kind().double()


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, 0.05, initial_accumulator_value=0.1)


def cross_entropy(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def words(count=2, rows=4):
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randint(WORDS, (rows, LENGTH), generator=generator) for _ in range(2))
        for _ in range(count)
    ]


def numbers(count=3, rows=12, *middle):
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(
            torch.randn(rows, *middle, width, generator=generator, dtype=torch.float64)
            for width in (6, 3)
        )
        for _ in range(count)
    ]


def train(model, optimizer, data, loss=F.mse_loss):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        each = loss(model(x), y)
        each.backward()
        optimizer.step()
        losses.append(whole(each).item())
    return losses


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def alone(kind, optimizer, data, loss=F.mse_loss):
    """Return the losses and weights of one process."""
    model = make(kind)
    return train(model, optimizer(model.parameters()), data, loss), weights(model)


def weights(model):
    return {name: whole(each) for name, each in model.named_parameters()}


def assert_same(got, expected, exact=False):
    losses, values = got
    compare = torch.equal if exact else close
    assert losses == expected[0] if exact else np.allclose(losses, expected[0], rtol=ROUNDED)
    assert values.keys() == expected[1].keys()
    wrong = [name for name, each in values.items() if not compare(each, expected[1][name])]
    assert not wrong


def close(one, other):
    return torch.allclose(one, other, rtol=ROUNDED, atol=ROUNDED)


def line(size, name="dp"):
    return dist.ProcessMesh(list(range(size)), [name])


def grid(size):
    """Two rows of ranks, where they are an even number."""
    rows = 1 if size % 2 else 2
    return dist.ProcessMesh(np.arange(size).reshape(rows, size // rows), ["dp", "mp"])


def own_rows(data, rank, size):
    return [tuple(each.chunk(size)[rank] for each in pair) for pair in data]


# ---- meshes and placements


def test_a_device_mesh_has_the_ranks_the_names_and_the_groups_of_the_mesh(rank, size):
    mesh = grid(size)
    made = device_mesh_of(mesh)
    assert made.mesh.tolist() == mesh.mesh.tolist()
    assert made.mesh_dim_names == ("dp", "mp")
    assert made.get_coordinate() == mesh.coordinate
    assert device_mesh_of(dist.ProcessMesh(mesh.mesh, ["dp", "mp"])) is made
    assert process_mesh_of(made) == mesh


def test_a_mesh_is_made_again_after_the_groups_have_been_destroyed(size):
    for _ in range(2):
        x = dist.shard_tensor(nn.Parameter(torch.ones(4, 2)), line(size), [dist.Shard(0)])
        assert whole(x).sum() == 8
        torch.distributed.destroy_process_group()
        dist.init_parallel_env()


def test_a_mesh_whose_ranks_descend_cuts_and_joins_in_its_own_order(rank, size):
    mesh = dist.ProcessMesh(list(range(size))[::-1], ["x"])
    x = torch.arange(10.0).reshape(5, 2)
    part = dist.shard_tensor(nn.Parameter(x), mesh, [dist.Shard(0)])
    assert part.to_local().shape[0] == len(range(5)[dist_rows(size - 1 - rank, size, 5)])
    assert torch.equal(whole(part), x)


def dist_rows(part, parts, length):
    share = -(-length // parts)
    return slice(min(part * share, length), min((part + 1) * share, length))


def test_placements_are_torchs_and_back(size):
    mesh = line(size)
    for each in (
        dist.Shard(1),
        dist.Replicate(),
        *(dist.Partial(kind) for kind in list(dist.ReduceType)[:5]),
    ):
        assert placements_of(torch_placements([each], mesh)) == [each]
    assert torch_placements([], mesh)[0].is_replicate()
    for wrong in (dist.Shard(0, co_shard_order=1), dist.Partial(dist.ReduceType.kRedAny)):
        with pytest.raises(dist.UsageError, match="reshard to Shard"):
            torch_placements([wrong], mesh)


def test_arrays_and_dtensors_share_their_memory(rank, size):
    mesh = line(size)
    a = dist.shard_tensor(np.arange(10.0).reshape(5, 2), mesh, [dist.Shard(0)])
    t = dist.to_dtensor(a)
    assert isinstance(t, DTensor)
    assert torch.equal(whole(t), torch.arange(10.0, dtype=torch.float64).reshape(5, 2))
    t.to_local().add_(1)
    b = dist.from_dtensor(t)
    assert b.shape == (5, 2)
    assert b.placements == [dist.Shard(0)]
    assert np.array_equal(dist.unshard_dtensor(a), np.arange(10.0).reshape(5, 2) + 1)
    if a.local.size:
        assert np.shares_memory(a.local, b.local)


def test_what_torch_cannot_have_is_an_error_that_says_what_to_do(rank, size):
    mesh = line(size)
    ragged = dist.dtensor_from_local(np.zeros((rank + 2, 2)), mesh, [dist.Shard(0)])
    if size > 1:
        with pytest.raises(dist.UsageError, match="equal parts"):
            dist.to_dtensor(ragged)
    with pytest.raises(dist.UsageError, match="takes a DistArray"):
        dist.to_dtensor(torch.zeros(2))
    with pytest.raises(dist.UsageError, match="takes a DTensor"):
        dist.from_dtensor(torch.zeros(2))


def test_the_functions_for_arrays_serve_dtensors_too(rank, size):
    mesh = line(size)
    x = torch.arange(12.0).reshape(4, 3)
    cut = dist.shard_tensor(nn.Parameter(x), mesh, [dist.Shard(0)])
    assert isinstance(cut, nn.Parameter)
    turned = dist.reshard(cut, mesh, [dist.Shard(1)])
    assert turned.placements[0].is_shard(1)
    assert torch.equal(dist.unshard_dtensor(turned), x)
    assert torch.equal(dist.dtensor_to_local(turned), turned.to_local())
    assert torch.equal(dist.dtensor_to_local(turned, mesh, [dist.Replicate()]), x)
    with pytest.raises(dist.UsageError, match="from_dtensor"):
        dist.reshard(cut, dist.ProcessMesh(list(range(size)), ["other"]), [dist.Shard(0)])


# ---- shard_layer


def test_a_replicated_layer_trains_as_one_process_to_the_last_bit(size):
    data = words()
    model = dist.shard_layer(make(Language), line(size))
    assert all(isinstance(each, DTensor) for each in model.parameters())
    losses = train(model, adamw(model.parameters()), data, cross_entropy)
    assert_same((losses, weights(model)), alone(Language, adamw, data, cross_entropy), exact=True)


def test_a_layer_cut_by_a_shard_fn_trains_as_one_process(size):
    mesh, data = line(size, "mp"), words()

    def cut(name, layer, mesh):
        if name.endswith((".q", ".k", ".v", ".up")):
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(0)])
        if name.endswith((".o", ".down")):
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(1)])

    model = dist.shard_layer(make(Language), mesh, cut)
    assert model.blocks[0].q.weight.to_local().shape[0] == WIDTH // size
    losses = train(model, sgd(model.parameters()), data, cross_entropy)
    assert_same((losses, weights(model)), alone(Language, sgd, data, cross_entropy))


def test_a_layer_gets_the_values_of_the_first_rank_and_layers_still_share_tensors(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    dist.shard_layer(model, line(size))
    assert model[1].weight is model[0].weight
    torch.manual_seed(0)
    assert torch.equal(whole(model[0].weight), nn.Linear(4, 4).weight)


def test_input_and_output_functions_of_a_layer_are_called_with_the_mesh(size):
    mesh = line(size)

    def cut(inputs, mesh):
        return [dist.shard_tensor(nn.Parameter(inputs[0]), mesh, [dist.Shard(0)])]

    def join(outputs, mesh):
        return dist.unshard_dtensor(dist.reshard(outputs, mesh, [dist.Replicate()]))

    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    model = dist.shard_layer(make(small), mesh, None, cut, join)
    assert close(model(x), make(small)(x))


def test_ranks_with_different_layers_are_told_so(rank, size):
    model = nn.Linear(4, 4 + (rank == size - 1))
    if size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(dist.MismatchError, match="weight"):
        dist.shard_layer(model, line(size))


# ---- batches cut over the mesh, optimizers cut over it


STAGES = [None, dist.ShardingStage2, dist.ShardingStage1, dist.ShardingStage3]


@pytest.mark.parametrize("optimizer", first_of([sgd, adamw]))
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_as_one_process_on_parts_of_the_batch(stage, optimizer, size):
    mesh, data = line(size), numbers(3, 11)  # parts of the batch are not equal
    model = dist.shard_layer(make(small), mesh)
    cut = optimizer(model.parameters())
    cut = dist.shard_optimizer(cut, stage and stage("dp", mesh))
    batches = dist.shard_dataloader(data, mesh, shard_dims="dp")
    losses = train(model, cut, batches)
    assert_same((losses, weights(model)), alone(small, optimizer, data))
    if stage is not None:
        states = [each for each in cut.state[model[0].weight].values() if each.ndim]
        assert states
        assert all(each.placements[0].is_shard(0) for each in states)
        rows = dist_rows(0, size, 7).stop
        assert all(each.to_local().shape[0] <= rows for each in states)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_has_a_state_from_the_beginning_is_sharded_too(stage, size):
    mesh, data = line(size), numbers()
    model = dist.shard_layer(make(small), mesh)
    cut = dist.shard_optimizer(adagrad(model.parameters()), stage and stage("dp", mesh))
    losses = train(model, cut, dist.shard_dataloader(data, mesh, shard_dims="dp"))
    assert_same((losses, weights(model)), alone(small, adagrad, data))
    with pytest.raises(dist.UsageError, match="has taken steps already"):
        dist.shard_optimizer(cut, dist.ShardingStage1("dp", mesh))


def test_a_function_places_a_state_that_is_there_from_the_beginning(size):
    mesh, data = line(size), numbers()
    model = dist.shard_layer(make(small), mesh)
    optimizer = dist.shard_optimizer(
        adagrad(model.parameters()),
        lambda _, __, state: dist.shard_tensor(state, mesh, [dist.Shard(0)]),
    )
    losses = train(model, optimizer, data)
    assert_same((losses, weights(model)), alone(small, adagrad, data))


def test_what_an_optimizer_cannot_do_in_parts_is_refused_before_anything_is_changed(size):
    mesh, data = line(size), numbers()
    model = dist.shard_layer(make(small), mesh)
    searching = torch.optim.LBFGS(model.parameters())
    for shard_fn in (dist.ShardingStage3("dp", mesh), lambda name, parameter, state: state):
        with pytest.raises(dist.UsageError, match="LBFGS asks for losses at other weights"):
            dist.shard_optimizer(searching, shard_fn)
    assert dist.shard_optimizer(searching) is searching
    optimizer = dist.shard_optimizer(sgd(model.parameters()), dist.ShardingStage2("dp", mesh))
    more = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(dist.UsageError, match="add_param_group before shard_optimizer"):
        optimizer.add_param_group({"params": [more]})
    assert len(optimizer.param_groups) == 1
    losses = train(model, optimizer, data)
    assert_same((losses, weights(model)), alone(small, sgd, data))


def test_stage_1_of_ordinary_parameters_is_the_optimizer_to_the_last_bit(size):
    data, model = numbers(), make(small)
    optimizer = dist.shard_optimizer(adamw(model.parameters()), dist.ShardingStage1(0, line(size)))
    losses = train(model, optimizer, data)
    assert_same((losses, weights(model)), alone(small, adamw, data), exact=True)


def test_a_scheduler_and_a_state_that_is_loaded_count(size):
    data = numbers(4)
    expected, model = make(small), make(small)
    plain = adamw(expected.parameters())
    with dist.create_mesh([("dp", size)]):
        optimizer = dist.shard_optimizer(adamw(model.parameters()), dist.ShardingStage1("dp"))
    both = (expected, plain), (model, optimizer)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for _, each in both]
    for pair in data[:2]:
        for (each, own), scheduler in zip(both, schedulers, strict=True):
            train(each, own, [pair])
            scheduler.step()
    again = dist.shard_optimizer(adamw(model.parameters()), dist.ShardingStage1(0, line(size)))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.01 * 0.25
    assert train(expected, plain, data[2:]) == train(model, again, data[2:])


def test_a_function_places_the_state_of_an_optimizer(size):
    mesh, data = line(size), numbers()
    seen = []

    def place(name, parameter, state):
        seen.append(name)
        return dist.shard_tensor(state, mesh, [dist.Shard(0)])

    model = dist.shard_layer(make(small), mesh)
    optimizer = dist.shard_optimizer(adamw(model.parameters()), place)
    assert {*seen} == {"exp_avg", "exp_avg_sq"}
    with pytest.raises(dist.UsageError, match="as a DTensor of the shape"):
        dist.shard_optimizer(adamw(model.parameters()), lambda *_: None)
    losses = train(model, optimizer, data)
    assert_same((losses, weights(model)), alone(small, adamw, data))


def test_gradients_are_made_complete_in_the_last_of_several_backward_passes(size):
    mesh, data = line(size), numbers(2, 12)
    model = dist.shard_layer(make(small), mesh)
    optimizer = dist.shard_optimizer(
        sgd(model.parameters()), dist.ShardingStage2("dp", mesh), gradient_accumulation_steps=2
    )
    expected = make(small)
    for (x, y), pair in zip(dist.shard_dataloader(data, mesh, shard_dims=0), data, strict=True):
        F.mse_loss(model(x), y).backward()
        F.mse_loss(expected(pair[0]), pair[1]).backward()
    optimizer.step()
    sgd(expected.parameters()).step()
    assert_same(([], weights(model)), ([], weights(expected)))


@pytest.mark.parametrize("stage", first_of([2, 1, 3]))
def test_an_optimizer_of_arrays_is_sharded_over_an_axis(stage, rank, size):
    mesh = line(size)
    weight = dist.Parameter(np.arange(5.0))
    optimizer = dist.optim.Momentum([("w", weight)], 0.5)
    cut = getattr(dist, f"ShardingStage{stage}")("dp", mesh)
    optimizer = dist.shard_optimizer(optimizer, cut)
    for step in (1, 2):
        weight.grad = np.full(5, float(rank))
        optimizer.step()
        slope = np.full(5, (size - 1) / 2)
        expected = np.arange(5.0) - 0.5 * slope * (1 if step == 1 else 2.9)
        assert np.allclose(optimizer.model.state_dict()["w"], expected)


def test_all_ranks_skip_the_step_in_which_one_of_them_has_an_infinite_gradient(rank, size):
    model = make(small)
    optimizer = sgd(model.parameters())
    scaler = dist.shard_scaler(torch.amp.GradScaler("cpu", init_scale=4.0))
    before = weights(model)
    (x, y), *_ = numbers(1)
    factor = float("inf") if rank == size - 1 else 1.0
    scaler.scale(F.mse_loss(model(x), y) * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(each, before[name]) for name, each in weights(model).items())
    assert scaler.get_scale() == 2.0


LOSSES = {
    name: getattr(F, name)
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "binary_cross_entropy_with_logits",
    )
} | {
    "binary_cross_entropy": lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y, **how),
    "mean": lambda x, y, reduction: (x - y).square().mean(),
    "var": lambda x, y, reduction: (x - y).var(),
}


@pytest.mark.parametrize("reduction", first_of(["mean", "sum", "none"]))
def test_losses_of_parts_and_their_gradients_are_those_of_the_whole(reduction, size):
    mesh = line(size)
    generator = torch.Generator().manual_seed(2)
    x, y = (draw(5, 3, generator=generator).double() for draw in (torch.randn, torch.rand))
    for name, loss in LOSSES.items():
        own = x.clone().requires_grad_()
        expected = loss(own, y, reduction=reduction)
        expected.sum().backward()
        cut, labels = (
            dist.shard_tensor(nn.Parameter(each), mesh, [dist.Shard(0)]) for each in (x, y)
        )
        got = loss(cut, labels.detach(), reduction=reduction)
        got.sum().backward()
        assert close(whole(got), expected), name
        assert close(whole(cut.grad), own.grad), name


# ---- parallelize

TENSOR_PARALLEL = {
    "words": dist.RowWiseParallel(),
    r"blocks\.\d\.(q|k|v|up)": dist.ColWiseParallel(),
    "blocks.*.(o|down)": dist.RowWiseParallel(),
    "head": dist.ColWiseParallel(gather_output=True),
}
SEQUENCE_PARALLEL = {
    "begin and end": {
        "first": dist.SequenceParallelBegin(),
        "up": [dist.SequenceParallelEnd(), dist.ColWiseParallel()],
        "down": [dist.RowWiseParallel(), dist.SequenceParallelBegin()],
        "last": dist.SequenceParallelEnd(),
    },
    "enable": {"norm": dist.SequenceParallelEnable(), "up.weight": dist.ColWiseParallel()},
    "disable": {
        "first": dist.SequenceParallelBegin(),
        "up": dist.SequenceParallelDisable(),
        "last": dist.SequenceParallelEnd(),
    },
}


def plan(plans, **data):
    return {"mp_config": {"parallelize_plan": plans}, "dp_config": data}


def test_tensor_parallelism_trains_as_one_process(size):
    data = words()
    model = make(Language)
    model, optimizer = dist.parallelize(
        model, sgd(model.parameters()), line(size, "mp"), plan(TENSOR_PARALLEL)
    )
    assert model.blocks[0].q.weight.to_local().shape == (WIDTH // size, WIDTH)
    assert model.blocks[0].o.weight.to_local().shape == (WIDTH, WIDTH // size)
    losses = train(model, optimizer, data, cross_entropy)
    assert_same((losses, weights(model)), alone(Language, sgd, data, cross_entropy))


@pytest.mark.parametrize("kind", first_of(SEQUENCE_PARALLEL))
def test_sequence_parallelism_trains_as_one_process(kind, size):
    data = numbers(2, 3, LENGTH)
    model = make(Rows)
    model, optimizer = dist.parallelize(
        model, adamw(model.parameters()), line(size, "mp"), plan(SEQUENCE_PARALLEL[kind])
    )
    losses = train(model, optimizer, data)
    assert_same((losses, weights(model)), alone(Rows, adamw, data))


class Attends(nn.Module):
    joins = False

    def forward(self, q, k, v, scale=None):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return found.transpose(1, 2).flatten(2) if self.joins else found


class Long(nn.Module):
    """Layers that have a part of each sequence, but for those that attend."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.rest = nn.ModuleDict(
            {
                "places": nn.Embedding(LENGTH, WIDTH),
                "qkv": nn.Linear(WIDTH, 3 * WIDTH),
                "first": Attends(),
                "second": Attends(),
                "up": nn.Linear(WIDTH, 2 * WIDTH),
                "down": nn.Linear(2 * WIDTH, WORDS),
            }
        )
        self.body = Body(self.rest)

    def forward(self, x):
        places = torch.arange(x.shape[1]).expand_as(x)
        return self.body(self.words(x), places)


class Body(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.layers["second"].joins = True

    def forward(self, x, places):
        x = x + self.layers["places"](places)
        for name in ("first", "second"):
            batch, length, _ = x.shape
            q, k, v = (
                each.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
                for each in self.layers["qkv"](x).chunk(3, -1)
            )
            found = self.layers[name](q, k, v, 0.5)
            joins = self.layers[name].joins
            x = x + (found if joins else found.transpose(1, 2).flatten(2))
        return self.layers["down"](F.gelu(self.layers["up"](x)))


OF_SEQUENCES = {
    "body": dist.PrepareContextParallel("all2all"),
    r"rest\.(first|second)": dist.ContextParallel("all2all"),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("level", first_of([0, 3, 1, 2]))
@pytest.mark.parametrize("section", ["cp_config", "mp_config"])
def test_context_parallelism_trains_as_one_process(section, level, size):
    rows = 1 if size % 2 else 2
    mesh = dist.ProcessMesh(np.arange(size).reshape(rows, size // rows), ["dp", "sep"])
    (row, place), ranks, data = mesh.coordinate, size // rows, words(3, 4)
    model = make(Long)
    config = {section: {"parallelize_plan": OF_SEQUENCES}, "dp_config": {"sharding_level": level}}
    model, optimizer = dist.parallelize(model, sgd(model.parameters()), mesh, config)
    mine = slice(place * LENGTH // ranks, (place + 1) * LENGTH // ranks)
    own = [(x, y[:, mine]) for x, y in own_rows(data, row, rows)]
    assert model(own[0][0]).shape == (4 // rows, LENGTH // ranks, WORDS)
    train(model, optimizer, own, cross_entropy)
    assert_same(([], weights(model)), ([], alone(Long, sgd, data, cross_entropy)[1]))


def test_what_context_parallelism_cannot_do_is_refused(size):
    mesh = line(size, "sep")

    def cut(plans, mesh=mesh):
        return dist.parallelize(make(Long), None, mesh, {"cp_config": {"parallelize_plan": plans}})

    for words_, call in {
        "use backend=.all2all": lambda: cut({"body": dist.PrepareContextParallel()}),
        "must be 'p2p' or 'all2all'": lambda: dist.ContextParallel("ring"),
        "along an axis 'sep'": lambda: cut(OF_SEQUENCES, line(size)),
        "no layer": lambda: cut({"bodi": dist.ContextParallel("all2all")}),
        "do not go together": lambda: cut({**OF_SEQUENCES, "rest.up": dist.ColWiseParallel()}),
        "must take query, key and value": lambda: cut({"body": dist.ContextParallel("all2all")})[0](
            words()[0][0]
        ),
    }.items():
        with pytest.raises(dist.UsageError, match=words_):
            call()
    if size > 1:
        model, _ = cut(OF_SEQUENCES)
        with pytest.raises(dist.UsageError, match="no equal parts"):
            model(torch.zeros(2, LENGTH - 1, dtype=torch.int64))


def test_a_sequence_that_does_not_go_into_the_ranks_is_an_error_on_all_of_them(size):
    if size == 1:
        pytest.skip("everything goes into one rank")
    model, _ = dist.parallelize(
        make(Rows), None, line(size, "mp"), plan(SEQUENCE_PARALLEL["begin and end"])
    )
    with pytest.raises(dist.UsageError, match="pad it"):
        model(torch.zeros(2, 13, 6).double())


@pytest.mark.parametrize("level", first_of([3, 0, 1, 2]))
def test_a_grid_cuts_layers_along_one_axis_and_the_batch_along_the_other(level, rank, size):
    mesh, data = grid(size), words(2, 4)
    rows, row = mesh.shape[0], mesh.coordinate[0]
    model = make(Language)
    model, optimizer = dist.parallelize(
        model, sgd(model.parameters()), mesh, plan(TENSOR_PARALLEL, sharding_level=level)
    )
    train(model, optimizer, own_rows(data, row, rows), cross_entropy)
    _, expected = alone(Language, sgd, data, cross_entropy)
    assert_same(([], weights(model)), ([], expected))


@pytest.mark.parametrize("level", first_of([2, 0, 1, 3]))
def test_every_level_trains_on_parts_of_the_batch_as_one_process(level, rank, size):
    data = numbers()
    model = make(small)
    model, optimizer = dist.parallelize(
        model, sgd(model.parameters()), line(size), {"dp_config": {"sharding_level": level}}
    )
    train(model, optimizer, own_rows(data, rank, size))
    assert_same(([], weights(model)), ([], alone(small, sgd, data)[1]))


@pytest.mark.parametrize("level", first_of([3, 2]))
def test_a_model_is_sharded_before_it_has_an_optimizer(level, rank, size):
    data = numbers()
    with line(size):
        model, nothing = dist.parallelize(
            make(small), config={"dp_config": {"sharding_level": level}}
        )
    assert nothing is None
    train(model, adamw(model.parameters()), own_rows(data, rank, size))
    assert_same(([], weights(model)), ([], alone(small, adamw, data)[1]))


def test_plans_prepare_what_layers_get_and_return(size):
    seen = []

    def before(process_mesh):
        return lambda layer, inputs: seen.append(process_mesh) or inputs

    def after(process_mesh):
        return lambda layer, inputs, output: output * 2

    plans = {"0": [dist.PrepareLayerInput(before), dist.PrepareLayerOutput(after)]}
    mesh = line(size, "mp")
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    model, _ = dist.parallelize(make(small), None, mesh, plan(plans))
    expected = make(small)
    assert torch.equal(model(x), expected[1:](expected[0](x) * 2))
    assert seen == [mesh]


# ---- fully_shard


@pytest.mark.parametrize("kind", first_of(["grid", "line", "none"]))
def test_fully_shard_takes_meshes_of_ours(kind, rank, size):
    data = numbers()
    mesh = {"line": line(size), "grid": grid(size), "none": None}[kind]
    model = make(small)
    for part in (model[0], model):
        assert dist.fully_shard(part, mesh=mesh, reshard_after_forward=True) is part
    train(model, sgd(model.parameters()), own_rows(data, rank, size))
    assert_same(([], weights(model)), ([], alone(small, sgd, data)[1]))


def test_fully_shard_asks_which_dimension_to_cut_and_leaves_out_what_it_is_told_to(size):
    model = make(Rows)
    kept = model.last.bias
    dist.fully_shard(
        model,
        mesh=line(size),
        shard_placement_fn=lambda each: dist.Shard(1) if each.shape == (48, 24) else None,
        ignored_params=[kept],
    )
    assert model.up.weight.placements[0].is_shard(1)
    assert model.down.weight.placements[0].is_shard(0)
    assert model.last.bias is kept


# ---- shard_dataloader


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rows", first_of([5, 4]))
def test_a_torch_loader_gives_each_sample_once_and_the_batches_of_one_process(rows, shuffle, size):
    samples = torch.arange(13.0).reshape(13, 1), torch.arange(13)
    loader = DataLoader(TensorDataset(*samples), batch_size=rows, shuffle=shuffle)
    ours = dist.shard_dataloader(loader, line(size), shard_dims="dp")
    assert len(ours) == len(loader)
    seen = []
    for epoch in range(2):
        if shuffle:
            ours.set_epoch(epoch)
        batches = [(whole(x), whole(y), x.placements) for x, y in ours]
        assert [len(x) for x, _, _ in batches] == [len(x) for x, _ in loader]
        assert all(torch.equal(x[:, 0], y.float()) for x, y, _ in batches)
        assert all(each[0].is_shard(0) for _, _, each in batches)
        seen.append([each for _, y, _ in batches for each in y.tolist()])
        assert sorted(seen[-1]) == list(range(13))
    assert (seen[0] != seen[1]) == shuffle


def test_a_rank_loads_only_its_own_samples(rank, size):
    class Counted(torch.utils.data.Dataset):
        taken = 0

        def __len__(self):
            return 12

        def __getitem__(self, index):
            self.taken += 1
            return torch.tensor([float(index)])

    counted = Counted()
    for _ in dist.shard_dataloader(DataLoader(counted, batch_size=12), line(size), shard_dims=0):
        pass
    assert counted.taken == 12 // size


def test_batches_of_arrays_become_arrays_across_ranks(size):
    data = [{"x": np.ones((rows, 2)), "y": np.arange(rows), "id": rows} for rows in (4, 3, 1)]
    mesh = line(size)
    for batch, given in zip(dist.shard_dataloader(data, mesh, shard_dims=0), data, strict=True):
        assert batch["x"].placements == [dist.Shard(0)]
        assert np.array_equal(dist.unshard_dtensor(batch["y"]), given["y"])
        assert batch["id"] == given["id"]
    whole_batches = dist.shard_dataloader(data, mesh)
    assert all(
        np.array_equal(b["y"].local, g["y"]) for b, g in zip(whole_batches, data, strict=True)
    )


def test_a_loader_that_cannot_be_indexed_and_a_batch_with_keys_and_dense_tensors(size):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.ones(2), "extra": torch.zeros(1)}] * 6)

    loader = dist.shard_dataloader(
        DataLoader(Stream(), batch_size=4),
        [line(size)],
        input_keys=["x"],
        shard_dims=["dp"],
    )
    batches = list(loader)
    assert [[*each] for each in batches] == [["x"], ["x"]]
    assert [tuple(each["x"].shape) for each in batches] == [(4, 2), (2, 2)]
    dense = dist.shard_dataloader(
        [([torch.ones(4, 1), torch.ones(4, 1)], torch.ones(4))], line(size), None, 0, False, [[1]]
    )
    (((first, second), label),) = dense
    assert isinstance(first, DTensor)
    assert not isinstance(second, DTensor)
    assert isinstance(label, DTensor)


def test_parts_of_a_dataset_that_is_split_already_are_joined(rank, size):
    mesh = line(size)
    parts = [torch.full((2, 1), float(rank)) for _ in range(3)]
    loader = dist.shard_dataloader(parts, mesh, shard_dims="dp", is_dataset_splitted=True)
    expected = torch.arange(float(size)).repeat_interleave(2)[:, None]
    assert all(torch.equal(whole(each), expected) for each in loader)
    uneven = [torch.zeros(1 + 2 * rank, 1)]
    if size > 1:
        with pytest.raises(dist.UsageError, match="split the dataset evenly"):
            list(dist.shard_dataloader(uneven, mesh, shard_dims=0, is_dataset_splitted=True))


def test_entries_of_a_batch_go_to_several_meshes(rank, size):
    if size == 1:
        pytest.skip("a mesh each for two ranks")
    meshes = dist.ProcessMesh([0], ["x"]), dist.ProcessMesh([1], ["x"])
    if rank > 1:
        with pytest.raises(dist.UsageError, match="in none of the meshes"):
            dist.shard_dataloader([], meshes)
        return
    ((x, y),) = dist.shard_dataloader([(torch.ones(2), torch.zeros(2))], meshes, shard_dims="x")
    assert (x is None, y is None) == (rank == 1, rank == 0)


def test_wrong_arguments_of_shard_dataloader_are_refused(size):
    mesh = line(size)
    for words_, args in {
        "shard_dims must be set": {"is_dataset_splitted": True},
        "no axis 'tp'": {"shard_dims": "tp"},
        "input_keys must be a list": {"input_keys": "x"},
        "one for each of the 1": {"shard_dims": ["dp", "dp"]},
    }.items():
        with pytest.raises(dist.UsageError, match=words_):
            dist.shard_dataloader([], mesh, **args)
    with pytest.raises(dist.UsageError, match="in more than one mesh"):
        dist.shard_dataloader([], [mesh, dist.ProcessMesh([0], ["x"])])
    with pytest.raises(dist.UsageError, match="iterable of batches"):
        dist.shard_dataloader(3, mesh)


# ---- DistModel


def run(model, batches):
    return [model(*pair).item() for pair in batches]


def test_an_ordinary_module_is_trained_on_parts_of_the_batch_as_one_process(rank, size):
    data = numbers()
    layer = make(small)
    loader = dist.shard_dataloader(data, line(size), shard_dims="dp")
    model = dist.to_static(layer, loader, F.mse_loss, adamw(layer.parameters()))
    assert model.mode == "train"
    run(model, loader)
    assert_same(([], weights(layer)), ([], alone(small, adamw, data)[1]))


def test_parts_of_different_length_are_refused_where_gradients_would_count_alike(size):
    layer, data = make(small), numbers(1, size + 1)
    loader = dist.shard_dataloader(data, line(size), shard_dims="dp")
    model = dist.to_static(layer, loader, F.mse_loss, adamw(layer.parameters()))
    if size == 1:
        run(model, loader)
        return
    with pytest.raises(dist.UsageError, match="has no equal parts"):
        run(model, loader)
    model.eval()
    run(model, loader)


def test_a_module_on_a_mesh_has_the_losses_of_one_process(size):
    data = words(1) + words(1, 5)
    layer = dist.shard_layer(make(Language), line(size))
    loader = dist.shard_dataloader(data, line(size), shard_dims="dp")
    model = dist.to_static(layer, loader, cross_entropy, sgd(layer.parameters()))
    assert_same((run(model, loader), weights(layer)), alone(Language, sgd, data, cross_entropy))


def fully_sharded(layer):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(layer)


class Scored(nn.Sequential):
    """Returns its rows, their mean and their number of columns."""

    def forward(self, x):
        rows = super().forward(x)
        return {"rows": (rows, rows.square()), "mean": rows.mean(), "width": rows.shape[1]}


@pytest.mark.parametrize("engine", [lambda layer: layer, fully_sharded], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("axes", [line, grid])
def test_an_ordinary_module_returns_what_one_process_would(axes, engine, size):
    mesh = axes(size)

    def on_mesh(batches):
        return dist.shard_dataloader(batches, mesh, shard_dims=mesh.names[0])

    layer, uneven = engine(make(small)), numbers(1, 5) + numbers(1, 1)
    optimizer = sgd(layer.parameters())
    model = dist.to_static(layer, on_mesh(numbers()), F.mse_loss, optimizer)
    losses, expected = run(model, on_mesh(numbers())), alone(small, sgd, numbers())
    assert_same((losses, weights(layer)), expected)
    trained = make(small)
    trained.load_state_dict(expected[1])
    model.eval()
    found = [model(*batch) for batch in on_mesh(uneven)]
    for loss, (x, y) in zip(found, uneven, strict=True):
        assert close(loss, F.mse_loss(trained(x), y))
    model.predict()
    for (x, _), (whole_x, _) in zip(on_mesh(uneven), uneven, strict=True):
        assert close(model(x), trained(whole_x).detach())


def test_all_that_a_module_returns_is_of_the_whole_batch(size):
    mesh, ((x, _),) = line(size), numbers(1, 7)
    model = dist.to_static(make(lambda: Scored(*small())))
    ((given,),) = dist.shard_dataloader([(x,)], mesh, shard_dims="dp")
    found, rows = model(given), make(small)(x).detach()
    assert close(found["rows"][0], rows)
    assert close(found["rows"][1], rows.square())
    assert close(found["mean"], rows.mean())
    assert found["width"] == 3
    assert close(model(x[:2])["rows"][0], make(small)(x[:2]))  # an ordinary tensor is a rank's own


def test_a_model_from_parallelize_takes_its_part_of_batches_on_the_mesh(size):
    mesh, data = grid(size), words(2, 4)
    model = make(Language)
    layer, optimizer = dist.parallelize(model, sgd(model.parameters()), mesh, plan(TENSOR_PARALLEL))
    loader = dist.shard_dataloader(data, mesh, shard_dims="dp")
    losses = run(dist.to_static(layer, loader, cross_entropy, optimizer), loader)
    assert_same((losses, weights(layer)), alone(Language, sgd, data, cross_entropy))


def test_a_forward_that_fails_leaves_nothing_behind(size):
    class Failing(nn.Linear):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return super().forward(x)

    torch.manual_seed(1)
    model = dist.shard_layer(Failing(6, 2), line(size))
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            model(torch.zeros(3, 6))
    assert not isinstance(model(torch.zeros(2, 6)), DTensor)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.weight + torch.zeros(2, 6)


@pytest.mark.parametrize("stage", first_of([2, 1, 3]))
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_strategy_shards_recomputes_and_merges_gradients(stage, on_mesh, rank, size):
    data = numbers(4, 12)
    mesh = line(size)
    layer = make(small)
    if on_mesh:
        dist.shard_layer(layer, mesh)
    strategy = dist.Strategy(
        {
            "sharding": {"enable": True, "stage": stage},
            "gradient_merge": {"enable": True, "k_steps": 2},
            "recompute": {"enable": True, "no_recompute_segments": [1]},
        }
    )
    loader = dist.shard_dataloader(data, mesh, shard_dims="dp")
    model = dist.to_static(layer, loader, F.mse_loss, sgd(layer.parameters()), strategy)
    run(model, loader)
    joined = [tuple(map(torch.cat, zip(*data[i : i + 2], strict=True))) for i in (0, 2)]
    assert_same(([], weights(layer)), ([], alone(small, sgd, joined)[1]))


@pytest.mark.parametrize("dtype", first_of(["float16", "bfloat16"]))
def test_a_strategy_computes_in_16_bits_and_keeps_weights_in_32(dtype, size):
    data = numbers(4)
    seen = set()
    layer = make(small).float()
    layer[0].register_forward_hook(lambda _, inputs, output: seen.add(output.dtype))
    in_32 = [tuple(each.float() for each in pair) for pair in data]
    loader = dist.shard_dataloader(in_32, line(size), shard_dims="dp")
    strategy = dist.Strategy({"amp": {"enable": True, "dtype": dtype}})
    model = dist.to_static(layer, loader, F.mse_loss, sgd(layer.parameters()), strategy)
    run(model, loader)
    assert seen == {getattr(torch, dtype)}
    _, expected = alone(small, sgd, data)
    for name, each in weights(layer).items():
        assert each.dtype is torch.float32
        assert torch.allclose(each.double(), expected[name], atol=0.02)


def test_modes_of_a_model_and_what_it_communicates(rank, size):
    (x, y), *_ = numbers(1)
    layer = make(small)
    layer.append(nn.Dropout(0.5))
    model = dist.to_static(layer, None, F.mse_loss, sgd(layer.parameters()))
    with pytest.raises(dist.UsageError, match="no batch has been run"):
        model.dist_main_program()
    model(x, y)
    program = model.dist_main_program("train")
    assert ("all_reduce" in str(program)) == (size > 1)
    serial = model.serial_main_program("train")
    assert serial.operations == tuple(f"{name}: {each}" for name, each in layer.named_children())
    with pytest.raises(dist.UsageError, match="mode must be one of train, eval, predict"):
        model.serial_main_program("infer")
    expected = layer[:-1](x)
    model.eval()
    assert torch.allclose(model(x, y), F.mse_loss(expected, y))
    assert "all_reduce" not in str(model.dist_main_program())
    model.predict()
    assert torch.allclose(model(x), expected)
    with pytest.raises(dist.UsageError, match="needs loss and optimizer"):
        dist.to_static(make(small)).train()
    assert dist.to_static(make(small), loss=F.mse_loss).mode == "eval"


@pytest.mark.parametrize("kind", first_of(["sharded", "mesh", "ordinary"]))
def test_a_state_is_loaded_and_training_goes_on_as_if_nothing_had_happened(kind, rank, size):
    data, mesh = numbers(4), line(size)

    def fresh(seed):
        torch.manual_seed(seed)
        layer = small().double()
        if kind == "mesh":
            dist.shard_layer(layer, mesh)
        strategy = dist.Strategy({"sharding": {"enable": kind != "ordinary", "stage": 2}})
        optimizer = adamw(layer.parameters())
        return layer, dist.to_static(layer, loader, F.mse_loss, optimizer, strategy)

    loader = dist.shard_dataloader(data, mesh, shard_dims=0)
    layer, model = fresh(3)
    run(model, list(loader)[:2])
    state = {
        name: each.clone() if isinstance(each, torch.Tensor) else each
        for name, each in model.state_dict().items()
    }
    other, again = fresh(4)
    again.set_state_dict(state)
    for each in (model, again):
        run(each, list(loader)[2:])
    assert_same(([], weights(other)), ([], weights(layer)), exact=kind != "sharded")
    assert {*model.state_dict("param")} | {*model.state_dict("opt")} == {*model.state_dict()}
    with pytest.raises(dist.UsageError, match="'all', 'param' or 'opt'"):
        model.state_dict("none")


def test_what_a_strategy_cannot_have_is_an_error_and_what_it_need_not_have_a_warning(size):
    layer = make(small)

    def static(**sections):
        return dist.to_static(
            layer, None, F.mse_loss, sgd(layer.parameters()), dist.Strategy(sections)
        )

    for words_, sections in {
        "dist.parallelize with pp_config": {"pipeline": {"enable": True}},
        "level 'o1'": {"amp": {"enable": True, "level": "o2"}},
        "k_steps must be": {"gradient_merge": {"enable": True, "k_steps": 0}},
        "name of no layer": {"recompute": {"enable": True, "checkpoints": ["9"]}},
    }.items():
        with pytest.raises(dist.UsageError, match=words_):
            static(**sections)
    with pytest.warns(UserWarning, match=r"no effect: fused_passes\.enable"):
        static(fused_passes={"enable": True})


# ---- LocalLayer


def test_a_local_layer_computes_on_parts(rank, size):
    mesh = line(size)

    class Sums(dist.LocalLayer):
        def forward(self, x, y):
            assert not isinstance(x, DTensor)
            return (x * y).sum()

    sums = Sums([(mesh, [dist.Partial()])], [(mesh, [dist.Shard(0)])] * 2)
    x = torch.arange(8.0)
    cut = dist.shard_tensor(nn.Parameter(x), mesh, [dist.Shard(0)])
    result = sums(cut, cut.detach())
    assert result.placements[0].is_partial()
    assert whole(result) == (x * x).sum()
    result.full_tensor().backward()
    assert torch.equal(whole(cut.grad), x)
    with pytest.raises(dist.UsageError, match="describes 2 outputs"):
        Sums([(mesh, [dist.Partial()])] * 2)(cut, cut)
    with pytest.raises(dist.UsageError, match="list of pairs"):
        Sums([mesh])


# ---- arguments


def test_wrong_arguments_are_refused(size):
    mesh, model = line(size, "mp"), make(Rows)
    optimizer = sgd(model.parameters())
    plans = {
        "no layer; the layers are first": {"frist": dist.ColWiseParallel()},
        "cut Linear and Embedding": {"norm": dist.ColWiseParallel()},
        "convolutions are not cut": {"up": dist.ConvParallel()},
        "such as ColWiseParallel": {"up": "column"},
    }
    for words_, wrong in plans.items():
        with pytest.raises(dist.UsageError, match=words_):
            dist.parallelize(model, optimizer, mesh, plan(wrong))
    for words_, config in {
        "did you mean 'dp_config'": {"dp_confg": {}},
        "did you mean 'sharding_level'": {"dp_config": {"shardng_level": 1}},
        "must be 0, 1, 2 or 3": {"dp_config": {"sharding_level": 4}},
        "cp_config has no key 'degree'": {"cp_config": {"degree": 2}},
        "did you mean 'split_spec'": {"pp_config": {"split_specs": "blocks"}},
    }.items():
        with pytest.raises(dist.UsageError, match=words_):
            dist.parallelize(model, optimizer, mesh, config)
    for words_, call in {
        "needs an axis 'mp'": lambda: dist.parallelize(
            model, None, line(size), plan({"up": dist.ColWiseParallel()})
        ),
        "cannot be empty": lambda: dist.shard_layer(model, None),
        "not `dist.ProcessMesh`": lambda: dist.shard_layer(model, [0]),
        "not a torch.nn.Module": lambda: dist.shard_layer("model", mesh),
        "at least 1": lambda: dist.shard_optimizer(optimizer, None, 0),
        "a function or None": lambda: dist.shard_optimizer(optimizer, 3),
        "call shard_layer": lambda: dist.shard_optimizer(
            optimizer, dist.ShardingStage3("mp", mesh)
        ),
        "no axis 'dp'": lambda: dist.shard_optimizer(optimizer, dist.ShardingStage1("dp", mesh)),
        "takes a torch.amp.GradScaler": lambda: dist.shard_scaler(optimizer),
        "must be a Strategy": lambda: dist.to_static(model, strategy={"amp": {}}),
        "but no loss": lambda: dist.to_static(model, optimizer=optimizer),
    }.items():
        with pytest.raises(dist.UsageError, match=words_):
            call()
    with pytest.raises(AssertionError, match="takes an optimizer"):  # as in Paddle
        dist.shard_optimizer(model)


def test_a_parameter_is_not_cut_twice_over_one_axis(size):
    mesh = line(size)

    def cut(name, layer, mesh):
        if name == "0":
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(1)])

    model = dist.shard_layer(make(small), mesh, cut)
    with pytest.raises(dist.UsageError, match="shard twice"):
        dist.shard_optimizer(adamw(model.parameters()), dist.ShardingStage1("dp", mesh))


# ---- pipelines


def deep():
    """A row of which the layers that repeat are a row of their own."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(8)))
    parts = {"first": nn.Linear(6, 7), "blocks": blocks, "last": nn.Linear(7, 3)}
    row = nn.Sequential()
    for name, part in parts.items():
        row.add_module(name, part)
    return row


def pipeline_config(spec, micro=2, steps=None, **data):
    pp = {"split_spec": spec, "loss_fn": F.mse_loss, "micro_batch_size": micro}
    return {"pp_config": {**pp, "accumulate_steps": steps}, "dp_config": data}


def points(size, chunks=1):
    """Cut the row after blocks, and once before one."""
    stages = size * chunks
    ends = [f"blocks.{8 * stage // stages - 1}" for stage in range(1, stages)]
    spec = dict.fromkeys(ends, dist.SplitPoint.END)
    if len(spec) > 1:
        spec.pop(ends[0])
        spec[f"blocks.{8 // stages}.0"] = dist.SplitPoint.BEGINNING
    return spec


def assert_pipeline_trains(mesh, spec, optimizer, data, rows=12, **settings):
    place = mesh.get_rank_by_dim_and_process_id("dp", dist.get_rank()) if mesh.ndim > 1 else 0
    copies = mesh.get_dim_size("dp") if mesh.ndim > 1 else 1
    torch.manual_seed(3 + dist.get_rank())  # the first rank's weights count
    model = make(deep) if not dist.get_rank() else deep().double()
    steps = rows // 2 // copies
    model, own = dist.parallelize(
        model, optimizer(model.parameters()), mesh, pipeline_config(spec, steps=steps, **settings)
    )
    losses = [model.train_batch(each, own) for each in own_rows(data, place, copies)]
    expected = make(deep)
    other = optimizer(expected.parameters())
    alone_losses = train(expected, other, data)
    if copies == 1:
        assert np.allclose(losses, alone_losses, rtol=ROUNDED)
    flat = [each for each in expected.modules() if isinstance(each, (nn.Linear, nn.Tanh))]
    whole_row = nn.Sequential(*flat).state_dict()
    mine = model.state_dict()
    assert all(close(each, whole_row[name]) for name, each in mine.items())
    kept = [each for group in own.param_groups for each in group["params"]]
    assert {*map(id, kept)} == {*map(id, model.parameters())}
    return mine


@pytest.mark.parametrize("optimizer", first_of([adamw, adagrad, sgd]))
def test_a_row_of_layers_trains_as_a_pipeline(optimizer, size):
    mine = assert_pipeline_trains(line(size, "pp"), r"blocks\.\d+\.0", optimizer, numbers())
    counts = []
    dist.all_gather_object(counts, len(mine))
    assert sum(counts) == 20
    assert max(counts) < 20 or size == 1


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_row_of_layers_is_cut_at_split_points(chunks, size):
    assert_pipeline_trains(line(size, "pp"), points(size, chunks), sgd, numbers())


def test_pipelines_beside_each_other_average_gradients(size):
    rows = 1 if size % 2 else 2
    for ranks in (np.arange(size), np.arange(size)[::-1]):
        mesh = dist.ProcessMesh(ranks.reshape(rows, size // rows), ["dp", "pp"])
        assert_pipeline_trains(mesh, r"blocks\.\d+\.0", sgd, numbers())


def test_what_cannot_be_a_pipeline_is_refused(size):
    mesh = line(size, "pp")
    row = make(deep)
    tied = nn.Sequential(*[row.first] * size, nn.Linear(7, 3))
    for words_, (model, config, on) in {
        "Rows has a forward of its own": (make(Rows), pipeline_config("up"), mesh),
        "needs split_spec": (row, {"pp_config": {"loss_fn": F.mse_loss}}, mesh),
        "names 0 layers": (row, pipeline_config("block"), mesh),
        "did you mean 'first'": (row, pipeline_config({"frist": dist.SplitPoint.END}), mesh),
        "SplitPoint.BEGINNING or": (row, pipeline_config({"first": "END"}), mesh),
        "in a tuple": (row, {"pp_config": {"split_spec": "blocks", "global_spec": "first"}}, mesh),
        "do not go together": (
            row,
            {**plan({"first": dist.ColWiseParallel()}), **pipeline_config("blocks")},
            mesh,
        ),
        "sharding_level does not go": (row, pipeline_config("blocks", sharding_level=1), mesh),
        "needs an axis 'pp'": (row, pipeline_config("blocks"), line(size)),
        "fleet.distributed_model": (
            row,
            pipeline_config("blocks"),
            dist.ProcessMesh(np.arange(size)[None], ["mp", "pp"]),
        ),
        **({"share a weight": (tied, pipeline_config(r"\d+"), mesh)} if size > 1 else {}),
    }.items():
        with pytest.raises(dist.UsageError, match=words_):
            dist.parallelize(model, sgd(model.parameters()), on, config)
    if size > 1:
        with pytest.raises(dist.UsageError, match="makes 1 stages"):
            dist.parallelize(row, None, mesh, pipeline_config({}))


def test_a_pipeline_that_one_rank_cannot_make_is_refused_on_all(rank, size):
    model = make(Rows) if rank == size - 1 else make(deep)
    with pytest.raises(dist.UsageError if rank == size - 1 else dist.RemoteError):
        dist.parallelize(model, None, line(size, "pp"), pipeline_config(r"blocks\.\d+\.0"))


def test_a_pipeline_is_no_dist_model(size):
    mesh = line(size, "pp")
    model, optimizer = dist.parallelize(make(deep), None, mesh, pipeline_config(r"blocks\.\d+\.0"))
    with pytest.raises(dist.UsageError, match="train_batch"):
        dist.to_static(model, None, F.mse_loss, optimizer)


# ---- a program of one process


@pytest.mark.parametrize("optimizer", first_of([adamw, adagrad, sgd]))
def test_a_program_of_one_process_runs_on_all_ranks(optimizer, size):
    data, model = numbers(), make(small)
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*data, strict=True))), batch_size=12)
    model, cut, batches = dist.to_distributed(model, optimizer(model.parameters()), loader, size)
    losses = train(model, cut, batches)
    assert_same((losses, weights(model)), alone(small, optimizer, data))
    states = [each for each in cut.state[model[0].weight].values() if each.ndim]
    assert all(each.placements[0].is_shard(0) for each in states)


def test_wrong_arguments_of_to_distributed_are_refused(size):
    model = make(small)
    optimizer, config = sgd(model.parameters()), dist.auto_parallel.ToDistributedConfig()
    with pytest.raises(dist.UsageError, match=f"but the job has {size}"):
        dist.to_distributed(model, optimizer, [], size, 2)
    with pytest.raises(dist.UsageError, match="device_num must be a positive integer"):
        dist.to_distributed(model, optimizer, [], 0)
    with pytest.raises(dist.UsageError, match="takes a torch"):
        dist.to_distributed([np.ones(3)], optimizer, [], size)
    with pytest.raises(dist.UsageError, match="must be a ToDistributedConfig"):
        dist.to_distributed(model, optimizer, [], size, config={})
    config.sequence_parallel = True
    with pytest.raises(dist.UsageError, match="use parallelize with SequenceParallelBegin"):
        dist.to_distributed(model, optimizer, [], size, config=config)
