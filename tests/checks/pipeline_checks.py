"""What a pipeline promises at any number of ranks: sentences for simulated ranks and for MPI.

Every rank also computes the whole model alone, and compares what it has of it.
"""

import copy
import itertools
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from checks import Checks
from torch import nn
from torch.nn import functional

import hpcdist as dist
from hpcdist.parallel.hybrid_options import Amp, GradientMerge, HybridOptions, Pipeline
from hpcdist.torch.hybrid import distribute_optimizer
from hpcdist.torch.pipeline import (
    LayerCosts,
    LayerDesc,
    PipelineLayer,
    PipelineParallel,
    SharedLayerDesc,
)

sentence = CHECKS = Checks()

WIDTH = 6
SCHEDULES = [
    ("FThenB", 1, "loop"),
    ("1F1B", 1, "loop"),
    ("ZBH1", 1, "loop"),
    ("VPP", 2, "loop"),
    ("LoopedBFS", 3, "loop"),
    ("ZBVPP", 2, "loop"),
    ("ZBV", 2, "V"),
    ("1F1B", 2, "V"),
]


class Drill(Exception):
    """What stages fail with."""


class Given(NamedTuple):
    """A batch."""

    inputs: torch.Tensor
    labels: torch.Tensor


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def in_step():
    """All ranks are: the next operation of the group is for all of them."""
    rank, size = rank_and_size()
    x = np.array([rank + 1])
    dist.all_reduce(x)
    assert x[0] == size * (size + 1) // 2


