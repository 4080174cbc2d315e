"""What holds for sharded training of plain arrays, on any number of ranks and at every level."""

import math
from threading import get_ident

import numpy as np
import pytest
from checks import (
    Checks,
    Mlp,
    Vectors,
    assert_close,
    assert_raised,
    batches,
    everyone,
    mean_of,
    needs_jax,
    outcome,
    share,
    step,
    values,
)

import hpcdist as dist
from benchmarks.held import held_nbytes
from hpcdist import optim

check = Checks()

LEVELS = "os", "os_g", "p_g_os"
OPTIMIZERS = {
    "SGD": lambda named: optim.SGD(named, 0.1, weight_decay=0.01),
    "Momentum": lambda named: optim.Momentum(named, 0.05, nesterov=True),
    "Adam": lambda named: optim.Adam(named, 0.01),
    "AdamW": lambda named: optim.AdamW(named, 0.01, weight_decay=0.1),
    "LAMB": lambda named: optim.LAMB(named, 0.01),
    "LARS": lambda named: optim.LARS(named, 1.0, lars_coeff=0.02, weight_decay=0.1),
}


def sharded(layers, make, level, **options):
    """Shard a model in small units: some parameters share one, some do not."""
    options = {"buffer_max_size": 200, "segment_size": 100, **options}
    optimizer = make(layers.named_parameters())
    model, optimizer, _ = dist.group_sharded_parallel(layers, optimizer, level, **options)
    return model, optimizer


def train(model, layers, optimizer, data, accumulate=1):
    """Train and return the losses; every `accumulate` batches the optimizer steps."""
    losses = []
    for number, (x, y) in enumerate(data, 1):
        losses.append(step(model, layers, x, y))
        if number % accumulate == 0:
            optimizer.step()
            optimizer.clear_grad()
    return losses


class Stack:
    """Linear layers of one width without a nonlinearity: its layers have names with a dot."""

    def __init__(self, width, depth, dtype="f4", seed=0):
        random = np.random.default_rng(seed)
        self.weights = [
            dist.Parameter((random.normal(size=(width, width)) / width**0.5).astype(dtype))
            for _ in range(depth)
        ]

    def named_parameters(self):
        return [(f"layers.{n}.weight", weight) for n, weight in enumerate(self.weights)]

    def __call__(self, x):
        self.inputs = []
        for weight in self.weights:
            self.inputs.append(x)
            x = x @ weight.data
        return x

    def backward(self, slope):
        for weight, x in zip(reversed(self.weights), reversed(self.inputs), strict=True):
            behind = slope @ weight.data.T
            weight.grad = x.T @ slope
            slope = behind


# ---- training equals that of one process


@check
def every_optimizer_at_every_level_trains_as_one_process_does():
    size = dist.get_world_size()
    data = list(batches(4, 4 * size))
    for name, make in OPTIMIZERS.items():
        alone = Mlp(seed=0)
        expected = train(alone, alone, make(alone.named_parameters()), data)
        for level in LEVELS:
            layers = Mlp(seed=dist.get_rank())
            model, optimizer = sharded(layers, make, level)
            losses = [mean_of(loss) for loss in train(model, layers, optimizer, share(data))]
            np.testing.assert_allclose(losses, expected, rtol=1e-9, err_msg=f"{name} {level}")
            assert_close(model.state_dict(), values(alone), rtol=1e-8)


@check
def the_size_of_units_changes_nothing():
    data = list(batches(3, 4 * dist.get_world_size()))
    alone = Mlp(seed=0)
    train(alone, alone, OPTIMIZERS["Adam"](alone.named_parameters()), data)
    for level in LEVELS:
        for size in (0, 1 << 30):
            layers = Mlp(seed=0)
            limits = {"buffer_max_size": size, "segment_size": size}
            model, optimizer = sharded(layers, OPTIMIZERS["Adam"], level, **limits)
            train(model, layers, optimizer, share(data))
            assert_close(model.state_dict(), values(alone), rtol=1e-8)


