"""What holds for compressed averages of gradients, on any number of ranks."""

import gc
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from checks import (
    Checks,
    Mlp,
    Vectors,
    assert_raised,
    assert_trains,
    batches,
    everyone,
    needs_torch,
    outcome,
    share,
    train,
    values,
)

import hpcdist as dist

check = Checks()

of_processes = Checks()
"""Checks of what ranks that are threads of one process do not have."""

ERRORS = {"float16": 2e-3, "bfloat16": 1e-2, "int8": 2e-2, "fp8": 0.15}
"""By compression: how much of the largest gradient a mean may be off."""
ALL = [*ERRORS, dist.PowerSGD(2)]


class Weights:
    """A matrix and a vector, each of which is given the gradients of this rank."""

    def __init__(self, shape=(90, 70), dtype="f4"):
        self.w, self.b = (dist.Parameter(np.zeros(each, dtype)) for each in (shape, shape[1:]))

    def named_parameters(self):
        return [("w", self.w), ("b", self.b)]

    def __call__(self):
        pass

    def give(self, w, b):
        self.b.grad = np.array(b, self.b.data.dtype)
        self.w.grad = np.array(w, self.w.data.dtype)

    def grads(self):
        return self.w.grad.copy(), self.b.grad.copy()


def drawn(shape=(90, 70), seed=0):
    """Return gradients of this rank, and their mean over the ranks."""
    every = [
        np.random.default_rng((seed, rank)).normal(size=shape).astype("f4")
        for rank in range(dist.get_world_size())
    ]
    return every[dist.get_rank()], np.mean(every, axis=0, dtype="f8")


def same_everywhere(*arrays):
    bits = everyone([each.tobytes() for each in arrays])
    return all(each == bits[0] for each in bits)


# ---- means


@check
def a_mean_is_about_that_of_the_gradients_and_the_same_on_all_ranks():
    for compress, error in ERRORS.items():
        for dtype in ("f4", "f8", "f2"):
            model = dist.DataParallel(layers := Weights(dtype=dtype), compress=compress)
            w, mean = drawn()
            model()
            layers.give(w, w[0])
            means = layers.grads()
            np.testing.assert_allclose(means[0], mean, atol=error * 5)
            np.testing.assert_allclose(means[1], mean[0], atol=error * 5)
            assert same_everywhere(*means)


@check
def what_is_rounded_away_comes_with_the_next_gradients():
    many = 30
    for compress in ("int8", "fp8", dist.PowerSGD(16)):
        model = dist.DataParallel(layers := Weights(), compress=compress)
        w, mean = drawn()
        found = []
        for _ in range(many):
            layers.give(w, w[0])
            found.append(layers.w.grad.astype("f8"))
        once, always = (np.abs(each - mean).max() for each in (found[0], np.mean(found, axis=0)))
        assert always < once / 3 or model.group.nranks == 1, compress


