"""What is computed again has the outputs and gradients of what is kept."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.torch.model_parallel.random import get_rng_state_tracker  # noqa: E402
from hpcdist.torch.recompute import (  # noqa: E402
    recompute,
    recompute_hybrid,
    recompute_sequential,
)

MODES = [True, False]


@pytest.fixture
def tracker():
    tracker = get_rng_state_tracker()
    tracker.reset()
    tracker.add("dropout", 17)
    yield tracker
    tracker.reset()


@pytest.fixture
def world():
    world = dist.init_parallel_env()
    yield world
    dist.destroy_process_group()


def drawn(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def gradients_of(function, tensors):
    """Return the output of a function, and the gradients of tensors."""
    for each in tensors:
        each.grad = None
    output = function()
    (output * torch.arange(1, output.numel() + 1).reshape(output.shape)).sum().backward()
    return [output.detach(), *(each.grad for each in tensors)]


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


# ---- the same


@pytest.mark.parametrize("use_reentrant", MODES)
def test_outputs_and_gradients_are_those_of_the_function(use_reentrant):
    model, x = mlp(), drawn(3, 4)
    tensors = [x, *model.parameters()]
    expected = gradients_of(lambda: model(x), tensors)
    got = gradients_of(lambda: recompute(model, x, use_reentrant=use_reentrant), tensors)
    assert_equal(got, expected)


@pytest.mark.parametrize("use_reentrant", MODES)
def test_parameters_have_gradients_where_no_input_has(use_reentrant):
    model, x = mlp(), drawn(3, 4).detach()
    tensors = list(model.parameters())
    expected = gradients_of(lambda: model(x), tensors)
    got = gradients_of(lambda: recompute(model, x, use_reentrant=use_reentrant), tensors)
    assert_equal(got, expected)


def test_arguments_by_keyword_alone_and_nested_ones_have_their_gradients():
    x, y, z = (drawn(3, seed=each) for each in range(3))

    def function(pair, *, scale, named):
        (first, second), times = pair
        return {"out": (first * second.sin() * times, [named["z"].exp() * scale, "told"])}

    def run(call):
        out, (other, told) = call(function, ((x, y), 2), scale=y, named={"z": z})["out"]
        assert told == "told"
        return out + other

    expected = gradients_of(lambda: run(lambda f, *args, **kw: f(*args, **kw)), [x, y, z])
    assert_equal(gradients_of(lambda: run(recompute), [x, y, z]), expected)


def test_an_argument_may_have_the_name_of_a_setting_of_torch():
    def function(x, *, context_fn, debug):
        return x * context_fn + debug

    x = drawn(3)
    got = gradients_of(lambda: recompute(function, x, context_fn=2, debug=1), [x])
    assert_equal(got, gradients_of(lambda: x * 2 + 1, [x]))


def test_nothing_inside_is_kept_but_the_arguments():
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    def deep(x):
        for _ in range(8):
            x = torch.tanh(x)
        return x

    x = drawn(4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        deep(x)
        assert len(kept) == 8
        kept.clear()
        recompute(deep, x)
    assert len(kept) <= 1


def test_it_is_computed_once_where_no_gradient_is_wanted():
    runs = []

    def function(x):
        runs.append(1)
        return x.sin()

    with torch.no_grad():
        recompute(function, drawn(3))
    assert len(runs) == 1
    recompute(function, drawn(3)).sum().backward()
    assert len(runs) == 3


def test_a_graph_that_is_kept_goes_backward_twice(tracker):
    x = drawn(64)
    with tracker.rng_state("dropout"):
        F.dropout(x)
    output = recompute(lambda x: dropped(x, tracker), x)
    output.sum().backward(retain_graph=True)
    once = x.grad.clone()
    output.sum().backward()
    assert torch.equal(x.grad, 2 * once)


# ---- random numbers


def dropped(x, tracker):
    """Drop out by torch's state, by the tracker's, and by torch's again."""
    x = F.dropout(x.sin())
    with tracker.rng_state("dropout"):
        x = F.dropout(x.sin())
    return F.dropout(x.exp())


def gradient_and_after(call, tracker):
    """Return a gradient by `call`, and what is drawn after it from both states."""
    torch.manual_seed(5)
    tracker.reset()
    tracker.add("dropout", 17)
    x = drawn(256)
    y = call(lambda x: dropped(x, tracker), x)
    y = call(lambda x: dropped(x, tracker), y)
    y.sum().backward()
    with tracker.rng_state("dropout"):
        inside = torch.rand(4)
    return x.grad, torch.rand(4), inside