def filled(module, seed):
    """Return a module with random numbers that no other thread can change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) * 0.4)
    return module.double()


def linear(seed, width=WIDTH):
    return filled(nn.Linear(width, width), seed)


def layers(count):
    """Return layers in float64, every other one of which has weights."""
    return [linear(index) if index % 2 == 0 else nn.Tanh() for index in range(count)]


def batch(rows, seed=0, width=WIDTH):
    generator = torch.Generator().manual_seed(100 + seed)
    made = torch.randn(2, rows, width, generator=generator).double()
    return Given(made[0], made[1])


def options(micro=4, steps=None, **others):
    steps = max(4, dist.get_world_size()) if steps is None else steps
    return HybridOptions(pipeline=Pipeline(micro, steps), **others)


def pipeline(rows, loss=functional.mse_loss, strategy=None, **settings):
    """Return a pipeline over all ranks."""
    made = PipelineLayer(rows, loss_fn=loss, **settings)
    return PipelineParallel(made, None, strategy or options())


def alone(rows):
    """Return a copy of the model in which every rank has all layers."""
    return nn.Sequential(*copy.deepcopy(rows))


def gradients(module):
    return {name: each.grad for name, each in module.named_parameters()}


def assert_same_gradients(model, whole, tolerance=1e-9):
    expected = gradients(whole)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance)


def computed_alone(whole, given, loss=functional.mse_loss):
    value = loss(whole(given.inputs), given.labels)
    value.backward()
    return value.detach()


# ---- schedules


def _gradients_are_those_of_one_process(schedule, chunks, placement, sizes):
    rows = layers(max(4, 2 * chunks * dist.get_world_size()))
    model = pipeline(rows, num_virtual_pipeline_stages=chunks, placement=placement)
    whole = alone(rows)
    for step, size in enumerate(sizes):
        given = batch(size, step)
        model.zero_grad()
        whole.zero_grad()
        loss = model.forward_backward_pipeline(given, schedule=schedule)
        torch.testing.assert_close(loss, computed_alone(whole, given))
        assert_same_gradients(model, whole)
    in_step()


def _schedule_check(schedule, chunks, placement):
    def check():
        steps = 4 * max(4, dist.get_world_size())
        _gradients_are_those_of_one_process(schedule, chunks, placement, [steps, steps - 2, 5])

    check.__name__ = f"{schedule}_with_{chunks}_stages_a_rank_on_a_{placement}_is_one_process"
    return check


for each in SCHEDULES:
    sentence(_schedule_check(*each))


@sentence
def train_batch_is_a_step_of_one_process():
    rows = layers(2 * dist.get_world_size() + 2)
    whole = alone(rows)
    model = pipeline(rows)
    optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (model, whole)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    for step in range(3):
        given = batch(10, step)
        loss = model.train_batch(given, optimizers[0], scheduler)
        assert all(each.grad is None for each in model.parameters())
        torch.testing.assert_close(loss, computed_alone(whole, given))
        optimizers[1].step()
        optimizers[1].zero_grad()
        optimizers[1].param_groups[0]["lr"] *= 0.5
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


@sentence
def gradients_add_up_over_batches():
    rows = layers(2 * dist.get_world_size())
    whole, model = alone(rows), pipeline(rows)
    for step in range(2):
        given = batch(9, step)
        model.forward_backward_pipeline(given)
        computed_alone(whole, given)
    assert_same_gradients(model, whole)


@sentence
def merged_gradients_are_those_of_all_batches():
    size = dist.get_world_size()
    strategy = options(gradient_merge=GradientMerge(2))
    model = pipeline(tied_layers(size), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = distribute_optimizer(optimizer, model.grid, strategy)
    own = PipelineLayer(tied_layers(size), loss_fn=functional.mse_loss, group=own_group())
    whole = PipelineParallel(own, None, options(16, max(4, size)))
    other = torch.optim.SGD(whole.parameters(), 0.1)
    for step in range(4):
        model.train_batch(batch(8, step), optimizer)
        if step % 2:
            both = zip(batch(8, step - 1), batch(8, step), strict=True)
            whole.train_batch([*map(torch.cat, both)], other)
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


@sentence
def ranks_in_the_middle_need_no_data():
    rank, size = rank_and_size()
    rows = layers(2 * size)
    whole, model, given = alone(rows), pipeline(rows), batch(7)
    mine = (given.inputs if rank == 0 else None, given.labels if rank == size - 1 else None)
    model.forward_backward_pipeline(mine if rank in (0, size - 1) else None)
    computed_alone(whole, given)
    assert_same_gradients(model, whole)


@sentence
def evaluation_gives_the_loss_on_all_ranks_and_the_output_on_the_last():
    rank, size = rank_and_size()
    rows = [*layers(2 * size), nn.Dropout(0.5)]
    whole, model, given = alone(rows).eval(), pipeline(rows), batch(11)
    with torch.no_grad():
        expected = whole(given.inputs)
    loss = model.eval_batch(given)
    torch.testing.assert_close(loss, functional.mse_loss(expected, given.labels))
    output = model.eval_batch((given.inputs, None), compute_loss=False)
    assert (output is None) == (rank != size - 1)
    if output is not None:
        torch.testing.assert_close(output, expected)
    assert all(each.grad is None for each in model.parameters())


@sentence
def all_losses_of_a_list_are_told_and_one_of_them_trains():
    _rank, size = rank_and_size()
    rows, given = layers(2 * size), batch(12)
    several = [functional.mse_loss, functional.l1_loss]
    for index, loss in enumerate(several):
        model, whole = pipeline(rows, several), alone(rows)
        model.train()
        told = model.forward_backward_pipeline(given, None, index)
        expected = computed_alone(whole, given, loss)
        torch.testing.assert_close(told[index], expected)
        assert_same_gradients(model, whole)
        model.zero_grad()
        assert model.eval_batch(given) == told
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert model.train_batch(given, optimizer, None, None, 1) == told
    for wrong in (2, -1, True, "1"):
        with pytest.raises(dist.UsageError, match="one of the 2 functions"):
            model.train_batch(given, optimizer, loss_fn_idx=wrong)
    in_step()


# ---- what stages hand on


class Both(nn.Module):
    """Hands on what it got beside what it computed, a whole number and a mask."""

    def __init__(self, seed):
        super().__init__()
        self.linear = linear(seed)

    def forward(self, given):
        x, *_ = given if isinstance(given, tuple) else (given,)
        made = torch.tanh(self.linear(x))
        return made, x, torch.arange(len(x)), x > 0


def _sum_of(given):
    made, x, index, mask = given
    return made * mask + x * index[:, None]


@sentence
def stages_hand_on_several_tensors_of_any_kind():
    rows = [*(Both(seed) for seed in range(2 * dist.get_world_size())), _sum_of]
    whole = [*copy.deepcopy(rows[:-1]), _sum_of]
    model, given = pipeline(rows), batch(8)
    model.forward_backward_pipeline(given)
    losses = []
    for first in (0, 4):  # the numbers are of the micro-batch
        x = given.inputs[first : first + 4]
        for each in whole:
            x = each(x)
        losses.append(functional.mse_loss(x, given.labels[first : first + 4]) / 2)
    sum(losses).backward()
    assert_same_gradients(model, nn.Sequential(*whole[:-1]))


@sentence
def the_first_stage_takes_dicts_of_whole_numbers():
    _rank, size = rank_and_size()
    embedding = filled(nn.Embedding(9, WIDTH), 1)
    rows = [lambda given: given["ids"], embedding, *layers(2 * size)]
    ids = torch.arange(10) % 9
    labels = batch(10).labels
    model = pipeline(rows, strategy=options(3))
    model.forward_backward_pipeline(({"ids": ids}, labels))
    whole = nn.Sequential(nn.Identity(), *copy.deepcopy(rows[1:]))
    whole.zero_grad()
    functional.mse_loss(whole(ids), labels).backward()
    assert_same_gradients(model, whole)


@sentence
def stages_without_weights_train_with_the_others():
    size = dist.get_world_size()
    bounds = [0, *range(2, 2 + size - 1)]
    rows = [linear(0), linear(1), *(nn.Tanh() for _ in range(size - 1))]
    whole, model, given = alone(rows), pipeline(rows, seg_method=bounds), batch(8)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    other = torch.optim.Adam(whole.parameters(), 0.1)
    for _ in range(2):
        model.train_batch(given, optimizer)
        computed_alone(whole, given)
        other.step()
        other.zero_grad()
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


@sentence
def a_shared_weight_that_is_frozen_stays():
    model = pipeline(tied_layers(dist.get_world_size()))
    for tie in model.module.ties:
        tie.weight.requires_grad_(False)
    model.forward_backward_pipeline(batch(8))
    assert all(tie.weight.grad is None for tie in model.module.ties)


@sentence
def weights_that_are_frozen_stop_gradients():
    size = dist.get_world_size()
    rows = layers(2 * size + 2)
    rows[0].requires_grad_(False)
    whole, model, given = alone(rows), pipeline(rows), batch(8)
    for schedule in ("1F1B", "ZBH1"):
        model.zero_grad()
        whole.zero_grad()
        model.forward_backward_pipeline(given, schedule=schedule)
        computed_alone(whole, given)
        assert_same_gradients(model, whole)


# ---- weights that stages share


def _backwards(layer, x):
    return x @ layer.weight


def tied_layers(size):
    def made(cls, *given, **named):
        return lambda: filled(cls(*given, **named), 5)

    between = layers(2 * size)
    return [
        SharedLayerDesc("embed", made(nn.Linear, WIDTH, WIDTH)),
        *between,
        SharedLayerDesc("embed", made(nn.Linear, WIDTH, WIDTH, bias=False), _backwards),
        *(nn.Tanh() for _ in range(size)),
        SharedLayerDesc("embed", made(nn.Linear, WIDTH, WIDTH)),
    ]


class Head(nn.Module):
    """Has its weight in a layer of its own, and names it by a property, as Paddle's users do."""

    def __init__(self, seed):
        super().__init__()
        self.inner = linear(seed)

    @property
    def embedding_weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x)