@check
def gradients_of_several_backward_passes_add_up():
    data = list(batches(6, 4 * dist.get_world_size()))
    alone = Mlp(seed=0)
    train(alone, alone, OPTIMIZERS["Adam"](alone.named_parameters()), data, accumulate=3)
    for level in LEVELS:
        for quiet in (True, False):
            layers = Mlp(seed=0)
            model, optimizer = sharded(layers, OPTIMIZERS["Adam"], level)
            for first in (0, 3):
                mine = share(data)[first : first + 3]
                for x, y in mine[:-1]:
                    if quiet:
                        with model.no_sync():
                            step(model, layers, x, y)
                    else:
                        step(model, layers, x, y)
                step(model, layers, *mine[-1])
                optimizer.step()
            assert_close(model.state_dict(), values(alone), rtol=1e-8)


@check
def sixteen_bits_train_like_data_parallel_with_master_weights():
    data = [(x.astype("f2"), y.astype("f2")) for x, y in batches(6, 4 * dist.get_world_size())]
    for name in ("Momentum", "AdamW", "LAMB"):
        together = Mlp(seed=0, dtype="f2")
        model = dist.DataParallel(together)
        expected = OPTIMIZERS[name](together.named_parameters())
        train(model, together, expected, share(data))
        masters = {key: value for key, value in expected.state_dict().items() if "master" in key}
        assert {value.dtype for value in masters.values()} == {np.dtype("f4")}
        for level in LEVELS:
            layers = Mlp(seed=0, dtype="f2")
            model, optimizer = sharded(layers, OPTIMIZERS[name], level)
            train(model, layers, optimizer, share(data))
            found = optimizer.state_dict()
            for key, value in masters.items():
                np.testing.assert_allclose(found[key], value, rtol=2e-3, atol=2e-4, err_msg=key)
            for key, value in model.state_dict().items():
                np.testing.assert_array_equal(value, found[f"{key}.master"].astype("f2"))


@check
def complex_parameters_are_trained_as_pairs_of_real_ones():
    for name in ("Momentum", "Adam", "LAMB"):
        for level in LEVELS:
            alone, layers = (Vectors("a", "b", value=1 + 2j) for _ in range(2))
            expected = OPTIMIZERS[name](alone.named_parameters())
            model, optimizer = sharded(layers, OPTIMIZERS[name], level, segment_size=0)
            for turn in range(3):
                for layer in (alone, layers):
                    for p in reversed(layer.all.values()):
                        p.grad = np.array([1, 2j, turn + 1j])
                expected.step()
                optimizer.step()
            assert_close(model.state_dict(), values(alone))
            found, right = optimizer.state_dict(), expected.state_dict()
            assert found.keys() == right.keys()
            for key, value in right.items():
                np.testing.assert_allclose(found[key], value, rtol=1e-12)


@check.needing(needs_jax)
def arrays_of_jax_are_trained_too():
    import jax.numpy as jnp

    for level in LEVELS:
        layers = Vectors("a", "b")
        for name in layers.all:
            layers.all[name] = dist.Parameter(jnp.arange(3.0))
        model, optimizer = sharded(layers, OPTIMIZERS["SGD"], level)
        for _ in range(2):
            model()
            for p in reversed(layers.all.values()):
                p.grad = jnp.ones(3)
            optimizer.step()
        expected = np.arange(3.0)
        for _ in range(2):
            expected = expected - 0.1 * (1 + 0.01 * expected)
        for p in layers.all.values():
            assert type(p.data).__module__.startswith("jax")
            np.testing.assert_allclose(p.data, expected, rtol=1e-5)


