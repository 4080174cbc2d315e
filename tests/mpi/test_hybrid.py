"""Torch modules on grids: what `distribute_model`, `_optimizer` and `_scaler` make of them.

A grid is a line such as ``dp=2 mp=2``; those that have another number of ranks than this job are
left out.
"""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.11")

from checks import assert_raised, outcome  # noqa: E402
from torch import nn  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.checkpoint import LocalSlice  # noqa: E402
from hpcdist.parallel import hybrid_options as asked  # noqa: E402
from hpcdist.parallel.hybrid import HybridCommunicateGroup  # noqa: E402
from hpcdist.parallel.topology import CommunicateTopology  # noqa: E402
from hpcdist.torch.alike import Inputs  # noqa: E402
from hpcdist.torch.hybrid import (  # noqa: E402
    LAMB,
    LARS,
    HybridModel,
    HybridParallelOptimizer,
    distribute_model,
    distribute_optimizer,
    distribute_scaler,
)
from hpcdist.torch.hybrid.states import part_of  # noqa: E402
from hpcdist.torch.model_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
)
from hpcdist.torch.pipeline import LayerDesc, PipelineLayer, PipelineParallel  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("and_the_world_goes_on"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]

AXES = ["dp", "pp", "sharding", "sep", "cp", "mp"]
ROWS, LENGTH, FEATURES = 24, 8, 12
STEPS = 10


def grid_of(line):
    degrees = dict.fromkeys(AXES, 1)
    for word in line.split():
        axis, degree = word.split("=")
        degrees[axis] = int(degree)
    if math.prod(degrees.values()) != dist.get_world_size():
        pytest.skip(f"a grid of {math.prod(degrees.values())} ranks")
    return HybridCommunicateGroup(CommunicateTopology(list(degrees), list(degrees.values())))


def options_of(line, **others):
    """Return options with the stage of sharding that is told after the grid, as in "... /3"."""
    stage = int(line.partition("/")[2] or 1)
    return asked.HybridOptions(sharding=asked.Sharding(stage=stage), **others)


def on_grid(line):
    return grid_of(line.partition("/")[0])