@sentence
def a_property_may_name_the_weight_that_layers_share():
    _rank, size = rank_and_size()

    def rows():
        described = [SharedLayerDesc("w", Head, None, "embedding_weight", each) for each in (1, 2)]
        return [described[0], *(nn.Tanh() for _ in range(size)), described[1]]

    model = pipeline(rows())
    whole = PipelineLayer(rows(), loss_fn=functional.mse_loss, group=own_group())
    whole = PipelineParallel(whole, None, options())
    for each in (model, whole):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for step in range(2):
            each.train_batch(batch(12, step), optimizer)
    expected, mine = whole.state_dict(), model.state_dict()
    first, last = "0.inner.weight", f"{size + 1}.inner.weight"
    torch.testing.assert_close(expected[first], expected[last], rtol=0, atol=0)
    for name, value in mine.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
    names = [tie.name for tie in model.module.ties]
    assert names == ([first] if size > 1 and {first, last} & {*mine} else [])


@sentence
def tied_weights_are_equal_to_the_bit_after_ten_steps_of_adam():
    _rank, size = rank_and_size()
    model = pipeline(tied_layers(size))
    own = PipelineLayer(tied_layers(size), loss_fn=functional.mse_loss, group=own_group())
    whole = PipelineParallel(own, None, options())
    optimizers = [torch.optim.Adam(each.parameters(), 0.05) for each in (model, whole)]
    for step in range(10):
        given = batch(12, step)
        losses = [
            each.train_batch(given, optimizer)
            for each, optimizer in zip((model, whole), optimizers, strict=True)
        ]
        torch.testing.assert_close(*losses)
    expected = whole.state_dict()
    mine = model.state_dict()
    for name, value in mine.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
    ends = [name for name in ("0.weight", f"{3 * size + 2}.weight") if name in mine]
    found = []
    dist.all_gather_object(found, [mine[name].numpy().tobytes() for name in ends])
    assert len({each for told in found for each in told}) == 1