@check
def groups_of_parameters_keep_their_options():
    data = list(batches(4, 4 * dist.get_world_size()))

    def make(named):
        named = dict(named)
        return optim.AdamW(
            [
                {"params": [("w1", named["w1"]), ("w2", named["w2"])], "weight_decay": 0.5},
                {"params": [("b1", named["b1"]), ("b2", named["b2"])], "learning_rate": 0.1},
            ],
            learning_rate=0.01,
        )

    alone = Mlp(seed=0)
    train(alone, alone, make(alone.named_parameters()), data)
    for level in LEVELS:
        layers = Mlp(seed=0)
        model, optimizer = sharded(layers, make, level)
        train(model, layers, optimizer, share(data))
        assert_close(model.state_dict(), values(alone), rtol=1e-8)


@check
def replicas_of_a_sharded_model_train_together():
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % 2:
        return
    rows = [dist.new_group(range(first, first + size // 2)) for first in (0, size // 2)]
    columns = [dist.new_group([first, first + size // 2]) for first in range(size // 2)]
    own = {"group": rows[rank // (size // 2)], "dp_group": columns[rank % (size // 2)]}
    data = list(batches(4, 4 * size))
    alone = Mlp(seed=0)
    expected = train(alone, alone, OPTIMIZERS["LAMB"](alone.named_parameters()), data)
    for level in LEVELS:
        layers = Mlp(seed=rank)
        model, optimizer = sharded(layers, OPTIMIZERS["LAMB"], level, **own)
        losses = [mean_of(loss) for loss in train(model, layers, optimizer, share(data))]
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert_close(model.state_dict(), values(alone), rtol=1e-8)
    for group in (*rows, *columns):
        dist.destroy_process_group(group)


@check
def excluded_layers_and_offload_change_no_number():
    data = list(batches(3, 4 * dist.get_world_size()))
    alone = Mlp(seed=0)
    train(alone, alone, OPTIMIZERS["Adam"](alone.named_parameters()), data)
    for options in ({"exclude_layer": ["w1", "b2"]}, {"offload": True}, {"sync_comm": True}):
        layers = Mlp(seed=0)
        model, optimizer = sharded(layers, OPTIMIZERS["Adam"], "p_g_os", **options)
        if "exclude_layer" in options:
            assert layers.w1.data is layers.w1.data
            assert layers.w1.data.flags.writeable
            assert not layers.w2.data.flags.writeable
        train(model, layers, optimizer, share(data))
        assert_close(model.state_dict(), values(alone), rtol=1e-8)


# ---- what travels, and what is held


class Volume:
    """Counts elements as the ZeRO paper does: an all_reduce of x elements moves 2x.

    Operations begin on the thread that calls them, so simulated ranks hear of their own only.
    """

    def __init__(self, itemsize):
        self.elements, self._itemsize, self._thread = 0, itemsize, get_ident()

    def __call__(self, event):
        if event.phase == "begin" and get_ident() == self._thread:
            weight = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": dist.get_world_size()}
            self.elements += weight.get(event.name, 0) * event.nbytes // self._itemsize


@check
def a_step_moves_exactly_what_the_paper_says():
    width, depth = 24, 5
    psi = width * width * depth
    x = np.ones((2, width), "f4")
    for level, factor in (("os", 2), ("os_g", 2), ("p_g_os", 3)):
        layers = Stack(width, depth)
        model, optimizer = sharded(
            layers, OPTIMIZERS["Adam"], level, buffer_max_size=5000, segment_size=0
        )
        for turn in range(6):  # also once the ranks have learned what to gather ahead
            volume = Volume(4)
            stop = dist.subscribe(volume)
            layers.backward(model(x))
            optimizer.step()
            stop()
            assert volume.elements == factor * psi, (level, turn)


@check
def a_rank_holds_what_the_paper_says():
    size = dist.get_world_size()
    width, depth = 64, 8
    psi, k = width * width * depth, 12
    x = np.ones((1, width), "f2")
    formulas = {
        "os": 4 * psi + k * psi / size,
        "os_g": 2 * psi + (2 + k) * psi / size,
        "p_g_os": (4 + k) * psi / size,
    }
    for level, formula in formulas.items():
        layers = Stack(width, depth, "f2")
        model, optimizer = sharded(layers, OPTIMIZERS["Adam"], level)
        layers.backward(model(x))
        optimizer.step()
        layers.inputs.clear()
        found = held_nbytes(model, optimizer)
        assert abs(found / formula - 1) < 0.05, (level, found, formula)


@check
def gathered_parameters_are_given_back():
    width, depth = 16, 6
    layers = Stack(width, depth)
    model, _ = sharded(layers, OPTIMIZERS["SGD"], "p_g_os", segment_size=0)
    gathered = model._engine.gathered
    model(np.ones((1, width), "f4"))
    assert not gathered._shown
    layers.backward(np.ones((1, width), "f4"))
    assert not gathered._shown
    assert layers.weights[0].shape == (width, width)
    assert not gathered._shown  # the shape alone gathers nothing
    assert gathered.gathers == 2 * depth


# ---- gradients


@check
def the_norm_of_gradients_is_that_of_the_whole_model():
    size = dist.get_world_size()
    x, y = next(batches(1, 4 * size))
    alone = Mlp(seed=0)
    step(alone, alone, x, y)
    for norm_type in (1.0, 2.0, math.inf):
        norm = dist.clip_grad_norm_(alone, math.inf, norm_type)
        flat = np.concatenate([p.grad.reshape(-1) for _, p in alone.named_parameters()])
        np.testing.assert_allclose(norm, np.linalg.norm(flat, norm_type), rtol=1e-12)
        for level in LEVELS:
            layers = Mlp(seed=0)
            model, optimizer = sharded(layers, OPTIMIZERS["SGD"], level)
            for target in (model, optimizer, layers.named_parameters()):
                step(model, layers, *share([(x, y)])[0])
                if isinstance(target, list):
                    target = [p for _, p in target]
                found = dist.clip_grad_norm_(target, math.inf, norm_type)
                np.testing.assert_allclose(found, norm, rtol=1e-9)
                optimizer.clear_grad()


@check
def clipped_gradients_train_as_in_one_process():
    data = list(batches(3, 4 * dist.get_world_size()))
    alone = Mlp(seed=0)
    expected = OPTIMIZERS["SGD"](alone.named_parameters())
    for x, y in data:
        step(alone, alone, x, y)
        assert dist.clip_grad_norm_(alone, 0.05) > 0.05
        expected.step()
        expected.clear_grad()
    for level in LEVELS:
        layers = Mlp(seed=0)
        model, optimizer = sharded(layers, OPTIMIZERS["SGD"], level)
        for x, y in share(data):
            step(model, layers, x, y)
            dist.clip_grad_norm_(model, 0.05)
            optimizer.step()
        assert_close(model.state_dict(), values(alone), rtol=1e-8)


@check
def all_ranks_skip_a_step_in_which_one_has_an_infinite_gradient():
    rank, size = dist.get_rank(), dist.get_world_size()
    for level in LEVELS:
        layers = Vectors("a", "b", "c", value=1.0)
        optimizer = OPTIMIZERS["SGD"](layers.named_parameters())
        model, optimizer, scaler = dist.group_sharded_parallel(
            layers, optimizer, level, dist.GradScaler(init_loss_scaling=4.0, incr_every_n_steps=1)
        )
        before = model.state_dict()
        layers.give(math.inf if rank == size - 1 else 1, "c", "b", "a")
        assert not scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2
        assert_close(model.state_dict(), before)
        layers.give(scaler.scale(1.0))
        assert scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4
        expected = np.full(3, 1 - 0.1 * (1 + 0.01))
        assert_close(model.state_dict(), dict.fromkeys("abc", expected))


# ---- states


@check
def a_state_goes_from_any_level_to_any_other_and_to_none():
    data = list(batches(4, 4 * dist.get_world_size()))
    alone = Mlp(seed=0)
    expected = OPTIMIZERS["Adam"](alone.named_parameters())
    train(alone, alone, expected, data)
    for old in LEVELS:
        layers = Mlp(seed=0)
        model, optimizer = sharded(layers, OPTIMIZERS["Adam"], old)
        train(model, layers, optimizer, share(data)[:2])
        weights, state = model.state_dict(), optimizer.state_dict()
        for new in LEVELS:
            layers = Mlp(seed=1)
            model, optimizer = sharded(layers, OPTIMIZERS["Adam"], new, buffer_max_size=0)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            train(model, layers, optimizer, share(data)[2:])
            assert_close(model.state_dict(), values(alone), rtol=1e-8)
        layers = Mlp(seed=1)
        for name, p in layers.named_parameters():
            p.data[...] = weights[name]
        optimizer = OPTIMIZERS["Adam"](layers.named_parameters())
        optimizer.load_state_dict(state)
        train(layers, layers, optimizer, data[2:])
        assert_close(values(layers), values(alone), rtol=1e-8)


@check
def shards_cover_every_array_once():
    for level in LEVELS:
        layers = Mlp(seed=0)
        model, optimizer = sharded(layers, OPTIMIZERS["Adam"], level)
        step(model, layers, *next(batches(1, 4)))
        optimizer.step()
        for whole, parts in (
            (model.state_dict(), model.sharded_state_dict()),
            (optimizer.state_dict(), optimizer.sharded_state_dict()),
        ):
            found = {name: np.full(np.shape(value), np.nan) for name, value in whole.items()}
            for state in everyone(parts):
                for name, part in state.items():
                    if hasattr(part, "offset"):
                        target = found[name].reshape(-1)[part.offset :][: part.data.size]
                        assert np.isnan(target).all()
                        target[...] = part.data
                    else:
                        found[name][...] = part
            assert_close(found, whole)


@check
def shards_load_again():
    for level in LEVELS:
        data = share(batches(3, 4 * dist.get_world_size()))
        layers = Mlp(seed=0, dtype="f2")
        model, optimizer = sharded(layers, OPTIMIZERS["Adam"], level)
        data = [(x.astype("f2"), y.astype("f2")) for x, y in data]
        train(model, layers, optimizer, data)
        expected = model.state_dict()
        copies = [
            {k: v._replace(data=v.data.copy()) if hasattr(v, "offset") else v for k, v in s.items()}
            for s in (model.sharded_state_dict(), optimizer.sharded_state_dict())
        ]
        train(model, layers, optimizer, data)
        model.load_sharded_state_dict(copies[0])
        optimizer.load_sharded_state_dict(copies[1])
        assert_close(model.state_dict(), expected)
        assert optimizer.state_dict()["w1.step"] == 3


@check
def weights_that_are_loaded_become_master_weights():
    layers = Mlp(seed=0, dtype="f2")
    model, optimizer = sharded(layers, OPTIMIZERS["SGD"], "os_g")
    model.load_state_dict({name: np.ones_like(each) for name, each in model.state_dict().items()})
    assert (optimizer.state_dict()["w1.master"] == 1).all()


@check
def master_weights_that_are_loaded_with_the_weights_keep_their_digits():
    data = [(x.astype("f2"), y.astype("f2")) for x, y in batches(2, 4 * dist.get_world_size())]
    for level in LEVELS:
        layers = Mlp(seed=0, dtype="f2")
        model, optimizer = sharded(layers, OPTIMIZERS["AdamW"], level)
        train(model, layers, optimizer, share(data))
        again, stepped = sharded(Mlp(seed=1, dtype="f2"), OPTIMIZERS["AdamW"], level)
        state = stepped.sharded_state_dict()
        for name, part in optimizer.sharded_state_dict().items():
            if hasattr(part, "offset"):
                state[name].data[...] = part.data  # as a checkpoint is loaded: in place
            else:
                state[name] = part
        again.load_sharded_state_dict(model.sharded_state_dict())
        stepped.load_sharded_state_dict(state)
        expected, found = optimizer.state_dict(), stepped.state_dict()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


# ---- models


@check
def buffers_follow_the_first_rank_if_asked_to():
    layers = Vectors("a", buffer=np.zeros(2))
    model, optimizer = sharded(layers, OPTIMIZERS["SGD"], "os_g", sync_buffers=True)
    layers.buffer = np.full(2, 10.0 + dist.get_rank())
    model()
    layers.give(1)
    assert layers.buffer[0] == 10
    assert model.state_dict()["running_mean"][0] == 10
    optimizer.step()


@check
def everything_else_falls_through_to_the_layers():
    layers = Vectors("a")
    layers.depth = 7
    model, optimizer = sharded(layers, OPTIMIZERS["SGD"], "p_g_os")
    assert (model.depth, model.level, model(5)) == (7, "p_g_os", 5)
    assert "SGD" in repr(optimizer)
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == optimizer.param_groups[0]["learning_rate"] == 0.25


# ---- errors


@check
def wrong_arguments_are_refused():
    layers = Vectors("a", "b")
    optimizer = OPTIMIZERS["SGD"](layers.named_parameters())
    for level in ("p_g", "OS", None):
        with pytest.raises(dist.UsageError, match="The level must be os, os_g or p_g_os"):
            dist.group_sharded_parallel(layers, optimizer, level)
    with pytest.raises(dist.UsageError, match="buffer_max_size must be a number of bytes"):
        dist.group_sharded_parallel(layers, optimizer, "os", buffer_max_size=-1)
    with pytest.raises(dist.UsageError, match="exclude_layer must be a list"):
        dist.group_sharded_parallel(layers, optimizer, "os", exclude_layer="a")
    with pytest.raises(dist.UsageError, match="'c', which is not the name of a layer"):
        dist.group_sharded_parallel(layers, optimizer, "p_g_os", exclude_layer=["c"])
    with pytest.raises(dist.UsageError, match=r"neither a torch\.nn\.Module nor an object"):
        dist.group_sharded_parallel(3, optimizer, "os")


@check
def a_wrong_optimizer_on_one_rank_reaches_all():
    layers, other = Vectors("a", "b"), Vectors("a", "b")
    last = dist.get_world_size() - 1
    mine = other if dist.get_rank() == last else layers
    optimizer = OPTIMIZERS["SGD"](mine.named_parameters())
    told = outcome(lambda: dist.group_sharded_parallel(layers, optimizer, "os"))
    assert_raised(told, "UsageError", "exactly the 2 parameters of the model", [last])


@check
def a_missing_gradient_on_one_rank_reaches_all():
    last = dist.get_world_size() - 1
    for level in LEVELS:
        layers = Vectors("a", "b", "c")
        model, optimizer = sharded(layers, OPTIMIZERS["SGD"], level, segment_size=0)

        def broken(model=model, layers=layers):
            model()
            layers.give(1, *("c", "a") if dist.get_rank() == last else ("c", "b", "a"))
            model.synchronize()

        assert_raised(outcome(broken), "UsageError", "without a gradient for parameter 'b'", [last])
        layers.give(1)
        optimizer.step()


@check
def a_step_without_gradients_is_refused():
    layers = Vectors("a")
    _, optimizer = sharded(layers, OPTIMIZERS["SGD"], "os")
    with pytest.raises(dist.UsageError, match="there are no gradients"):
        optimizer.step()


@check
def lent_parameters_cannot_be_assigned():
    layers = Vectors("a")
    sharded(layers, OPTIMIZERS["SGD"], "p_g_os")
    with pytest.raises(dist.UsageError, match="no rank holds all of it"):
        layers.all["a"].data = np.ones(3)
    with pytest.raises(ValueError, match="read-only"):
        layers.all["a"].data[...] = 1
