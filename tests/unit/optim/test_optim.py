"""The optimizers of plain arrays, alone: their numbers are torch's, or those of the paper."""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import optim
from hpcdist.optim.slices import BLOCK

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")

SHAPE = 3, BLOCK // 2 + 5  # more than a block, and no whole number of them


def gradients(count, dtype, shape=SHAPE, seed=1):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(dtype) for _ in range(count)]


def trained(make, steps, dtype="f8", shape=SHAPE):
    parameter = dist.Parameter(np.random.default_rng(0).normal(size=shape).astype(dtype))
    optimizer = make([parameter])
    for gradient in gradients(steps, dtype, shape):
        parameter.grad = gradient
        optimizer.step()
    return parameter, optimizer


ALGORITHMS = {
    "SGD": lambda p: optim.SGD(p, 0.1, weight_decay=0.01),
    "Momentum": lambda p: optim.Momentum(p, 0.1),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "LAMB": lambda p: optim.LAMB(p, 0.01),
    "LARS": lambda p: optim.LARS(p, 0.1, lars_coeff=0.02),
}

LIKE_TORCH = {
    "SGD": (optim.SGD, {}, "SGD", {}),
    "SGD with decay": (optim.SGD, {"weight_decay": 0.1}, "SGD", {"weight_decay": 0.1}),
    "momentum": (optim.Momentum, {"momentum": 0.8}, "SGD", {"momentum": 0.8}),
    "momentum with decay": (
        optim.Momentum,
        {"momentum": 0.8, "weight_decay": 0.1, "dampening": 0.3},
        "SGD",
        {"momentum": 0.8, "weight_decay": 0.1, "dampening": 0.3},
    ),
    "nesterov": (
        optim.Momentum,
        {"nesterov": True, "weight_decay": 0.1},
        "SGD",
        {"nesterov": True, "momentum": 0.9, "weight_decay": 0.1},
    ),
    "Adam": (optim.Adam, {}, "Adam", {}),
    "Adam with decay": (optim.Adam, {"weight_decay": 0.1}, "Adam", {"weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {}, "AdamW", {}),
    "AdamW with other betas": (
        optim.AdamW,
        {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3},
        "AdamW",
        {"betas": (0.8, 0.95), "eps": 1e-3},
    ),
}


@needs_torch
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [("f8", 1e-12, 1e-14), ("f4", 1e-5, 1e-6)])
@pytest.mark.parametrize("case", LIKE_TORCH.values(), ids=LIKE_TORCH)
def test_the_numbers_are_those_of_torch(case, dtype, rtol, atol):
    import torch

    make, options, theirs, their_options = case
    found, _ = trained(lambda p: make(p, learning_rate=0.01, **options), 5, dtype)
    start = np.random.default_rng(0).normal(size=SHAPE).astype(dtype)
    expected = torch.nn.Parameter(torch.from_numpy(start))
    optimizer = getattr(torch.optim, theirs)([expected], lr=0.01, **their_options)
    for gradient in gradients(5, dtype):
        expected.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(found.data, expected.detach().numpy(), rtol=rtol, atol=atol)


def lamb_in_the_papers_words(w, slopes, rate=0.01, b1=0.9, b2=0.999, eps=1e-6, decay=0.01):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(slopes, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        u = r + decay * w
        w = w - rate * np.linalg.norm(w) / np.linalg.norm(u) * u
    return w


@pytest.mark.parametrize(("dtype", "rtol"), [("f8", 1e-11), ("f4", 2e-5)])
def test_lamb_is_that_of_the_paper(dtype, rtol):
    found, _ = trained(lambda p: optim.LAMB(p, 0.01), 5, dtype)
    start = np.random.default_rng(0).normal(size=SHAPE).astype(dtype).astype("f8")
    expected = lamb_in_the_papers_words(start, [g.astype("f8") for g in gradients(5, dtype)])
    np.testing.assert_allclose(found.data, expected, rtol=rtol, atol=rtol)


def lars_in_the_papers_words(w, slopes, rate=0.1, mu=0.9, coeff=0.02, decay=0.01, eps=1e-3):
    v = np.zeros_like(w)
    for g in slopes:
        norm = np.linalg.norm(w)
        local = coeff * norm / (np.linalg.norm(g) + decay * norm + eps)
        v = mu * v + rate * local * (g + decay * w)
        w = w - v
    return w


@pytest.mark.parametrize(("dtype", "rtol"), [("f8", 1e-11), ("f4", 2e-5)])
def test_lars_is_that_of_the_paper(dtype, rtol):
    options = {"lars_coeff": 0.02, "weight_decay": 0.01, "epsilon": 1e-3}
    found, _ = trained(lambda p: optim.LARS(p, 0.1, **options), 5, dtype)
    start = np.random.default_rng(0).normal(size=SHAPE).astype(dtype).astype("f8")
    expected = lars_in_the_papers_words(start, [g.astype("f8") for g in gradients(5, dtype)])
    np.testing.assert_allclose(found.data, expected, rtol=rtol, atol=rtol)


IN_TORCH = {
    "LARS": (lars_in_the_papers_words, {"lr": 0.1, "trust_coefficient": 0.02, "eps": 1e-3}),
    "LAMB": (lamb_in_the_papers_words, {"lr": 0.01}),
}


@needs_torch
@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize(("dtype", "rtol"), [("f8", 1e-11), ("f4", 2e-5)])
def test_those_for_torch_are_of_the_papers(name, dtype, rtol):
    import torch

    import hpcdist.torch

    formula, options = IN_TORCH[name]
    start = np.random.default_rng(0).normal(size=SHAPE).astype(dtype)
    weights = [torch.nn.Parameter(torch.from_numpy(start.copy())) for _ in range(2)]
    named = [("weight", weights[0]), ("bias", weights[1])]
    kind = getattr(hpcdist.torch, name)
    optimizer = kind(named, weight_decay=0.01, exclude_from_weight_decay=["bias"], **options)
    slopes = gradients(5, dtype)
    for slope in slopes:
        for each in weights:
            each.grad = torch.from_numpy(slope)
        optimizer.step()
    wide = [slope.astype("f8") for slope in slopes]
    for found, decay in zip(weights, (0.01, 0.0), strict=True):
        expected = formula(start.astype("f8"), wide, decay=decay)
        np.testing.assert_allclose(found.detach().numpy(), expected, rtol=rtol, atol=rtol)


@needs_torch
@pytest.mark.parametrize("name", IN_TORCH)
def test_those_for_torch_move_weights_of_zero(name):
    import torch

    import hpcdist.torch

    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = getattr(hpcdist.torch, name)([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), -0.1, rtol=1e-5)


@needs_torch
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("LARS", {"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ("LARS", {"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ("LAMB", {"eps": -1.0}, "eps must be at least 0"),
        ("LAMB", {"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_options_out_of_range_are_refused_for_torch(name, options, words):
    import torch

    import hpcdist.torch

    with pytest.raises(dist.UsageError, match=words):
        getattr(hpcdist.torch, name)([torch.nn.Parameter(torch.ones(1))], **options)


def test_lamb_moves_weights_of_zero():
    p = dist.Parameter(np.zeros(3))
    optimizer = optim.LAMB([p], learning_rate=0.1)
    p.grad = np.ones(3)
    optimizer.step()
    np.testing.assert_allclose(p.data, -0.1, rtol=1e-5)


@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_weights_of_16_bits_are_the_rounded_master_weights(make, dtype):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    p = dist.Parameter(np.ones(40, dtype))
    optimizer = make([("w", p)])
    for _ in range(3):
        p.grad = np.full(40, 1e-3, dtype)
        optimizer.step()
    master = optimizer.state_dict()["w.master"]
    assert master.dtype == np.float32
    assert (master != 1).all()
    np.testing.assert_array_equal(p.data, master.astype(dtype))


def test_small_steps_add_up_in_master_weights():
    p = dist.Parameter(np.ones(1, "f2"))
    optimizer = optim.SGD([p], learning_rate=1.0)
    for _ in range(100):
        p.grad = np.full(1, 1e-4, "f2")  # below half of what float16 can add to 1
        optimizer.step()
    assert p.data[0] == np.float16(0.99)


@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
def test_complex_weights_are_trained_as_pairs(make):
    values = np.random.default_rng(0).normal(size=(6, 2))
    both, parts = dist.Parameter(values.copy().view("c16")), dist.Parameter(values.copy())
    whole, real = make([("w", both)]), make([("w", parts)])
    for slope in gradients(3, "f8", (6, 2)):
        both.grad, parts.grad = slope.view("c16"), slope
        whole.step()
        real.step()
    np.testing.assert_array_equal(both.data.view("f8"), parts.data)


@needs_jax
@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
def test_arrays_of_jax_are_replaced(make):
    import jax.numpy as jnp

    mine, theirs = dist.Parameter(np.arange(4, dtype="f4")), dist.Parameter(jnp.arange(4.0))
    for p in (mine, theirs):
        optimizer = make([p])
        for _ in range(2):
            p.grad = np.ones(4, "f4")
            optimizer.step()
    np.testing.assert_array_equal(theirs.data, mine.data)
    assert type(theirs.data).__module__.startswith("jax")


def test_arrays_that_are_scattered_in_memory_are_changed_in_place():
    whole = np.zeros((4, 6))
    p = dist.Parameter(whole[:, ::2])
    optimizer = optim.SGD([p], learning_rate=1.0)
    p.grad = np.ones((4, 3))
    optimizer.step()
    np.testing.assert_array_equal(whole, np.tile([-1.0, 0.0], (4, 3)))


def test_parameters_without_a_gradient_stay():
    a, b = dist.Parameter(np.ones(2)), dist.Parameter(np.ones(2))
    optimizer = optim.Momentum([("a", a), ("b", b)])
    a.grad = np.ones(2)
    optimizer.step()
    assert (b.data == 1).all()
    assert (a.data < 1).all()
    assert [optimizer.state_dict()[f"{name}.step"] for name in "ab"] == [1, 0]
    optimizer.clear_grad()
    assert a.grad is None


def test_groups_have_options_of_their_own():
    a, b = dist.Parameter(np.ones(1)), dist.Parameter(np.ones(1))
    groups = [{"params": [a]}, {"params": [b], "learning_rate": 0.25}]
    optimizer = optim.SGD(groups, learning_rate=0.5)
    a.grad = b.grad = np.ones(1)
    optimizer.step()
    assert (a.data[0], b.data[0]) == (0.5, 0.75)
    optimizer.learning_rate = 0.125
    optimizer.step()
    assert (a.data[0], b.data[0]) == (0.375, 0.625)


@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_a_state_that_is_loaded_goes_on_as_before(make, dtype):
    whole, _ = trained(make, 4, dtype, (5, 3))
    part, optimizer = trained(make, 2, dtype, (5, 3))
    again = dist.Parameter(part.data.copy())
    fresh = make([again])
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.has_stepped()
    for gradient in gradients(4, dtype, (5, 3))[2:]:
        again.grad = gradient
        fresh.step()
    np.testing.assert_array_equal(again.data, whole.data)


def test_a_state_of_another_optimizer_is_refused():
    _, adam = trained(ALGORITHMS["Adam"], 1, shape=(2,))
    _, sgd = trained(ALGORITHMS["SGD"], 1, shape=(2,))
    _, longer = trained(ALGORITHMS["Adam"], 1, shape=(3,))
    with pytest.raises(dist.UsageError, match="other entries than the optimizer"):
        sgd.load_state_dict(adam.state_dict())
    with pytest.raises(dist.UsageError, match="has shape"):
        longer.load_state_dict(adam.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": -1}, "learning_rate must be a number, at least 0, got -1"),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"nesterov": True, "dampening": 0.1}, "nesterov needs momentum above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(dist.UsageError, match=words):
        optim.Momentum([dist.Parameter(np.ones(1))], **options)


def test_what_is_no_list_of_parameters_is_refused():
    p = dist.Parameter(np.ones(1))
    for parameters, words in (
        ([], "got no parameters"),
        (SimpleNamespace(parameters=list), r"got a model; pass model\.parameters\(\)"),
        ([np.ones(2)], "got an ndarray; pass hpcdist.Parameters"),
        ([p, p], "got a parameter twice"),
        ([{"params": [p], "lr": 1.0}], "a group of parameters has 'params'"),
    ):
        with pytest.raises(dist.UsageError, match=words):
            optim.SGD(parameters)


# ---- the scaler


def test_the_factor_grows_after_good_steps_and_shrinks_after_a_bad_one():
    p = dist.Parameter(np.ones(1))
    optimizer = optim.SGD([p], learning_rate=1.0)
    scaler = dist.GradScaler(init_loss_scaling=8.0, incr_every_n_steps=2)
    for slope, scale, data in ((0.5, 8, 0.5), (0.25, 16, 0.25), (np.inf, 8, 0.25), (1, 8, -0.75)):
        p.grad = scaler.scale(np.full(1, slope))
        assert scaler.step(optimizer) == np.isfinite(slope)
        scaler.update()
        assert (scaler.get_scale(), p.data[0]) == (scale, data)
    copy = dist.GradScaler()
    copy.load_state_dict(scaler.state_dict())
    assert copy.get_scale() == 8


def test_gradients_are_unscaled_once_before_they_are_clipped():
    p = dist.Parameter(np.zeros(2))
    optimizer, scaler = optim.SGD([p], learning_rate=1.0), dist.GradScaler(init_loss_scaling=4.0)
    p.grad = np.array([12.0, 16.0])
    assert scaler.unscale_(optimizer)
    with pytest.raises(dist.UsageError, match="unscaled already"):
        scaler.unscale_(optimizer)
    assert dist.clip_grad_norm_([p], 2.5) == 5
    assert scaler.step(optimizer)
    np.testing.assert_allclose(p.data, [-1.5, -2.0], rtol=1e-6)


def test_a_scaler_that_is_not_enabled_changes_nothing():
    p = dist.Parameter(np.zeros(1))
    scaler = dist.GradScaler(enable=False)
    assert scaler.scale(3.0) == 3
    p.grad = np.ones(1)
    scaler.minimize(optim.SGD([p], learning_rate=1.0))
    assert (p.data[0], scaler.get_scale()) == (-1, 1)


def test_wrong_bounds_of_norms_are_refused():
    p = dist.Parameter(np.zeros(1))
    p.grad = np.array([np.nan])
    with pytest.raises(dist.UsageError, match="must be positive"):
        dist.clip_grad_norm_([p], 0)
    with pytest.raises(dist.UsageError, match="the norm of the gradients is nan"):
        dist.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
