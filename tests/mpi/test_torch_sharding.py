"""Sharding of torch modules, at every level, on the ranks of this MPI job."""

import copy
import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from checks import ROUNDED, assert_raised, outcome  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import hpcdist as dist  # noqa: E402

LEVELS = ["os", "os_g", "p_g_os"]
MAKERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]


def network(dtype=torch.float64):
    torch.manual_seed(3)
    widths = 6, 17, 13, 3
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batches(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    rows = 2 * dist.get_world_size()
    for _ in range(count):
        x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)
        yield x.to(dtype), y.to(dtype)


def train(model, optimizer, data, clip=None):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if clip is not None:
            dist.clip_grad_norm_(model, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def share(data):
    rank, size = dist.get_rank(), dist.get_world_size()
    return [(x[rank::size], y[rank::size]) for x, y in data]


def mean_of(losses):
    total = np.array(losses)
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total


def weights(model):
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


def sharded(module, maker, level, **options):
    options = {"segment_size": 0, "buffer_max_size": 300, **options}
    return dist.group_sharded_parallel(module, maker(module.parameters()), level, **options)


def assert_close(found, expected, rtol=ROUNDED, atol=ROUNDED):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_module_trains_as_in_one_process(level, maker):
    data = list(batches(4))
    alone = network()
    expected = train(alone, maker(alone.parameters()), data)
    model, optimizer, _ = sharded(network(), maker, level)
    found = mean_of(train(model, optimizer, share(data)))
    np.testing.assert_allclose(found, expected, rtol=ROUNDED)
    assert_close(weights(model), weights(alone))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_the_optimizer_may_have_parameters_that_are_frozen(level, maker):
    data = list(batches(4))

    def frozen():
        module = network()
        module[0].requires_grad_(False)
        return module

    alone = frozen()
    train(alone, maker(alone.parameters()), data)
    model, optimizer, _ = sharded(frozen(), maker, level)
    train(model, optimizer, share(data[:2]))
    state = model.sharded_state_dict(), optimizer.sharded_state_dict()
    again, its_optimizer, _ = sharded(frozen(), maker, level)
    again.load_sharded_state_dict(state[0])
    its_optimizer.load_sharded_state_dict(state[1])
    for trained, by in ((model, optimizer), (again, its_optimizer)):
        train(trained, by, share(data[2:]))
        assert_close(weights(trained), weights(alone))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("is_late", [False, True], ids=["before a pass", "after it"])
def test_a_layer_may_be_frozen_while_it_has_a_gradient_and_trained_again(level, maker, is_late):
    data = list(batches(5))

    def train_in_parts(model, optimizer, layer, given):
        for step, (x, y) in enumerate(given):
            if not is_late:
                layer.requires_grad_(step not in (1, 2))
            (model(x) - y).square().mean().backward()
            layer.requires_grad_(step not in (1, 2))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    alone, module = network(), network()
    train_in_parts(alone, maker(alone.parameters()), alone[2], data)
    model, optimizer, _ = sharded(module, maker, level)
    train_in_parts(model, optimizer, module[2], share(data))
    assert_close(weights(model), weights(alone))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_passes_in_no_sync_count_in_the_next_step(level):
    data = list(batches(2))
    alone = network()
    its = MAKERS["SGD"](alone.parameters())
    model, optimizer, _ = sharded(network(), MAKERS["SGD"], level)
    for trained, parts in ((alone, data), (model, share(data))):
        for number, (x, y) in enumerate(parts):
            inside = trained is model and number == 0
            with model.no_sync() if inside else nullcontext():
                (trained(x) - y).square().mean().backward()
    its.step()
    optimizer.step()
    assert_close(weights(model), weights(alone))


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_without_a_part_in_the_loss_is_an_error_at_level_os_alone(level):
    module = network()
    module[0].left_out = nn.Parameter(torch.ones(2).double())
    model, optimizer, _ = sharded(module, MAKERS["SGD"], level)
    told = outcome(lambda: train(model, optimizer, share(batches(1))))
    if level == "os":
        assert_raised(told, "UsageError", ["no gradient for 0.left_out", "use level os_g"])
    else:
        assert {kind for kind, _ in told} == {"nothing"}
        assert weights(model)["0.left_out"].tolist() == [1, 1]


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_may_have_states_from_the_beginning(level):
    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, 0.05, initial_accumulator_value=0.1)

    test_a_module_trains_as_in_one_process(level, adagrad)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dampened_momentum_begins_with_a_whole_gradient_wherever_its_state_has_been(level, dtype):
    def dampened(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5)

    data = share(batches(2, dtype))
    model, optimizer, _ = sharded(network(dtype), dampened, level)
    train(model, optimizer, data)
    expected = weights(model)

    model, optimizer, _ = sharded(network(dtype), dampened, level)
    before = copy.deepcopy(optimizer.sharded_state_dict())
    assert any(name.endswith("momentum_buffer") for name in before) or level == "os"
    train(model, optimizer, data[:1])
    between = [copy.deepcopy(each.sharded_state_dict()) for each in (model, optimizer)]
    train(model, optimizer, data[1:])
    assert_close(weights(model), expected, rtol=0, atol=0)

    model, optimizer, _ = sharded(network(dtype), dampened, level)
    optimizer.load_sharded_state_dict(before)
    train(model, optimizer, data)
    assert_close(weights(model), expected, rtol=0, atol=0)

    model, optimizer, _ = sharded(network(dtype), dampened, level)
    for each, state in zip((model, optimizer), between, strict=True):
        each.load_sharded_state_dict(state)
    train(model, optimizer, data[1:])
    assert_close(weights(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_the_norm_of_gradients_is_that_of_the_whole_module(level):
    data = list(batches(3))
    alone = network()
    train(alone, MAKERS["SGD"](alone.parameters()), data, clip=0.1)
    model, optimizer, _ = sharded(network(), MAKERS["SGD"], level)
    train(model, optimizer, share(data), clip=0.1)
    assert_close(weights(model), weights(alone))


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_16_bits_have_masters_in_32(level):
    data = list(batches(3, torch.bfloat16))
    model, optimizer, _ = sharded(network(torch.bfloat16), MAKERS["AdamW"], level)
    train(model, optimizer, share(data))
    states = optimizer.optim.state if level == "os" else optimizer.state
    assert level != "os" or all("master" in each for each in states.values())
    assert {v.dtype for each in states.values() for v in each.values()} <= {torch.float32}
    alone = network(torch.float32).to(torch.bfloat16).to(torch.float32)
    train(alone, MAKERS["AdamW"](alone.parameters()), [(x.float(), y.float()) for x, y in data])
    found = {name: each.float() for name, each in weights(model).items()}
    assert_close(found, weights(alone), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_all_ranks_skip_a_step_in_which_one_has_an_infinite_gradient(level):
    rank, size = dist.get_rank(), dist.get_world_size()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module = network()
    model, optimizer, scaler = dist.group_sharded_parallel(
        module, MAKERS["SGD"](module.parameters()), level, scaler, segment_size=0
    )
    before = weights(model)
    (x, y), *_ = share(batches(1))
    scaler.scale((model(x) - y).square().mean()).backward()
    if rank == size - 1:
        for gradient in [each.grad for each in model.parameters()]:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    assert_close(weights(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_replicas_of_a_sharded_module_train_together(level):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != 4:
        return
    rows, columns = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    own = dist.new_group(rows[rank // 2]), dist.new_group(columns[rank % 2])
    data = list(batches(3))
    alone = network()
    expected = train(alone, MAKERS["AdamW"](alone.parameters()), data)
    options = {"group": own[0], "dp_group": own[1]}
    model, optimizer, _ = sharded(network(), MAKERS["AdamW"], level, **options)
    found = mean_of(train(model, optimizer, share(data)))
    np.testing.assert_allclose(found, expected, rtol=ROUNDED)


def test_excluded_modules_and_offload_change_no_number():
    data = list(batches(3))
    alone = network()
    expected = train(alone, MAKERS["SGD"](alone.parameters()), data)
    for options in ({"exclude_layer": ["0"]}, {"offload": True}):
        model, optimizer, _ = sharded(network(), MAKERS["SGD"], "p_g_os", **options)
        found = mean_of(train(model, optimizer, share(data)))
        np.testing.assert_allclose(found, expected, rtol=ROUNDED)


class Tied(nn.Module):
    """Has a weight that two modules share, the second of them deeper than the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(2048, 256)
        self.head = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2048, bias=False))
        self.head[1].weight = self.embedding.weight

    def forward(self, x):
        return torch.tanh(self.head(self.embedding(x.argmax(1)))[:, :3])


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize("options", [{}, {"exclude_layer": ["embedding"]}])
def test_a_weight_that_modules_share_stays_one(level, options):
    data = list(batches(3))
    alone = Tied().double()
    expected = train(alone, MAKERS["SGD"](alone.parameters()), data)
    model, optimizer, _ = sharded(Tied().double(), MAKERS["SGD"], level, **options)
    assert model.head[1].weight is model.embedding.weight
    np.testing.assert_allclose(
        mean_of(train(model, optimizer, share(data))), expected, rtol=ROUNDED
    )
    assert_close(weights(model), weights(alone))


def test_wrong_companions_are_refused():
    module = network()
    stepped = MAKERS["SGD"](module.parameters())
    module(torch.ones(1, 6).double()).sum().backward()
    stepped.step()
    cases = [
        (dist.optim.SGD([dist.Parameter(np.ones(2))]), None, r"needs an optimizer of torch\.optim"),
        (stepped, None, "has taken steps already"),
        (MAKERS["SGD"](network().parameters()), None, "exactly the 6 parameters"),
        (MAKERS["SGD"](module.parameters()), dist.GradScaler(), "must be a torch.amp.GradScaler"),
    ]
    for optimizer, scaler, words in cases:
        with pytest.raises(dist.UsageError, match=words):
            dist.group_sharded_parallel(module, optimizer, "os", scaler)


def test_a_state_of_another_shape_than_its_parameter_is_refused():
    model, optimizer, _ = sharded(network(), torch.optim.Adafactor, "os")
    train(model, optimizer, share(batches(1)))
    own = any(each.ndim > 1 for each in optimizer.optim.state)
    found = []
    dist.all_gather_object(found, own)
    owners = [rank for rank, own in enumerate(found) if own]
    told = outcome(optimizer.sharded_state_dict)
    assert_raised(told, "UsageError", "weight.row_var' has shape", ranks=owners)


def test_a_state_that_lacks_what_one_rank_owns_is_refused_on_all_of_them():
    _, optimizer, _ = sharded(network(), MAKERS["SGD"], "os_g")
    state = dict(optimizer.sharded_state_dict())
    if dist.get_rank() == 0:
        del state["0.weight.momentum_buffer"]
    told = outcome(lambda: optimizer.load_sharded_state_dict(state))
    assert_raised(told, "UsageError", "the state has no '0.weight.momentum_buffer'", ranks=[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_shards_cover_every_tensor_once_and_load_again(level, maker):
    data = share(batches(4))
    model, optimizer, _ = sharded(network(), maker, level)
    train(model, optimizer, data[:2])
    whole = {name: each.numpy() for name, each in weights(model).items()}
    states = []
    dist.all_gather_object(states, model.sharded_state_dict())
    found = {name: np.full(each.shape, np.nan) for name, each in whole.items()}
    for name, part in ((name, part) for state in states for name, part in state.items()):
        target = found[name].reshape(-1)[part.offset :][: part.data.size]
        assert np.isnan(target).all()
        target[...] = part.data
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], value)
    saved = [
        {k: v._replace(data=v.data.copy()) if hasattr(v, "offset") else v for k, v in each.items()}
        for each in (model.sharded_state_dict(), optimizer.sharded_state_dict())
    ]
    train(model, optimizer, data[2:])
    expected = weights(model)
    again, fresh, _ = sharded(network(), maker, level)
    again.load_sharded_state_dict(saved[0])
    fresh.load_sharded_state_dict(saved[1])
    train(again, fresh, data[2:])
    assert_close(weights(again), expected)