@check
def matrices_of_low_rank_are_found():
    model = dist.DataParallel(layers := Weights(), compress=dist.PowerSGD(2))
    random = np.random.default_rng(0)  # all ranks see the same two directions
    one, two = random.normal(size=(90, 2)), random.normal(size=(2, 70))
    n, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(3):
        layers.give((rank + 1) * (one @ two), np.full(70, rank))
    np.testing.assert_allclose(layers.w.grad, (n + 1) / 2 * (one @ two), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(layers.b.grad, (n - 1) / 2, rtol=1e-6)
    assert same_everywhere(*layers.grads())
    del model


@of_processes
def fewer_bytes_are_sent():
    n, shape = dist.get_world_size(), (300, 256)
    whole = 4 * (300 * 256 + 256)
    bounds = {"bfloat16": 0.51, "int8": 0.26, "fp8": 0.26, dist.PowerSGD(1): 0.011}
    for compress, least in bounds.items():
        layers = Weights(shape)
        model = dist.DataParallel(layers, compress=compress)
        seen = []
        layers.give(np.ones(shape), np.ones(256))
        stop = dist.subscribe(seen.append)
        layers.give(np.ones(shape), np.ones(256))
        layers.grads()
        stop()
        sent = dict.fromkeys(("all_reduce", "alltoall", "all_gather"), 0)
        for event in seen:
            if event.phase == "end" and event.name in sent:
                parts = len(event.ranks) if event.name == "all_gather" else 1
                sent[event.name] += event.nbytes * parts
        if n == 1:
            continue  # what is sent nowhere is not compressed
        assert max(sent.values()) < least * whole, sent
        if dist.get_rank() == 0:  # the first rank of its node
            assert max(sent.values()) > 0.9 * least * whole
        assert model.comm_stats().nbytes < 2 * least * whole


# ---- training


@check
def networks_learn_about_as_well():
    rows = 4 * dist.get_world_size()
    data = [(x.astype("f4"), y.astype("f4")) for x, y in batches(30, rows)]
    losses = {}
    for compress in (None, *ALL):
        layers = Mlp(seed=dist.get_rank(), dtype="f4", hidden=32)
        model = dist.DataParallel(layers, compress=compress)

        def sgd(state, p, gradient):
            p.data -= np.float32(0.1) * gradient

        train(model, layers, sgd, share(data))
        assert same_everywhere(*values(layers).values())
        losses[compress] = np.mean([((layers(x) - y) ** 2).mean() for x, y in data])
    for compress in ALL:
        assert losses[compress] < 1.02 * losses[None], losses


@of_processes.needing(pytest.mark.thorough)
def handwritten_digits_are_recognised_as_well():
    pytest.importorskip("sklearn")
    path = Path(__file__).parents[2] / "examples" / "train.py"
    example = module_from_spec(spec := spec_from_file_location("train_digits", path))
    spec.loader.exec_module(example)

    def accuracy(compress, seed):
        images, labels, *tests = example.load(seed)
        network = example.Network(64, seed)
        model = dist.DataParallel(network, compress=compress)
        optimizer = example.Momentum(model.parameters(), 0.1)
        for epoch in range(12):
            order = np.random.default_rng((seed, epoch)).permutation(len(images))
            example.train_epoch(model, optimizer, images, labels, order)
        return example.test(network, *tests)

    found = {each: np.mean([accuracy(each, seed) for seed in range(3)]) for each in (None, *ALL)}
    assert all(found[each] > found[None] - 0.005 for each in ALL), found


@check
def accumulated_gradients_are_compressed_once():
    n = dist.get_world_size()
    for compress in ALL:
        model = dist.DataParallel(layers := Vectors("a", "b"), compress=compress)
        with model.no_sync():
            model()
            layers.give(2)
        assert layers.grads() == [2, 2]
        model()
        layers.give(2 * dist.get_rank())
        np.testing.assert_allclose(layers.grads(), [n + 1] * 2, rtol=0.05)


@check
def unused_parameters_and_batches_that_are_over_count_as_zeros():
    n, rank = dist.get_world_size(), dist.get_rank()
    for compress in ALL:
        layers = Vectors("a", "b", "c")
        model = dist.DataParallel(layers, compress=compress, find_unused_parameters=True)
        model()
        layers.give(n, "a", *(["b"] if rank == 0 else []))
        model.synchronize()
        np.testing.assert_allclose(layers.grads()[:2], [n, 1], rtol=0.05)
        assert layers.all["c"].grad is None
        with model.join():
            for _ in range(1 + rank):
                model.zero_grad()
                model()
                layers.give(1, "a")
                model.synchronize()
        assert same_everywhere(*(each.data for each in layers.all.values()))


@check
def groups_of_their_own_are_averaged_whole():
    n, rank = dist.get_world_size(), dist.get_rank()
    pairs = [dist.new_group(sorted({each, each ^ 1} & {*range(n)})) for each in range(0, n, 2)]
    layers = Vectors("a", "b")
    layers.all["b"].group = pairs[rank // 2]
    model = dist.DataParallel(layers, compress="int8")
    for _ in range(2):
        model.zero_grad()
        model()
        layers.give(rank + 1)
        mean = np.mean([each + 1 for each in pairs[rank // 2].ranks])
        np.testing.assert_allclose(layers.grads(), [(n + 1) / 2, mean], rtol=0.05)
        assert layers.grads()[1] == mean


@check
def two_models_take_turns():
    models = [dist.DataParallel(layers := Weights(), compress="int8") for _ in range(2)]
    for _ in range(3):
        for model in models:
            w, mean = drawn()
            layers = model._layers
            layers.give(w, w[0])
        for model in models:
            np.testing.assert_allclose(model._layers.w.grad, mean, atol=0.3)
    del model, models, layers
    gc.collect()
    assert_trains(dist.DataParallel(layers := Vectors("a")), layers)


# ---- trouble


@check
def nan_and_infinity_arrive_and_do_not_stay():
    last = dist.get_world_size() - 1
    for bad in (np.nan, np.inf, -np.inf):
        for compress in ALL:
            model = dist.DataParallel(layers := Weights(), compress=compress)
            w, mean = drawn()
            layers.give(w, w[0])
            spoilt = w.copy()
            if dist.get_rank() == last:
                spoilt[7, 9] = bad
            layers.give(spoilt, w[0])
            assert not np.isfinite(layers.w.grad).all(), (bad, compress)
            layers.give(w, w[0])
            assert np.isfinite(layers.w.grad).all(), (bad, compress)
            assert np.abs(layers.w.grad - mean).max() < 12
            assert same_everywhere(*layers.grads())
            del model


@check
def a_scaler_leaves_out_a_step_with_infinity():
    for compress in ALL:
        layers = Weights()
        model = dist.DataParallel(layers, compress=compress)
        optimizer = dist.optim.SGD([layers.w, layers.b], 0.5)
        scaler = dist.GradScaler(init_loss_scaling=8.0)
        w = np.full((90, 70), np.inf if dist.get_rank() == 0 else 1.0)
        layers.give(w, np.ones(70))
        assert not scaler.step(optimizer)
        assert not layers.w.data.any()
        del model


@check
def an_error_on_one_rank_is_heard_by_all_and_they_go_on():
    n = dist.get_world_size()
    for compress in ("int8", dist.PowerSGD(1)):
        layers = Weights()
        model = dist.DataParallel(layers, compress=compress, check_nan=True)
        w, mean = drawn()
        for _ in range(2):

            def spoilt(layers=layers, w=w):
                layers.give(w * (np.nan if dist.get_rank() == n - 1 else 1), w[0])
                layers.grads()

            assert_raised(outcome(spoilt), "UsageError", "contains NaN", ranks=[n - 1])
            model.zero_grad()
        layers.give(w, w[0])
        assert same_everywhere(*layers.grads())
        assert np.abs(layers.b.grad - mean[0]).max() < 0.1


@check
def what_cannot_be_compressed_is_refused_before_anything_is_sent():
    def made(layers=None, **settings):
        return outcome(lambda: dist.DataParallel(layers or Vectors("a"), **settings))

    for wrong in ("int4", 8, True, dist.PowerSGD, ""):
        assert_raised(made(compress=wrong), "UsageError", "compress must be 'float16'")
    for rank in (0, -1, 1.5, True):
        with pytest.raises(dist.UsageError, match="rank of PowerSGD must be an integer"):
            dist.PowerSGD(rank)
    assert_raised(made(compress="int8", virtual_ranks=8), "UsageError", "virtual_ranks")
    assert_raised(made(Weights(dtype="c8"), compress="fp8"), "UsageError", "real numbers")
    told = made(compress="int8" if dist.get_rank() == 0 else "bfloat16")
    assert told[0][0] == ("nothing" if dist.get_world_size() == 1 else "MismatchError")


@of_processes
def ordered_reductions_are_not_compressed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCDIST_REDUCTIONS", "ordered")
        told = outcome(lambda: dist.DataParallel(Vectors("a"), compress="int8"))
    assert_raised(told, "UsageError", "HPCDIST_REDUCTIONS=ordered")


# ---- torch


@of_processes.needing(needs_torch)
def torch_modules_learn_about_as_well():
    import torch

    torch.set_num_threads(1)
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(8 * n, 6, generator=generator) for _ in range(2))
    losses = {}
    for compress in (None, *ALL):
        torch.manual_seed(7)
        module = torch.nn.Sequential(
            torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 6)
        )
        model = dist.DataParallel(module, compress=compress)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        for _ in range(20):
            optimizer.zero_grad()
            with model.no_sync():
                (model(x[rank::n]) - y[rank::n]).square().mean().backward()
            (model(x[rank::n]) - y[rank::n]).square().mean().backward()
            optimizer.step()
        assert same_everywhere(*(each.detach().numpy() for each in module.parameters()))
        losses[compress] = (module(x) - y).square().mean().item()
    for compress in ALL:
        assert losses[compress] < 1.03 * losses[None], losses


@of_processes.needing(needs_torch)
def torch_modules_hear_of_errors_and_go_on():
    import torch

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)

        def forward(self, x, both=True):
            return self.one(x) + (self.other(x) if both else 0)

    n, rank = dist.get_world_size(), dist.get_rank()
    model = dist.DataParallel(Two(), compress="int8", comm_buffer_size=0)
    assert_raised(
        outcome(lambda: model.register_comm_hook(None, None)), "UsageError", "averages the buckets"
    )
    if n == 1:
        return

    def part():
        model(torch.ones(2, 40), both=rank < n - 1).sum().backward()

    for _ in range(2):
        assert_raised(outcome(part), "UsageError", "no gradient for", ranks=[n - 1])
    model.zero_grad()
    model(torch.full((2, 40), rank + 1.0)).sum().backward()
    mean = torch.full((30, 40), n + 1.0)
    torch.testing.assert_close(model.module.one.weight.grad, mean, rtol=0.05, atol=0)
    with model.join():
        for _ in range(rank + 1):
            model(torch.ones(2, 40)).sum().backward()


@of_processes.needing(needs_torch)
def sparse_gradients_are_refused():
    import torch

    module = torch.nn.Embedding(10, 4, sparse=True)
    model = dist.DataParallel(module, compress="int8")
    if dist.get_world_size() > 1:
        told = outcome(lambda: model(torch.tensor([1, 2])).sum().backward())
        assert_raised(told, "UsageError", "dense gradients")