@pytest.mark.parametrize("use_reentrant", MODES)
def test_gradients_with_a_tracker_are_right_here_and_wrong_with_torchs_own(use_reentrant, tracker):
    def by(function):
        return lambda f, x: function(f, x, use_reentrant=use_reentrant)

    expected = gradient_and_after(lambda f, x: f(x), tracker)
    assert_equal(gradient_and_after(by(recompute), tracker), expected)
    wrong, *_ = gradient_and_after(by(checkpoint), tracker)
    assert not torch.equal(wrong, expected[0])


def test_random_numbers_differ_the_second_time_if_that_is_wanted():
    drawn_numbers = []

    def function(x):
        drawn_numbers.append(torch.rand(8))
        return x.sin()

    recompute(function, drawn(3), preserve_rng_state=False).sum().backward()
    assert not torch.equal(*drawn_numbers)


def test_states_are_as_before_when_the_second_time_fails(tracker):
    runs = []

    def function(x):
        runs.append(1)
        x = dropped(x, tracker)
        if len(runs) > 1:
            raise KeyError("the second time")
        return x.sin()

    output = recompute(function, drawn(8)).sum()
    torch.manual_seed(7)
    tracked = tracker.get_states_tracker()
    with pytest.raises(KeyError):
        output.backward()
    assert torch.initial_seed() == 7
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(tracker.get_states_tracker()["dropout"]["cpu"], tracked["dropout"]["cpu"])


# ---- segments


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_segments_have_the_outputs_and_gradients_of_the_whole(segments):
    torch.manual_seed(1)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    model, x = nn.Sequential(*layers), drawn(3, 4)
    tensors = [x, *model.parameters()]
    expected = gradients_of(lambda: model(x), tensors)
    for functions in (model, layers):
        got = gradients_of(
            lambda functions=functions: recompute_sequential({"segments": segments}, functions, x),
            tensors,
        )
        assert_equal(got, expected)


def test_segments_keep_their_inputs_alone():
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    model = nn.Sequential(*(nn.Tanh() for _ in range(16)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        recompute_sequential({"segments": 8}, model, drawn(4))
    assert len(kept) <= 7 + 2


# ---- arguments that are kept elsewhere


@pytest.mark.parametrize("partition", [True, False])
def test_hybrid_has_the_outputs_and_gradients_of_the_function(world, partition):
    x, y = drawn(3), drawn(3, seed=4)
    ctx = {"mp_group": world, "offload": True, "partition": partition}

    def function(x, number, y=None):
        return x.sin() * number * y.exp()

    expected = gradients_of(lambda: function(x, 2, y=y), [x, y])
    got = gradients_of(lambda: recompute_hybrid(ctx, function, x, 2, y=y), [x, y])
    assert_equal(got, expected)


# ---- what is refused


def test_an_output_without_a_gradient_is_refused():
    with pytest.raises(dist.UsageError, match="none of output has requires_grad=True"):
        recompute(lambda x: x.detach(), drawn(3))


def test_nothing_is_refused_where_there_is_nothing_to_gain():
    frozen = mlp().requires_grad_(False)
    assert recompute(frozen, drawn(3, 4).detach()).shape == (3, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: recompute(None, x), "needs a function"),
        (lambda x: recompute(torch.sin, x, offload_indices=[1]), "among the 1 arguments"),
        (lambda x: recompute_sequential({"segments": 3}, [torch.sin] * 2, x), "at most 2"),
        (lambda x: recompute_sequential({"segments": 0}, [torch.sin], x), "positive integer"),
        (lambda x: recompute_sequential({"segment": 1}, [torch.sin], x), "ctx is a dict"),
        (lambda x: recompute_sequential({}, [torch.sin], x, y=1), "no arguments by keyword"),
        (lambda x: recompute_hybrid({}, torch.sin, x), "ctx must contains mp_group"),
        (lambda x: recompute_hybrid({"parts": 2}, torch.sin, x), "ctx is a dict"),
    ],
)
def test_wrong_arguments_are_refused(call, words):
    with pytest.raises(dist.UsageError, match=words):
        call(drawn(3))