class Net(nn.Module):
    """An ordinary network, or with `grid` the same one cut over mp."""

    def __init__(self, grid=None):
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(FEATURES, FEATURES)
        if grid is None:
            self.first = nn.Linear(FEATURES, 4 * FEATURES)
            self.second = nn.Linear(4 * FEATURES, FEATURES)
        else:
            mp = grid["mp"]
            self.first = ColumnParallelLinear(
                FEATURES, 4 * FEATURES, has_bias=True, gather_output=False, mp_group=mp
            )
            self.second = RowParallelLinear(
                4 * FEATURES, FEATURES, input_is_parallel=True, mp_group=mp
            )
        self.norm = nn.LayerNorm(FEATURES)
        self.last = nn.Linear(FEATURES, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        hidden = hidden + self.second(torch.tanh(self.first(hidden)))
        return self.last(self.norm(hidden))


def network(grid=None, dtype=torch.float64):
    return Net(grid).to(dtype)


def batch(turn, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + turn)
    x = torch.randn(ROWS, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, LENGTH, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def share(pair, grid):
    """Return the rows of this rank's data, and of them its part of the sequence."""
    at = grid.rank("dp") * grid.degree("sharding") + grid.rank("sharding")
    of = grid.degree("dp") * grid.degree("sharding")
    parts = [each[at * ROWS // of : (at + 1) * ROWS // of] for each in pair]
    at, of = grid.rank("sep"), grid.degree("sep")
    at, of = at * grid.degree("cp") + grid.rank("cp"), of * grid.degree("cp")
    return [each[:, at * LENGTH // of : (at + 1) * LENGTH // of] for each in parts]


def loss_of(model, pair):
    x, y = pair
    return (model(x) - y).square().mean()


def train(model, optimizer, turns, pick=lambda pair: pair, clip=None, dtype=torch.float64):
    norms = []
    for turn in turns:
        loss_of(model, pick(batch(turn, dtype))).backward()
        if clip is not None:
            norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def part(whole, found):
    """Return what `found`, an entry of a sharded state, should be, given the whole."""
    if not isinstance(found, LocalSlice):
        return whole
    return whole[
        tuple(slice(a, a + n) for a, n in zip(found.offsets, found.data.shape, strict=True))
    ]


def state_of(model):
    return model.sharded_state_dict() if isinstance(model, HybridModel) else model.state_dict()


def data_in(entry):
    return entry.data if isinstance(entry, LocalSlice) else entry


def assert_trained_like(model, alone, **tolerance):
    tolerance = {"rtol": 0, "atol": 1e-6, **tolerance}
    state = state_of(model)
    for name, whole in alone.named_parameters():
        found, expected = data_in(state[name]), part(whole.detach(), state[name])
        torch.testing.assert_close(found, expected, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


SMALL = [
    "dp=1",
    "dp=2",
    "mp=2",
    "sep=2",
    "cp=2",
    "sharding=2 /1",
    "sharding=2 /2",
    "sharding=2 /3",
    "dp=3",
]
LARGE = [
    "dp=2 mp=2",
    "sharding=2 mp=2 /1",
    "sharding=2 mp=2 /3",
    "dp=2 sharding=2 /1",
    "dp=2 sharding=2 /2",
    "sep=2 mp=2",
    "sharding=2 sep=2 /3",
]
LARGEST = [
    "dp=2 sharding=2 mp=2 /1",
    "dp=2 sharding=2 mp=2 /2",
    "sharding=2 sep=2 mp=2 /3",
    "dp=2 sep=2 mp=2",
    "dp=2 sep=2 cp=2",
    "sharding=2 cp=2 mp=2 /2",
    "dp=2 sharding=2 sep=2 /2",
    "dp=2 sharding=2 sep=2 /3",
]
BY_HAND = [
    "dp=2 sharding=2 sep=2 mp=2 /2",
    "dp=2 sharding=2 cp=2 mp=2 /3",
    "sharding=4 sep=2 cp=2 /3",
    "dp=2 sharding=4 mp=2 /1",
]
"""Of 16 ranks; those of 8 are above."""
GRIDS = [
    *(*SMALL, *LARGE),
    *(pytest.param(each, marks=pytest.mark.thorough) for each in LARGEST),
    *(pytest.param(each, marks=pytest.mark.slow) for each in BY_HAND),
]
MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
}


def on(line, maker, **others):
    """Return grid, model and optimizer, both distributed."""
    grid, options = on_grid(line), options_of(line, **others)
    module = network(grid)
    made = maker(module.parameters())
    model = distribute_model(module, grid, options)
    return grid, model, distribute_optimizer(made, grid, options)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("line", GRIDS)
def test_training_on_a_grid_is_that_of_one_process(line, maker):
    alone = network()
    train(alone, maker(alone.parameters()), range(STEPS))
    grid, model, optimizer = on(line, maker)
    train(model, optimizer, range(STEPS), lambda pair: share(pair, grid))
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", GRIDS)
def test_mixed_precision_computes_in_16_bits_and_keeps_32(line):
    maker, dtype = MAKERS["SGD"], torch.float32
    alone = network(dtype=dtype)
    forward = alone.forward
    alone.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    train(alone, maker(alone.parameters()), range(STEPS), dtype=dtype)
    grid = on_grid(line)
    options = options_of(line, amp=asked.Amp(dtype="bfloat16"))
    module = network(grid, dtype)
    made = maker(module.parameters())
    model = distribute_model(module, grid, options)
    optimizer = distribute_optimizer(made, grid, options)
    x, _ = share(batch(0, dtype), grid)
    assert model(x).dtype == torch.bfloat16
    train(model, optimizer, range(STEPS), lambda pair: share(pair, grid), dtype=dtype)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert_trained_like(model, alone, atol=5e-3)


@pytest.mark.parametrize("amp", [asked.Amp(), asked.Amp(dtype="bfloat16")], ids=lambda a: a.dtype)
@pytest.mark.parametrize("line", ["dp=2", "dp=3", "dp=2 mp=2", "dp=2 sharding=2 /1"])
def test_buckets_of_a_gradient_each_train_as_large_ones(line, amp):
    trained = []
    for sizes in ({}, {"fuse_grad_size_MB": 1e-6, "last_comm_group_size_MB": 1e-6}):
        grid, options = on_grid(line), options_of(line, amp=amp, **sizes)
        module = network(grid, torch.float32)
        made = MAKERS["Adam"](module.parameters())
        model = distribute_model(module, grid, options)
        optimizer = distribute_optimizer(made, grid, options)
        train(model, optimizer, range(3), lambda pair: share(pair, grid), dtype=torch.float32)  # noqa: B023
        trained.append([each.detach().clone() for each in model.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("line", ["mp=2", "dp=2 mp=2", "sharding=2 mp=2 /1"])
def test_16_bits_cut_over_mp_train_about_as_32(line):
    def maker(p):
        return torch.optim.AdamW(p, 0.01, weight_decay=0.1)

    dtype = torch.bfloat16
    alone = network(dtype=dtype).float()
    train(alone, maker(alone.parameters()), range(STEPS), dtype=torch.float32)
    grid, options = on_grid(line), options_of(line)
    module = network(grid, dtype)
    made = maker(module.parameters())
    model = distribute_model(module, grid, options)
    optimizer = distribute_optimizer(made, grid, options)
    train(model, optimizer, range(STEPS), lambda pair: share(pair, grid), dtype=dtype)
    assert {each.dtype for each in model.parameters()} == {dtype}
    assert_trained_like(model, alone, atol=2e-2, check_dtype=False)


@pytest.mark.parametrize("line", GRIDS)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_gradients_is_that_of_one_process(line, norm_type):
    maker, limit = MAKERS["SGD"], 0.05
    alone = network()
    expected = train(
        alone,
        maker(alone.parameters()),
        range(3),
        clip=lambda: float(nn.utils.clip_grad_norm_(alone.parameters(), limit, norm_type)),
    )
    ways = itertools.cycle(["model", "optimizer", "parameters"])
    grid, model, optimizer = on(line, maker)

    def clip():
        what = {"model": model, "optimizer": optimizer, "parameters": model.parameters()}
        return dist.clip_grad_norm_(what[next(ways)], limit, norm_type)

    found = train(model, optimizer, range(3), lambda pair: share(pair, grid), clip)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", GRIDS)
def test_an_optimizer_clips_by_itself(line):
    maker, limit = MAKERS["SGD"], 0.05
    alone = network()
    train(
        alone,
        maker(alone.parameters()),
        range(3),
        clip=lambda: nn.utils.clip_grad_norm_(alone.parameters(), limit),
    )

    class ClipGradByGlobalNorm:
        clip_norm = limit

    grid, model, _ = on(line, maker)
    optimizer = distribute_optimizer(
        maker(model.parameters()), grid, options_of(line), clip_norm=ClipGradByGlobalNorm()
    )
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", GRIDS)
@pytest.mark.parametrize("kind", ["torch", "hpcdist"])
def test_all_ranks_skip_a_step_in_which_one_has_nan(line, kind, rank, size):
    grid, model, optimizer = on(line, MAKERS["Adam"])
    own = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler = distribute_scaler(
        own if kind == "torch" else dist.GradScaler(init_loss_scaling=4.0), grid
    )
    before = {name: data_in(each).clone() for name, each in state_of(model).items()}
    for broken in (True, False):
        scaler.scale(loss_of(model, share(batch(0), grid))).backward()
        if broken and rank == size - 1:
            last = [each.grad for each in optimizer.param_groups[0]["params"]][-1]
            (last.to_local() if hasattr(last, "to_local") else last).fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        if broken:
            for name, each in state_of(model).items():
                torch.testing.assert_close(data_in(each), before[name], rtol=0, atol=0)
    alone = network()
    train(alone, MAKERS["Adam"](alone.parameters()), [0])
    assert_trained_like(model, alone)


@pytest.mark.parametrize("skipped", ["torch", "hpcdist", "by hand"])
def test_a_step_after_one_that_was_skipped_takes_its_own_gradients(skipped, rank, size):
    merge = asked.GradientMerge(k_steps=2)
    grid, model, optimizer = on(f"dp={size}", MAKERS["SGD"], gradient_merge=merge)
    kinds = {"torch": torch.amp.GradScaler("cpu", init_scale=4.0), "hpcdist": dist.GradScaler()}
    scaler = distribute_scaler(kinds.get(skipped, kinds["torch"]), grid)
    for turn in (0, 0):
        scaler.scale(loss_of(model, share(batch(turn), grid))).backward()
        if optimizer.is_merging:
            scaler.step(optimizer)
            scaler.update()
    if skipped == "by hand":
        optimizer.settle_gradients()
    else:
        if rank == size - 1:
            next(model.parameters()).grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
    model.zero_grad()
    train(model, optimizer, (1, 2), lambda pair: share(pair, grid))
    alone = network()
    sum(loss_of(alone, batch(turn)) / 2 for turn in (1, 2)).backward()
    MAKERS["SGD"](alone.parameters()).step()
    assert_trained_like(model, alone)


def test_a_scaler_can_be_made_as_the_strategy_says(size):
    grid = grid_of(f"dp={size}")
    amp = asked.Amp(init_loss_scaling=8.0, incr_ratio=4.0, incr_every_n_steps=1)
    options = asked.HybridOptions(amp=amp)
    scaler = distribute_scaler(None, grid, options)
    module = network(dtype=torch.float32)
    optimizer = distribute_optimizer(MAKERS["SGD"](module.parameters()), grid, options)
    model = distribute_model(module, grid, options)
    scaler.scale(loss_of(model, share(batch(0, torch.float32), grid))).backward()
    assert scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    bfloat = asked.HybridOptions(amp=dataclasses.replace(amp, dtype="bfloat16"))
    assert distribute_scaler(None, grid, bfloat).get_scale() == 1.0


# ---- the order of the two, schedulers


@pytest.mark.parametrize("line", SMALL)
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_model_and_optimizer_may_be_given_in_either_order(line, first):
    grid, options, maker = on_grid(line), options_of(line), MAKERS["Adam"]
    module = network(grid)
    made = maker(module.parameters())
    if first == "optimizer":
        optimizer = distribute_optimizer(made, grid, options)
        model = distribute_model(module, grid, options)
    else:
        model = distribute_model(module, grid, options)
        optimizer = distribute_optimizer(made, grid, options)
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    alone = network()
    train(alone, maker(alone.parameters()), range(3))
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", SMALL)
@pytest.mark.parametrize("of", ["inner", "distributed"])
def test_a_scheduler_of_torch_changes_the_learning_rate(line, of):
    grid, options, maker = on_grid(line), options_of(line), MAKERS["SGD"]
    module = network(grid)
    made = maker(module.parameters())
    optimizer = distribute_optimizer(made, grid, options)
    scheduler = torch.optim.lr_scheduler.StepLR(made if of == "inner" else optimizer, 1, gamma=0.5)
    model = distribute_model(module, grid, options)
    alone = network()
    plain = maker(alone.parameters())
    theirs = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    for turn in range(3):
        train(model, optimizer, [turn], lambda pair: share(pair, grid))
        scheduler.step()
        train(alone, plain, [turn])
        theirs.step()
    assert optimizer.get_lr() == 0.05 / 8
    assert_trained_like(model, alone)
    optimizer.set_lr(0.25)
    assert [group["lr"] for group in made.param_groups] == [0.25]


# ---- several passes for a step


@pytest.mark.parametrize("line", GRIDS)
@pytest.mark.parametrize("avg", [True, False])
def test_gradient_merge_steps_by_several_batches(line, avg):
    maker, merge = MAKERS["Adam"], asked.GradientMerge(k_steps=3, avg=avg)
    grid, model, optimizer = on(line, maker, gradient_merge=merge)
    train(model, optimizer, range(6), lambda pair: share(pair, grid))
    alone = network()
    plain = maker(alone.parameters())
    for turns in (range(3), range(3, 6)):
        sum(loss_of(alone, batch(turn)) / (3 if avg else 1) for turn in turns).backward()
        plain.step()
        plain.zero_grad()
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", GRIDS)
def test_layers_that_are_frozen_after_clear_grad_stay_as_they_are(line):
    maker = MAKERS["Adam"]
    grid, model, optimizer = on(line, maker)
    alone = network()
    plain = maker(alone.parameters())
    for turn in range(6):
        for each in (model, alone):
            freeze(each, turn in (2, 3))
        loss_of(model, share(batch(turn), grid)).backward()
        loss_of(alone, batch(turn)).backward()
        optimizer.step()
        plain.step()
        optimizer.clear_grad()  # leaves zeros
        plain.zero_grad()
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", GRIDS)
def test_layers_that_are_frozen_within_a_merge_step_by_the_passes_before(line):
    maker, merge = MAKERS["Adam"], asked.GradientMerge(k_steps=2)
    grid, model, optimizer = on(line, maker, gradient_merge=merge)
    alone = network()
    plain = maker(alone.parameters())
    for turn in range(4):
        train(model, optimizer, [turn], lambda pair: share(pair, grid))
        (loss_of(alone, batch(turn)) / 2).backward()
        if turn % 2:
            plain.step()
            plain.zero_grad()
        for each in (model, alone):
            freeze(each, turn % 2 == 0)
    assert_trained_like(model, alone)


@pytest.mark.parametrize(
    "line", ["dp=2 sharding=2 /1", "dp=2 sharding=2 /3", "sharding=2 /1", "sharding=2 /2"]
)
def test_a_sharded_step_takes_the_gradients_of_several_passes(line):
    grid, options, maker = on_grid(line), options_of(line), MAKERS["Adam"]
    several = dataclasses.replace(options.sharding, accumulate_steps=2)
    options = dataclasses.replace(options, sharding=several)
    module = network(grid)
    optimizer = distribute_optimizer(maker(module.parameters()), grid, options)
    model = distribute_model(module, grid, options)
    alone = network()
    plain = maker(alone.parameters())
    for turn in (0, 2):
        for each in (turn, turn + 1):
            (loss_of(model, share(batch(each), grid)) / 2).backward()
            (loss_of(alone, batch(each)) / 2).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert_trained_like(model, alone)


def test_gradient_merge_communicates_at_the_last_of_its_passes(size):
    grid, model, optimizer = on(f"dp={size}", MAKERS["SGD"], gradient_merge=asked.GradientMerge(3))
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    heard, counts = [], []
    stop = dist.subscribe(heard.append)
    for turn in range(3):
        del heard[:]
        train(model, optimizer, [turn], lambda pair: share(pair, grid))
        counts.append(len(heard))
    stop()
    assert counts[:2] == [0, 0]
    assert size == 1 or counts[2] > 0


@pytest.mark.parametrize("line", SMALL)
@pytest.mark.parametrize("kind", ["torch", "hpcdist"])
def test_a_scale_stays_while_gradients_are_gathered(line, kind):
    merge, maker = asked.GradientMerge(k_steps=2), MAKERS["SGD"]
    grid, model, optimizer = on(line, maker, gradient_merge=merge)
    scaler = distribute_scaler(
        torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        if kind == "torch"
        else dist.GradScaler(init_loss_scaling=4.0, incr_every_n_steps=1),
        grid,
    )
    scales = []
    for turn in range(4):
        scaler.scale(loss_of(model, share(batch(turn), grid))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 8.0, 8.0, 16.0]
    alone = network()
    plain = maker(alone.parameters())
    for turns in ((0, 1), (2, 3)):
        sum(loss_of(alone, batch(turn)) / 2 for turn in turns).backward()
        plain.step()
        plain.zero_grad()
    assert_trained_like(model, alone)


@pytest.mark.parametrize(
    "line",
    ["dp=1", "dp=2", "mp=2", "dp=2 mp=2", "dp=2 sharding=2 /1", "dp=2 sharding=2 /3", "dp=3"],
)
def test_localsgd_averages_weights_now_and_then(line):
    maker, local = MAKERS["SGD"], asked.LocalSGD(k_steps=2, begin_step=1)
    grid, model, optimizer = on(line, maker, localsgd=local)
    train(model, optimizer, range(5), lambda pair: share(pair, grid))

    copies = [network() for _ in range(grid.degree("dp"))]
    plain = [maker(each.parameters()) for each in copies]
    for turn in range(5):
        for at, (each, own) in enumerate(zip(copies, plain, strict=True)):
            rows = [
                t[at * ROWS // len(copies) : (at + 1) * ROWS // len(copies)] for t in batch(turn)
            ]
            loss_of(each, rows).backward()
            own.step()
            own.zero_grad()
        if turn + 1 <= 1 or (turn + 1) % 2 == 0:
            with torch.no_grad():
                for several in zip(*(each.parameters() for each in copies), strict=True):
                    mean = torch.stack(several).mean(0)
                    for weight in several:
                        weight.copy_(mean)
    assert_trained_like(model, copies[grid.rank("dp")])


def test_gradients_can_be_summed_in_place_of_averaged(size):
    maker = MAKERS["SGD"]
    grid, model, optimizer = on(f"dp={size}", maker, gradient_scale="sum")
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    alone = network()
    plain = maker(alone.parameters())
    for turn in range(3):
        (size * loss_of(alone, batch(turn))).backward()
        plain.step()
        plain.zero_grad()
    assert_trained_like(model, alone)


# ---- a learning rate for each layer

LAYERWISE = {
    "lars": (
        lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
        asked.Lars(coeff=0.02, weight_decay=0.1, epsilon=1e-3, exclude=("bias", "norm")),
        lambda p: LARS(p, 0.5, 0.9, 0.1, 0.02, 1e-3, ("bias", "norm")),
    ),
    "lamb": (
        lambda p: torch.optim.Adam(p, 0.01, eps=1e-6),
        asked.Lamb(weight_decay=0.1, exclude=("bias", "norm")),
        lambda p: LAMB(
            p, 0.01, eps=1e-6, weight_decay=0.1, exclude_from_weight_decay=("bias", "norm")
        ),
    ),
}


@pytest.mark.parametrize("line", GRIDS)
@pytest.mark.parametrize("name", LAYERWISE)
def test_norms_of_layers_are_of_the_whole(line, name):
    given, asks, plain = LAYERWISE[name]
    alone = network()
    train(alone, plain(alone.named_parameters()), range(5))
    grid, model, optimizer = on(line, given, **{name: asks})
    train(model, optimizer, range(5), lambda pair: share(pair, grid))
    assert_trained_like(model, alone)


# ---- batches of all ranks in a normalization


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(self.norm(hidden.flatten(0, 1)).view_as(hidden))


@pytest.mark.parametrize(
    "line", ["dp=1", "dp=2", "sharding=2 /1", "sharding=2 /3", "sep=2", "dp=2 sharding=2 /2"]
)
def test_batch_norm_sees_the_batches_of_all_ranks(line):
    grid, options, maker = on_grid(line), options_of(line, sync_batch_norm=True), MAKERS["SGD"]
    module = Normalized().double()
    made = maker(module.parameters())
    model = distribute_model(module, grid, options)
    optimizer = distribute_optimizer(made, grid, options)
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    alone = Normalized().double()
    train(alone, maker(alone.parameters()), range(3))
    assert_trained_like(model, alone)
    torch.testing.assert_close(model.norm.running_mean, alone.norm.running_mean)


# ---- layers that are computed again


@pytest.mark.parametrize("line", ["dp=1", "dp=2", "mp=2", "sharding=2 /3", "dp=2 mp=2"])
def test_named_layers_are_computed_again_in_the_backward_pass(line):
    grid, maker = on_grid(line), MAKERS["SGD"]
    options = options_of(line, recompute=asked.Recompute(checkpoints=("inner", "second")))
    module, calls = network(grid), []
    module.inner.register_forward_pre_hook(lambda *_: calls.append("hook"))
    plain = module.inner.forward
    module.inner.forward = lambda x: calls.append("computed") or plain(x)
    made = maker(module.parameters())
    model = distribute_model(module, grid, options)
    optimizer = distribute_optimizer(made, grid, options)
    train(model, optimizer, range(2), lambda pair: share(pair, grid))
    assert calls.count("computed") == 2 * calls.count("hook") == 4
    alone = network()
    train(alone, maker(alone.parameters()), range(2))
    assert_trained_like(model, alone)


def test_a_layer_that_is_not_there_cannot_be_computed_again(size):
    options = asked.HybridOptions(recompute=asked.Recompute(checkpoints=("iner",)))
    with pytest.raises(dist.UsageError, match=r"names 'iner', .* did you mean 'inner'"):
        distribute_model(network(), grid_of(f"dp={size}"), options)


# ---- marks of parameters


class Sequence(nn.Module):
    """Each rank of mp scales its part of the features of a sum: a gradient that is to be summed."""

    def __init__(self, grid):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
        self.weight.sequence_parallel = True
        self.at, self.of = grid.rank("mp"), grid.degree("mp")

    def forward(self, x):
        return (self.weight * x)[self.at :: self.of]


@pytest.mark.parametrize("line", ["dp=1", "mp=2", "mp=3", "dp=2 mp=2", "sharding=2 mp=2 /3"])
def test_gradients_of_parts_of_the_sequence_are_summed(line):
    grid, options = on_grid(line), options_of(line)
    module = Sequence(grid)
    made = torch.optim.SGD(module.parameters(), 1.0)
    model = distribute_model(module, grid, options)
    optimizer = distribute_optimizer(made, grid, options, clip_norm=1.0)
    x = torch.ones(12, 4, dtype=torch.float64)
    model(x).sum().backward()
    optimizer.step()
    full = torch.arange(1.0, 5.0, dtype=torch.float64) - 0.5  # a gradient of 12 each, cut to norm 1
    found = state_of(model)["weight"]
    torch.testing.assert_close(data_in(found), part(full, found), rtol=0, atol=1e-6)


def test_gradients_that_are_not_summed_yet_have_no_norm(size):
    grid = grid_of(f"mp={size}")
    module = Sequence(grid)
    model = distribute_model(module, grid)
    model(torch.ones(12, 4, dtype=torch.float64)).sum().backward()
    if size == 1:
        assert dist.clip_grad_norm_(model, 1.0) == pytest.approx(24.0)
        return
    for what in (model, model.parameters()):
        with pytest.raises(dist.UsageError, match="give clip_grad_norm_ the optimizer"):
            dist.clip_grad_norm_(what, 1.0)


def test_a_weight_that_stages_share_counts_once_in_norms(size):
    grid = grid_of(f"pp={size}")
    from hpcdist.torch.on_grid import DATA_AXES, give_roles

    shared, own = (nn.Parameter(torch.ones(2)) for _ in range(2))
    shared.is_firstly_shared = grid.rank("pp") == 0
    shared.grad, own.grad = torch.full((2,), 3.0), torch.full((2,), 1.0)
    give_roles([("shared", shared), ("own", own)], grid, DATA_AXES)
    expected = math.sqrt(2 * 9 + size * 2)
    assert dist.clip_grad_norm_([shared, own], 1.0) == pytest.approx(expected)
    torch.testing.assert_close(shared.grad, torch.full((2,), 3.0 / expected), rtol=1e-5, atol=0)


def test_weights_that_are_not_cut_become_equal_and_the_others_stay(rank, size):
    grid = grid_of(f"mp={size}")
    module = network(grid)
    with torch.no_grad():
        for each in module.parameters():
            each += rank
    before = module.first.weight.detach().clone()
    distribute_model(module, grid)
    torch.testing.assert_close(module.first.weight.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(module.last.weight.detach(), network().last.weight.detach())


# ---- pipelines

PIPELINES = ["pp=1", "pp=2", "pp=3", "pp=2 sharding=2 /1", "pp=2 dp=2", "pp=2 mp=2"]
PIPELINES += [pytest.param("pp=2 sharding=2 mp=2 /1", marks=pytest.mark.thorough)]


def block(grid=None):
    if grid is None:
        ends = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)
    else:
        how = {"gather_output": False, "has_bias": True, "mp_group": grid["mp"]}
        ends = (
            ColumnParallelLinear(FEATURES, 2 * FEATURES, **how),
            RowParallelLinear(2 * FEATURES, FEATURES, input_is_parallel=True, mp_group=grid["mp"]),
        )
    return nn.Sequential(ends[0], nn.Tanh(), ends[1], nn.LayerNorm(FEATURES))


def staged(line, maker, **others):
    """Return a grid, a pipeline and its optimizer."""
    grid = on_grid(line)
    pipeline = asked.Pipeline(micro_batch_size=2, accumulate_steps=12)
    options = options_of(line, pipeline=pipeline, **others)
    torch.manual_seed(5)
    layers = [*(block(grid) for _ in range(3)), nn.Linear(FEATURES, 3)]
    module = PipelineLayer(
        [each.double() for each in layers],
        loss_fn=nn.functional.mse_loss,
        group=grid["pp"],
    )
    made = maker(module.parameters())
    model = distribute_model(module, grid, options)
    return grid, model, distribute_optimizer(made, grid, options, clip_norm=0.5)


def stacked():
    torch.manual_seed(5)
    return nn.Sequential(*(block() for _ in range(3)), nn.Linear(FEATURES, 3)).double()


def train_stacked(model, optimizer, turns, passes=1):
    for turn in turns:
        several = [passes * turn + each for each in range(passes)]
        sum(loss_of(model, batch(each)) / passes for each in several).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def assert_stages_like(model, alone):
    expected = dict(alone.named_parameters())
    for name, each in model.named_parameters():
        found = part_of(name, each, each).for_checkpoints()
        whole = part(expected[name].detach(), found)
        torch.testing.assert_close(data_in(found), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("line", PIPELINES)
@pytest.mark.parametrize("name", ["SGD", "Adam", "lars", "lamb"])
def test_a_pipeline_on_a_grid_trains_as_one_process(line, name):
    others, alone = {}, stacked()
    if name in LAYERWISE:
        maker, asks, plain = LAYERWISE[name]
        others, plain = {name: asks}, plain(alone.named_parameters())
    else:
        maker, plain = MAKERS[name], MAKERS[name](alone.parameters())
    grid, model, optimizer = staged(line, maker, **others)
    for turn in range(3):
        model.train_batch(share(batch(turn), grid), optimizer)
    train_stacked(alone, plain, range(3))
    assert_stages_like(model, alone)


@pytest.mark.parametrize("line", PIPELINES)
def test_a_pipeline_gathers_gradients_of_several_batches(line):
    merge = asked.GradientMerge(k_steps=2)
    grid, model, optimizer = staged(line, MAKERS["Adam"], gradient_merge=merge)
    for turn in range(4):
        model.train_batch(share(batch(turn), grid), optimizer)
    alone = stacked()
    train_stacked(alone, MAKERS["Adam"](alone.parameters()), range(2), passes=2)
    assert_stages_like(model, alone)


@pytest.mark.parametrize("line", PIPELINES)
def test_all_stages_skip_a_step_in_which_one_has_nan(line, rank, size):
    grid, model, optimizer = staged(line, MAKERS["SGD"])
    scaler = distribute_scaler(torch.amp.GradScaler("cpu", init_scale=4.0), grid)
    before = [each.detach().clone() for each in model.parameters()]
    broken = next(iter(model.parameters())).register_hook(
        lambda slope: slope * math.nan if rank == size - 1 else slope
    )
    model.train_batch(share(batch(0), grid), optimizer, scaler=scaler)
    broken.remove()
    assert scaler.get_scale() == 2.0
    for each, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(each.detach(), old, rtol=0, atol=0)
    model.train_batch(share(batch(0), grid), optimizer, scaler=scaler)
    alone = stacked()
    train_stacked(alone, MAKERS["SGD"](alone.parameters()), [0])
    assert_stages_like(model, alone)


# ---- layers that are trained later


def parts(model, named=False):
    """Return the parameters of the body and of the head."""
    found = ([], [])
    for name, each in model.named_parameters():
        found["last" in name or name.startswith("3.")].append((name, each) if named else each)
    return found


def freeze(model, frozen=True):
    for each in parts(model)[0]:
        each.requires_grad_(not frozen)


def thaw(model, optimizer, named=False, rate=0.02):
    """Add the body to what an optimizer of the head trains."""
    freeze(model, False)
    for each in parts(model)[0]:
        each.grad = None
    optimizer.add_param_group({"params": parts(model, named)[0], "lr": rate})


def train_and_thaw(model, optimizer, pick=lambda pair: pair, named=False, dtype=torch.float64):
    train(model, optimizer, range(3), pick, dtype=dtype)
    thaw(model, optimizer, named)
    train(model, optimizer, range(3, 6), pick, dtype=dtype)


@pytest.mark.parametrize("name", ["SGD", "Adam", "lars", "lamb"])
@pytest.mark.parametrize("line", [*SMALL, *LARGE])
def test_layers_that_were_frozen_are_trained_once_they_are_added(line, name):
    others, maker, plain = {}, MAKERS.get(name), MAKERS.get(name)
    named = name in LAYERWISE
    if named:
        maker, asks, plain = LAYERWISE[name]
        others = {name: asks}
    alone, grid, options = network(), on_grid(line), options_of(line, **others)
    freeze(alone)
    train_and_thaw(alone, plain(parts(alone, named)[1]), named=named)
    module = network(grid)
    freeze(module)
    optimizer = distribute_optimizer(maker(parts(module)[1]), grid, options)
    model = distribute_model(module, grid, options)
    train_and_thaw(model, optimizer, lambda pair: share(pair, grid))
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", [*SMALL, *LARGE])
def test_a_group_that_the_given_optimizer_gets_is_trained_too(line):
    alone, grid, options = network(), on_grid(line), options_of(line)
    plain = MAKERS["Adam"](parts(alone)[1])
    train_and_thaw(alone, plain)
    module = network(grid)
    given = MAKERS["Adam"](parts(module)[1])
    model = distribute_model(module, grid, options)
    optimizer = distribute_optimizer(given, grid, options)
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    thaw(model, given)
    train(model, optimizer, range(3, 6), lambda pair: share(pair, grid))
    assert optimizer.param_groups is given.param_groups
    assert_trained_like(model, alone)


@pytest.mark.parametrize("line", PIPELINES)
def test_stages_that_were_frozen_are_trained_once_they_are_added(line):
    maker = MAKERS["SGD"]
    alone = stacked()
    freeze(alone)
    plain = maker(parts(alone)[1])
    train_stacked(alone, plain, range(2))
    thaw(alone, plain)
    train_stacked(alone, plain, range(2, 4))
    grid, model, _ = staged(line, maker)
    freeze(model)
    head = parts(model)[1] or [nn.Parameter(torch.zeros(0))]
    for each in head:
        each.hpcdist_role = next(iter(model.parameters())).hpcdist_role
    optimizer = distribute_optimizer(maker(head), grid, options_of(line), clip_norm=0.5)
    for turn in range(4):
        if turn == 2:
            thaw(model, optimizer)
        model.train_batch(share(batch(turn), grid), optimizer)
    assert_stages_like(model, alone)


@pytest.mark.parametrize("line", ["sharding=2 /1", "sharding=3 /1", "dp=2 sharding=2 /1"])
def test_16_bits_that_are_added_have_master_weights(line):
    grid, options, dtype = on_grid(line), options_of(line), torch.bfloat16
    trained = []
    for later in (False, True):
        module = network(grid, dtype)
        made = MAKERS["SGD"](
            parts(module)[1] if later else [{"params": each} for each in parts(module)[::-1]]
        )
        model = distribute_model(module, grid, options)
        optimizer = distribute_optimizer(made, grid, options)
        if later:
            thaw(model, optimizer, rate=0.05)
        train(model, optimizer, range(3), lambda pair: share(pair, grid), dtype=dtype)
        trained.append([each.detach().clone() for each in model.parameters()])
        state = optimizer.sharded_state_dict()
        assert any(name.endswith("master") for name in state) or not optimizer.state
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after"), [("dp=1", "dp=1"), ("sharding=2 /1", "dp=2")])
def test_a_group_that_was_added_is_in_checkpoints(before, after, folder):
    maker = MAKERS["Adam"]
    alone = network()
    plain = maker(parts(alone)[1])
    train(alone, plain, range(2))
    thaw(alone, plain)
    train(alone, plain, range(2, 4))

    def begin(line):
        grid, options = on_grid(line), options_of(line)
        module = network(grid)
        made = maker(parts(module)[1])
        model = distribute_model(module, grid, options)
        return grid, model, distribute_optimizer(made, grid, options)

    grid, model, optimizer = begin(before)
    train(model, optimizer, range(2), lambda pair: share(pair, grid))
    thaw(model, optimizer)  # its states are saved, though it has none yet
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    grid, model, optimizer = begin(after)
    thaw(model, optimizer, rate=0.5)
    dist.checkpoint.load({"model": model, "optimizer": optimizer}, folder)
    train(model, optimizer, range(2, 4), lambda pair: share(pair, grid))
    assert_trained_like(model, alone)


def test_ranks_that_add_other_groups_all_hear_of_it(rank, size):
    grid = grid_of(f"dp={size}")
    module = network()
    made = MAKERS["SGD"](parts(module)[1])
    distribute_model(module, grid)
    optimizer = distribute_optimizer(made, grid)
    body = parts(module)[0]
    if size > 1:
        told = outcome(lambda: optimizer.add_param_group({"params": body, "lr": 0.1 + rank}))
        assert_raised(told, "MismatchError", ["the ranks have different groups", "lr=0.1"])
    bad = {"params": parts(module)[1] if rank == size - 1 else body[:1]}
    told = outcome(lambda: optimizer.add_param_group(bad))
    assert_raised(told, "UsageError", "more than one parameter group", [size - 1])


def test_a_group_is_not_added_between_unscaling_and_the_step(size):
    grid = grid_of(f"dp={size}")
    module = network()
    made = MAKERS["SGD"](parts(module)[1])
    model = distribute_model(module, grid)
    optimizer = distribute_optimizer(made, grid)
    loss_of(model, share(batch(0), grid)).backward()
    optimizer.unscale_(1.0)
    with pytest.raises(dist.UsageError, match="call it after step"):
        optimizer.add_param_group({"params": parts(module)[0]})
    optimizer.step()
    optimizer.add_param_group({"params": parts(module)[0]})
    assert len(optimizer.param_groups) == len(made.param_groups) == 2


# ---- checkpoints


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=1", "dp=1"),
        ("dp=2", "mp=2"),
        ("mp=2", "sharding=2 /3"),
        ("sharding=2 /1", "sep=2"),
        ("sharding=2 /3", "sharding=2 /1"),
        ("dp=2 mp=2", "sharding=2 mp=2 /3"),
        ("sharding=2 mp=2 /3", "dp=2 sharding=2 /1"),
        ("sharding=2 mp=2 /1", "sep=2 mp=2"),
        ("dp=3", "sharding=3 /2"),
    ],
)
def test_training_goes_on_on_another_grid(before, after, folder):
    maker = MAKERS["Adam"]
    alone = network()
    train(alone, maker(alone.parameters()), range(6))
    grid, model, optimizer = on(before, maker)
    train(model, optimizer, range(3), lambda pair: share(pair, grid))
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    grid, model, optimizer = on(after, maker)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    dist.checkpoint.load({"model": model, "optimizer": optimizer}, folder)
    train(model, optimizer, range(3, 6), lambda pair: share(pair, grid))
    assert_trained_like(model, alone)


# ---- what is refused


def test_what_is_no_model_or_optimizer_is_refused(size):
    grid = grid_of(f"dp={size}")
    with pytest.raises(dist.UsageError, match=r"needs a torch\.nn\.Module, got None"):
        distribute_model(None, grid)
    with pytest.raises(dist.UsageError, match=r"needs an optimizer of torch\.optim"):
        distribute_optimizer(object(), grid)
    with pytest.raises(dist.UsageError, match=r"needs a torch\.amp\.GradScaler or"):
        distribute_scaler(None, grid)
    module = network()
    optimizer = distribute_optimizer(torch.optim.SGD(module.parameters(), 0.1), grid)
    with pytest.raises(dist.UsageError, match="is a distributed one already"):
        distribute_optimizer(optimizer, grid)
    for wrong in (0, -1, "1", True):
        with pytest.raises(dist.UsageError, match="clip_norm must be a positive number"):
            distribute_optimizer(torch.optim.SGD(module.parameters(), 0.1), grid, clip_norm=wrong)


def test_a_model_is_distributed_once(size):
    grid = grid_of(f"dp={size}")
    model = distribute_model(network(), grid)
    with pytest.raises(dist.UsageError, match="given to distributed_model already"):
        distribute_model(model, grid)


def test_an_optimizer_that_has_stepped_is_refused(size):
    grid, module = grid_of(f"dp={size}"), network()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer, [0])
    with pytest.raises(dist.UsageError, match="has taken steps already"):
        distribute_optimizer(optimizer, grid)


def test_an_optimizer_that_needs_several_losses_is_refused(size):
    lbfgs = torch.optim.LBFGS(network().parameters())
    with pytest.raises(dist.UsageError, match="LBFGS computes the loss several times"):
        distribute_optimizer(lbfgs, grid_of(f"dp={size}"))


@pytest.mark.parametrize("line", ["dp=2", "mp=2", "sharding=2 /1", "sharding=2 /3"])
def test_an_optimizer_that_has_a_state_before_its_first_step_trains(line):
    grid, model, optimizer = on(line, torch.optim.Adagrad)
    train(model, optimizer, range(2), lambda pair: share(pair, grid))
    alone = network()
    train(alone, torch.optim.Adagrad(alone.parameters()), range(2))
    assert_trained_like(model, alone)


def test_an_optimizer_without_its_model_is_refused(size):
    grid, module = grid_of(f"dp={size}"), network()
    optimizer = distribute_optimizer(torch.optim.SGD(module.parameters(), 0.1), grid)
    loss_of(module, batch(0)).backward()
    with pytest.raises(dist.UsageError, match="of no model that distributed_model has seen"):
        optimizer.step()


@pytest.mark.parametrize("name", LAYERWISE)
def test_lars_and_lamb_take_the_place_of_their_like(name, size):
    grid = grid_of(f"dp={size}")
    options = asked.HybridOptions(**{name: LAYERWISE[name][1]})
    wrong = torch.optim.RMSprop(network().parameters())
    with pytest.raises(dist.UsageError, match=f"strategy.{name} takes the place of"):
        distribute_optimizer(wrong, grid, options)
    kind = {"lars": torch.optim.SGD, "lamb": torch.optim.Adam}[name]
    how = {"lars": {"momentum": 0.9, "nesterov": True}, "lamb": {"amsgrad": True}}[name]
    with pytest.raises(dist.UsageError, match=f"strategy.{name} takes the place of"):
        distribute_optimizer(kind(network().parameters(), 0.1, **how), grid, options)
    both = asked.HybridOptions(lars=asked.Lars(), lamb=asked.Lamb())
    with pytest.raises(dist.UsageError, match="choose one"):
        distribute_optimizer(MAKERS["SGD"](network().parameters()), grid, both)


def test_a_pipeline_needs_layers(size):
    if size == 1:
        pytest.skip("a pipeline of one stage is no pipeline")
    with pytest.raises(dist.UsageError, match="the model must be a PipelineLayer, got a Net"):
        distribute_model(network(), grid_of(f"pp={size}"))


def test_models_that_differ_between_ranks_of_mp_are_refused_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank has one model")
    grid = grid_of(f"mp={size}")
    module = nn.Linear(3, 4 if rank else 5)
    told = outcome(lambda: distribute_model(module, grid))
    assert_raised(told, "MismatchError", "the ranks have different parameters")


def test_a_model_without_parameters_on_one_rank_is_refused_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank has one model")
    grid = grid_of(f"dp={size}")
    module = nn.Linear(3, 4) if rank else nn.Identity()
    told = outcome(lambda: distribute_model(module, grid))
    assert_raised(told, "UsageAssertionError", "does not have any parameters", ranks=[0])


def test_what_one_rank_alone_gives_is_refused_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank has one model")
    grid = grid_of(f"dp={size}")
    told = outcome(lambda: distribute_model(network() if rank else None, grid))
    assert_raised(told, "UsageError", "needs a torch.nn.Module, got None", ranks=[0])
    local = asked.HybridOptions(localsgd=asked.LocalSGD(2) if rank else None)
    told = outcome(lambda: distribute_model(network(), grid, local))
    assert_raised(told, "MismatchError", ["different values", "LocalSGD"])


@pytest.mark.parametrize("axis", ["dp", "sharding", "pp"])
def test_parameters_with_a_group_of_their_own_are_refused_on_all(axis, rank, size):
    grid, group = grid_of(f"{axis}={size}"), dist.get_group()
    options = asked.HybridOptions(pipeline=asked.Pipeline(accumulate_steps=size))
    module, make = network(), distribute_model
    if axis == "pp":
        module, make = PipelineLayer([nn.Linear(3, 3) for _ in range(size)]), PipelineParallel
    if rank == 0:
        next(module.parameters()).hpcdist_group = group
    told = outcome(lambda: make(module, grid, options))
    assert_raised(told, "UsageError", "train it with hpcdist.DataParallel", ranks=[0])


def test_gradients_that_are_being_gathered_are_not_clipped(size):
    merge = asked.GradientMerge(k_steps=2)
    grid, model, optimizer = on(f"dp={size}", MAKERS["SGD"], gradient_merge=merge)
    loss_of(model, share(batch(0), grid)).backward()
    with pytest.raises(dist.UsageError, match="set clip_norm of the optimizer"):
        dist.clip_grad_norm_(optimizer, 1.0)


def test_frozen_parameters_have_no_state(size, folder):
    grid = grid_of(f"dp={size}")

    def made():
        module = network()
        module.inner.requires_grad_(False)
        adam = MAKERS["Adam"](module.parameters())
        return distribute_model(module, grid), distribute_optimizer(adam, grid)

    model, optimizer = made()
    train(model, optimizer, [0], lambda pair: share(pair, grid))
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    others = made()
    dist.checkpoint.load({"model": others[0], "optimizer": others[1]}, folder)
    for pair in ((model, optimizer), others):
        train(*pair, [1], lambda pair: share(pair, grid))
    for mine, theirs in zip(model.parameters(), others[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_state_of_another_shape_than_its_parameter_is_refused(size):
    grid, model, optimizer = on(f"dp={size}", torch.optim.Adafactor)
    train(model, optimizer, [0], lambda pair: share(pair, grid))
    with pytest.raises(dist.UsageError, match=r"'inner.weight.row_var' has shape \(12, 1\)"):
        optimizer.state_dict()


def test_states_of_another_model_change_nothing(size):
    grid, model, optimizer = on(f"dp={size}", MAKERS["Adam"])
    train(model, optimizer, [0], lambda pair: share(pair, grid))
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    wrong = {**state, "last.bias.exp_avg": torch.ones(5)}
    with pytest.raises(dist.UsageError, match=r"'last.bias.exp_avg' has shape \(5,\)"):
        optimizer.load_state_dict(wrong)
    missing = {name: value for name, value in state.items() if name != "norm.bias.exp_avg"}
    with pytest.raises(dist.UsageError, match=r"has no 'norm.bias.exp_avg'"):
        optimizer.load_state_dict(missing)
    for name, value in optimizer.state_dict().items():
        assert torch.as_tensor(value).equal(torch.as_tensor(kept[name]))


def test_minimize_steps_and_tells_the_gradients(size):
    grid, model, optimizer = on(f"dp={size}", MAKERS["SGD"])
    loss = loss_of(model, share(batch(0), grid))
    loss.backward()
    operations, pairs = optimizer.minimize(loss)
    assert operations == []
    assert len(pairs) == len(list(model.parameters()))
    optimizer.clear_grad()
    alone = network()
    train(alone, MAKERS["SGD"](alone.parameters()), [0])
    assert_trained_like(model, alone)
    assert isinstance(optimizer, HybridParallelOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)


# ---- ranks that differ


MP = ["mp=2", "mp=3", "dp=2 mp=2", "sharding=2 mp=2 /3"]


def shifted(pair, by):
    x, y = pair
    return x + by, y


@pytest.mark.parametrize("line", [*MP, "mp=2 pp=2"])
def test_ranks_that_share_layers_and_read_other_samples_all_hear_of_it(line, rank):
    grid, options = on_grid(line), options_of(line)
    if grid.degree("pp") > 1:
        grid, model, optimizer = staged(line, MAKERS["SGD"])
    else:
        model = distribute_model(network(grid), grid, options)

    def go(pair):
        if grid.degree("pp") > 1:
            return model.train_batch(pair, optimizer)
        return loss_of(model, pair).backward()

    for change in (
        lambda pair: shifted(pair, grid.rank("mp")),
        lambda pair: batch(1 + grid.rank("mp")),
        lambda pair: [each[grid.rank("mp") :] for each in pair],
    ):
        pair = change(share(batch(0), grid))
        told = outcome(lambda pair=pair: go(pair))
        wrong = {message for kind, message in told if kind == "MismatchError"}
        assert wrong
        assert all("sampler the rank along dp" in message for message in wrong)
    go(share(batch(0), grid))


@pytest.mark.parametrize("line", MP)
def test_samples_that_differ_are_let_pass_where_the_strategy_says_so(line):
    grid = on_grid(line)
    options = dataclasses.replace(
        options_of(line), tensor_parallel=asked.TensorParallelOptions(compare_inputs=False)
    )
    model = distribute_model(network(grid), grid, options)
    loss_of(model, shifted(share(batch(0), grid), grid.rank("mp"))).backward()


def test_integers_and_trees_of_inputs_are_compared(rank, size):
    inputs = Inputs(dist.init_parallel_env())
    good = {"ids": torch.arange(10_000), "mask": [torch.ones(3, dtype=torch.bool), 2, None]}
    inputs.check(good)
    inputs.check([])
    inputs.check(torch.full((4,), math.nan))
    inputs.check(torch.ones(3) + 1e-6 * rank)  # as computed in another way
    if size > 1:
        for other in (
            {**good, "ids": good["ids"] + rank},
            {**good, "mask": [torch.ones(3, dtype=torch.bool) ^ (rank > 0), 2, None]},
            torch.ones(3, dtype=torch.complex64) * (1 + 1j * rank),
            [torch.ones(2)] * (1 + rank),
        ):
            with pytest.raises(dist.MismatchError):
                inputs.check(other)


LAYERS = {
    "dropout": lambda rank: nn.Dropout(0.9 if rank else 0.1),
    "kind": lambda rank: nn.ReLU() if rank else nn.Tanh(),
    "nothing": lambda rank: nn.Dropout(0.5) if rank else nn.Identity(),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "line", ["dp=2", "mp=2", "sharding=2 /1", "sharding=2 /3", "dp=3", "dp=2 mp=2", "pp=2", "pp=3"]
)
def test_layers_of_other_arguments_are_refused_on_all(line, name, rank):
    grid = on_grid(line)
    layers = [nn.Linear(FEATURES, FEATURES), LAYERS[name](rank), nn.Linear(FEATURES, FEATURES)]

    def make():
        module = nn.Sequential(*layers)
        if grid.degree("pp") > 1:
            module = PipelineLayer(layers, group=grid["pp"])
        return distribute_model(module, grid, options_of(line))

    assert_raised(outcome(make), "MismatchError", "have different layers")


@pytest.mark.parametrize("described", [True, False])
def test_layers_that_are_described_with_other_arguments_are_refused_on_all(described, rank, size):
    grid = grid_of(f"pp={size}")
    if size == 1:
        pytest.skip("one rank differs from nobody")
    last = LayerDesc(nn.Linear, 4, 6 + rank) if described else nn.Linear(4, 6 + rank)
    layers = [*(LayerDesc(nn.Linear, 4, 4) for _ in range(size)), last]
    told = outcome(lambda: PipelineLayer(layers, group=grid["pp"]))
    assert_raised(told, "MismatchError", ["have different layers", "6", "7"])


@pytest.mark.parametrize("line", ["mp=2", "dp=2 mp=2", "mp=3"])
def test_parts_of_other_layers_are_refused_on_all(line, rank):
    grid = on_grid(line)
    mp = grid.degree("mp")
    layer = ColumnParallelLinear(4, 6 * mp + mp * grid.rank("mp"), mp_group=grid["mp"])
    told = outcome(lambda: distribute_model(nn.Sequential(layer, nn.Linear(2, 2)), grid))
    assert_raised(told, "MismatchError", "cut over ranks")


@pytest.mark.parametrize("line", ["dp=2", "mp=2", "sharding=2 /1", "pp=2", "dp=3"])
@pytest.mark.parametrize("option", ["clip_norm", "lr"])
def test_optimizers_of_other_options_are_refused_on_all(line, option, rank):
    grid = on_grid(line)
    if grid.degree("pp") > 1:
        grid, model, optimizer = staged(line, MAKERS["SGD"])
    else:
        grid, model, optimizer = on(line, MAKERS["SGD"])
    if option == "clip_norm":
        optimizer.clip_norm = 1.0 + rank
    else:
        optimizer.param_groups[0]["lr"] = 1.0 + rank
        if grid.degree("pp") > 1:
            pytest.skip("stages may have other rates")

    def go():
        if grid.degree("pp") > 1:
            model.train_batch(share(batch(0), grid), optimizer)
        else:
            train(model, optimizer, [0], lambda pair: share(pair, grid))

    assert_raised(outcome(go), "MismatchError", [f"{option}=1.0", f"{option}=2.0"])