def own_group():
    return dist.new_group([dist.get_rank()])


@sentence
def what_shares_a_weight_must_have_equal_ones():
    size = dist.get_world_size()
    rows = [
        SharedLayerDesc("embed", nn.Linear, None, "weight", 3, 4),
        *(nn.Tanh() for _ in range(size)),
        SharedLayerDesc("embed", nn.Linear, None, "weight", 4, 4),
    ]
    error = dist.UsageError if size == 1 else dist.HpcdistError
    if dist.get_rank() in (0, size - 1):
        with pytest.raises(error, match="embed"):
            PipelineLayer(rows)
    else:
        PipelineLayer(rows)
    in_step()


# ---- failures


class Fails(nn.Module):
    """Passes its input on, but fails once: in the second forward or backward pass."""

    def __init__(self, when):
        super().__init__()
        self.when, self.calls = when, 0

    def fail(self, when):
        self.calls += self.when == when
        if self.when == when and self.calls == 2:
            self.when = "never"
            raise Drill(f"in {when}")

    def forward(self, x):
        self.fail("forward")
        return Slope.apply(x, self)


class Slope(torch.autograd.Function):
    """Passes its input on."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        ctx.module.fail("backward")
        return slope, None


def _failing_check(when, schedule):
    def check():
        rank, size = rank_and_size()
        for stage in {0, size // 2, size - 1}:
            rows = []
            for each in range(size):
                rows += [linear(each), Fails(when if each == stage else "never")]
            whole = alone(rows[::2])
            model = pipeline(rows, seg_method=[2 * each for each in range(size)])
            given = batch(4 * max(4, size))
            error = Drill if rank == stage else dist.RemoteError
            with pytest.raises(error) as caught:
                model.forward_backward_pipeline(given, schedule=schedule)
            told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert f"in {when}" in told
            assert f"stage {stage} of {size}" in told
            assert f"rank {stage}" in told
            assert all(each.grad is None for each in model.parameters())
            in_step()
            model.forward_backward_pipeline(given, schedule=schedule)
            computed_alone(whole, given)
            found = gradients(model).values()
            expected = [each.grad for each in whole[rank].parameters()]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)

    check.__name__ = f"a_stage_that_fails_in_{when}_of_{schedule}_fails_everywhere_and_once"
    return check


for passed in ("forward", "backward"):
    for name in ("FThenB", "1F1B", "ZBH1"):
        sentence(_failing_check(passed, name))


@sentence
def a_loss_that_fails_fails_everywhere():
    rank, size = rank_and_size()

    def loss(output, labels):
        raise Drill("no loss")

    model = pipeline(layers(2 * size), loss)
    with pytest.raises(Drill if rank == size - 1 else dist.RemoteError, match="no loss"):
        model.eval_batch(batch(8))
    model.module.loss_fn = lambda output, labels: output
    error = dist.UsageError if rank == size - 1 else dist.RemoteError
    with pytest.raises(error, match="must return one number"):
        model.forward_backward_pipeline(batch(8))
    in_step()


@sentence
def what_cannot_be_handed_on_fails_everywhere():
    rank, size = rank_and_size()
    for wrong, words in ((lambda x: {"x": x}, "got dict"), (lambda x: x.to_sparse(), "dense")):
        rows = [wrong, *(nn.Identity() for _ in range(size - 1))]
        model = pipeline(rows, lambda output, labels: labels.sum())
        if size == 1:
            continue
        error = dist.UsageError if rank == 0 else dist.RemoteError
        with pytest.raises(error, match=words):
            model.forward_backward_pipeline(batch(8))
        in_step()


@sentence
def wrong_batches_are_refused_on_every_rank():
    rank, size = rank_and_size()
    model = pipeline(layers(2 * size))
    good = batch(8)
    most = 4 * max(4, size)

    def refused(data, where, words):
        ranks = {rank_ % size for rank_ in where}
        error = dist.UsageError if rank in ranks else dist.RemoteError
        with pytest.raises(error, match=words):
            model.forward_backward_pipeline(data)
        in_step()

    everyone = range(size)
    refused(good.inputs, everyone, r"take \(inputs, labels\)")
    refused((good.inputs, good.labels, None), everyone, "got 3 entries")
    refused(batch(most + 1), [0, -1], f"a batch of {most + 1} samples")
    refused((None, good.labels), [0], "the first stage has no inputs")
    refused((torch.ones(0, WIDTH), torch.ones(0, WIDTH)), [0, -1], r"\[0\] rows")
    with pytest.raises((dist.UsageError, dist.MismatchError), match=r"rows|have different batches"):
        model.forward_backward_pipeline((good.inputs, good.labels[:3]))
    in_step()
    with pytest.raises(dist.UsageError, match="no schedule 'backwards'"):
        model.forward_backward_pipeline(good, schedule="backwards")
    if size > 1:
        with pytest.raises(dist.MismatchError, match="different things"):
            model.forward_backward_pipeline(good, schedule="1F1B" if rank else "FThenB")
        with pytest.raises(dist.MismatchError, match="train a batch" if rank else "evaluate"):
            model.forward_backward_pipeline(good) if rank else model.eval_batch(good)
        with pytest.raises(dist.MismatchError, match=r"without its loss|evaluate"):
            model.eval_batch(good, compute_loss=rank == 0)
    with pytest.raises(dist.UsageError, match="placement='V'"):
        model.forward_backward_pipeline(good, schedule="ZBV")
    with pytest.raises(dist.UsageError, match="optimizer of torch"):
        model.train_batch(good, "sgd")
    model.module.loss_fn = lambda *given: functional.mse_loss(*given).detach()
    with pytest.raises((dist.UsageError, dist.RemoteError), match="without a graph"):
        model.forward_backward_pipeline(good)
    model.module.loss_fn = None
    with pytest.raises(dist.UsageError, match="has no loss"):
        model.eval_batch(good)
    in_step()
    model.module.loss_fn = functional.mse_loss
    model.forward_backward_pipeline(good)


@sentence
def models_that_differ_between_ranks_are_refused_on_all():
    rank, size = rank_and_size()
    if size == 1:
        return
    more = rank == 1
    cut = [0, *(first + more for first in range(1, size)), 2 * size]
    for rows, method, words in (
        (layers(2 * size + more), "uniform", "different layers"),
        (layers(2 * size), cut, "seg_method="),
    ):
        with pytest.raises(dist.MismatchError, match=words):
            PipelineLayer(rows, seg_method=method)
        in_step()


@sentence
def wrong_models_are_refused_on_every_rank():
    _rank, size = rank_and_size()
    good = layers(2 * size)
    refusals = [
        ({"num_stages": size + 1}, f"num_stages={size + 1}"),
        ({"seg_method": "layer:Conv"}, "finds 0 layers"),
        ({"seg_method": "evenly"}, "seg_method is 'evenly'"),
        ({"seg_method": [1, 2, 3]}, "does not cut"),
        ({"seg_method": LayerCosts((1.0,))}, "1 costs for"),
        ({"num_virtual_pipeline_stages": 0}, "num_virtual_pipeline_stages must be"),
        ({"recompute_interval": -1}, "recompute_interval must be"),
        ({"placement": "U"}, 'placement is "loop" or "V"'),
        ({"loss_fn": 3}, "loss_fn must be a function"),
        ({"num_virtual_pipeline_stages": 9}, "cannot be cut into"),
    ]
    for settings, words in refusals:
        with pytest.raises(dist.UsageError, match=words):
            PipelineLayer(good, **settings)
        in_step()
    with pytest.raises(dist.UsageError, match="layer 1 is 3"):
        PipelineLayer([nn.Tanh(), 3])
    made = PipelineLayer(good, loss_fn=functional.mse_loss)
    if size > 1:
        with pytest.raises(
            dist.UsageError, match=r"accumulate_steps\(1\) should be greater than or equal to pp"
        ):
            PipelineParallel(made, None, options(steps=1))
        with pytest.raises(dist.UsageError, match="call train_batch"):
            made(batch(2).inputs)
    with pytest.raises(dist.UsageError, match="needs a PipelineLayer"):
        PipelineParallel(nn.Tanh())
    with pytest.raises(dist.UsageError, match="sync_batch_norm"):
        PipelineParallel(made, None, options(sync_batch_norm=True))
    in_step()


@sentence
def a_layer_that_cannot_be_made_is_told_on_every_rank():
    rank, size = rank_and_size()

    def fails():
        raise Drill("no such layer")

    with pytest.raises(Drill if rank == size - 1 else dist.RemoteError, match="no such layer"):
        PipelineLayer([*layers(size - 1), LayerDesc(fails)])
    in_step()


# ---- precision, recomputing


@sentence
def a_step_with_an_overflow_is_left_out_on_all_ranks():
    rank, size = rank_and_size()
    rows = layers(2 * size)
    model, given = pipeline(rows), batch(8)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = dist.shard_scaler(torch.amp.GradScaler("cpu", init_scale=4.0))
    poisoned = next(model.parameters()).register_hook(
        lambda slope: slope * (float("inf") if rank == size - 1 else 1)
    )
    model.train_batch(given, optimizer, scaler=scaler)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert scaler.get_scale() == 2.0
    poisoned.remove()
    model.train_batch(given, optimizer, scaler=scaler)
    whole = alone(rows)
    whole.load_state_dict({**whole.state_dict(), **before})
    other = torch.optim.SGD(whole.parameters(), 0.1)
    computed_alone(whole, given)
    other.step()
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


@sentence
def a_scaler_of_one_rank_is_refused():
    model = pipeline(layers(2 * dist.get_world_size()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if dist.get_world_size() > 1:
        with pytest.raises(dist.UsageError, match="shard_scaler"):
            model.train_batch(batch(8), optimizer, scaler=scaler)
    else:
        model.train_batch(batch(8), optimizer, scaler=scaler)
    in_step()


@sentence
def mixed_precision_hands_on_what_it_computes_in():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x

    rows = []
    for each in range(dist.get_world_size()):
        rows += [Look(), filled(nn.Linear(WIDTH, WIDTH), each).float()]
    strategy = options(amp=Amp(dtype="bfloat16"))
    model = pipeline(rows, lambda x, y: functional.mse_loss(x.float(), y.float()), strategy)
    loss = model.forward_backward_pipeline((batch(8).inputs.float(), batch(8).labels))
    assert seen[0] == (torch.float32 if dist.get_rank() == 0 else torch.bfloat16)
    assert all(each.grad.dtype == torch.float32 for each in model.parameters())
    assert torch.isfinite(loss)


@sentence
def layers_that_are_computed_again_give_the_same_gradients():
    rows = layers(6 * dist.get_world_size())
    whole, given = alone(rows), batch(9)
    computed_alone(whole, given)
    for schedule, interval in (("1F1B", 1), ("1F1B", 4), ("ZBH1", 2)):
        model = pipeline(copy.deepcopy(rows), recompute_interval=interval)
        model.forward_backward_pipeline(given, schedule=schedule)
        assert_same_gradients(model, whole)


# ---- segments, states, pictures


@sentence
def layers_can_be_cut_by_what_they_cost():
    _rank, size = rank_and_size()
    rows = [nn.Linear(8, 8 * size), *(nn.Linear(2, 2) for _ in range(size))]
    bounds = PipelineLayer(rows, seg_method="parameters").bounds
    assert size == 1 or bounds[1] == 1
    described = [LayerDesc(nn.Linear, 8, 8 * size), *rows[1:]]
    assert PipelineLayer(described, seg_method="parameters").bounds == bounds
    costs = LayerCosts((1.0,) * size + (float(size),))
    assert PipelineLayer(rows, seg_method=costs).bounds[-2:] == [
        max(0, size - 1) and size,
        size + 1,
    ]


@sentence
def a_state_fits_any_number_of_stages():
    _rank, size = rank_and_size()
    rows = layers(2 * size + 1)
    model, whole = pipeline(rows), alone(rows)
    expected = whole.state_dict()
    mine = model.state_dict()
    assert mine.keys() <= expected.keys()
    told = []
    dist.all_gather_object(told, sorted(mine))
    assert sorted(name for each in told for name in each) == sorted(expected)
    for value in expected.values():
        value += 1
    model.load_state_dict({name: expected[name] for name in mine})
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


@sentence
def a_step_can_be_drawn_and_has_a_bubble():
    rank, size = rank_and_size()
    model = pipeline(layers(2 * size))
    with pytest.raises(dist.UsageError, match="no train_batch yet"):
        model.bubble()
    model.forward_backward_pipeline(batch(16))
    bubble = model.bubble()
    assert 0 <= bubble.measured < 1
    assert bubble.predicted == pytest.approx((size - 1) / (size + 3))
    timeline = model.timeline()
    assert len(timeline) == size
    for spans in timeline:
        assert len(spans) == 8
        assert all(one.end <= other.begin for one, other in itertools.pairwise(spans))
    made = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(made, 0)
    path = Path(made[0]) / "step.svg"
    model.draw(path)
    if rank == 0:
        assert path.read_text().count("<title>") == 8 * size
        os.remove(path)
        os.rmdir(made[0])
    with pytest.raises(
        dist.UsageError if rank == 0 else dist.RemoteError, match=r"end it in \.svg"
    ):
        model.draw("step.png")
