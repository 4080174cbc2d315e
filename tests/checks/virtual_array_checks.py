"""What holds for training arrays on virtual ranks: the same bits on groups of 1, 2, 3 ... ranks."""

import tempfile
from hashlib import sha256

import numpy as np
import pytest
from checks import Checks, assert_raised, everyone, needs_jax, outcome

import hpcdist as dist

check = Checks()

STEPS, ROWS = 6, 4


class Network:
    """A layer, noise, a running mean that is no parameter, and another layer."""

    def __init__(self, dtype="f4"):
        numbers = np.random.default_rng(1)
        self.inner = dist.Parameter(numbers.normal(0, 0.4, (6, 9)).astype(dtype))
        self.outer = dist.Parameter(numbers.normal(0, 0.4, (9, 2)).astype(dtype))
        self.mean = np.zeros(9, dtype)

    def named_parameters(self):
        return [("inner", self.inner), ("outer", self.outer)]

    def named_buffers(self):
        return [("mean", self.mean)]

    def __call__(self, x, y):
        """Assign the gradients of the squared errors; return their mean."""
        hidden = np.tanh(x @ self.inner.data)
        self.mean += (hidden.mean(0) - self.mean) * self.mean.dtype.type(0.1)
        kept = (np.random.random(hidden.shape) > 0.2) * hidden - self.mean
        errors = kept @ self.outer.data - y
        slopes = (2 / errors.size) * errors
        self.outer.accumulate((kept.T @ slopes).astype(self.outer.data.dtype))
        inner = slopes @ self.outer.data.T * (1 - hidden**2)
        self.inner.accumulate((x.T @ inner).astype(self.inner.data.dtype))
        return float((errors**2).mean())


class WithJax:
    """The same with JAX, whose keys are made of the virtual rank's number."""

    def __init__(self):
        import jax

        self.jax, self.step = jax, 0
        numbers = np.random.default_rng(1)
        self.w = dist.Parameter(jax.numpy.asarray(numbers.normal(0, 0.4, (6, 2)), "float32"))

        def loss(w, x, y, key):
            noise = jax.random.normal(key, x.shape)
            return (((x + 0.1 * noise) @ w - y) ** 2).mean()

        self.slope = jax.jit(jax.value_and_grad(loss))

    def named_parameters(self):
        return [("w", self.w)]

    def train(self, part, number):
        key = self.jax.random.fold_in(self.jax.random.key(number), part.rank)
        loss, self.w.grad = self.slope(self.w.data, part.inputs, part.targets, key)
        return loss


SAMPLES = np.random.default_rng(2).normal(size=(1000, 6)).astype("f4")
GOALS = np.sin(SAMPLES[:, :2])


class Training:
    """A model on virtual ranks, its optimizer, and what it has reported."""

    def __init__(self, group, count, make=Network, optimizer="AdamW", level=None):
        self.layers = make()
        self.model = dist.DataParallel(self.layers, group=group, virtual_ranks=count)
        make_optimizer = getattr(dist.optim, optimizer)
        self.optimizer = make_optimizer(self.layers.named_parameters(), 0.02)
        self.scaler = dist.GradScaler(init_loss_scaling=1.0, incr_every_n_steps=2)
        if level is not None:
            self.model, self.optimizer, self.scaler = dist.group_sharded_parallel(
                self.model, self.optimizer, level, self.scaler
            )
        length = ROWS * count * STEPS
        self.sampler = dist.DistributedSampler(length, group=group, virtual_ranks=count)
        self.reported = []

    def batches(self):
        for indices in self.sampler.batches(ROWS * len(self.model.virtual_ranks)):
            yield SAMPLES[indices], GOALS[indices]

    def backward(self, batch, number):
        if isinstance(self.layers, WithJax):
            losses = [self.layers.train(part, number) for part in self.model.parts(batch)]
        else:
            losses = [self.model(*part.batch) for part in self.model.parts(batch)]
        self.reported.append(self.model.mean_of_parts(losses))

    def train(self, stop=STEPS, *, accumulating=False):
        for number, batch in enumerate(self.batches()):
            if accumulating and number % 3 == 0:
                with self.model.no_sync():
                    self.backward(batch, number)
                continue
            self.backward(batch, number)
            if accumulating and number % 3 == 1:
                continue
            if not accumulating:
                self.scaler.unscale_(self.optimizer)
                self.reported.append(dist.clip_grad_norm_(self.model, 0.5))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.clear_grad()
            if number + 1 == stop:
                return

    def state(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "sampler", "scaler")}

    def digest(self):
        found = sha256(np.array(self.reported).tobytes())
        for name, value in sorted(self.model.state_dict().items()):
            found.update(name.encode() + np.asarray(value).tobytes())
        return found.hexdigest()[:16]


def on_groups(run):
    """Return what `run` gives on groups of the first 1, 2, 3 ... ranks, in every rank's words."""
    found = []
    for size in range(1, dist.get_world_size() + 1):
        group = dist.new_group(range(size))
        found.append(run(group) if group.is_member() else None)
    return [each for rank in everyone(found) for each in rank if each is not None]


def trained(group, count, *what, **how):
    training = Training(group, count, *what)
    training.train(**how)
    return training.digest()


def assert_equal(told):
    assert all(each == told[0] for each in told), told


@check
def training_has_the_same_bits_on_any_number_of_ranks():
    for count in (dist.get_world_size(), 2 * dist.get_world_size() + 1):
        assert_equal(on_groups(lambda group, count=count: trained(group, count)))


@check
def accumulated_gradients_have_the_same_bits_on_any_number_of_ranks():
    count = dist.get_world_size() + 1
    assert_equal(on_groups(lambda group: trained(group, count, accumulating=True)))


@check
def sixteen_bits_are_added_in_thirty_two():
    count = dist.get_world_size() + 2

    def mean(group):
        w = dist.Parameter(np.zeros(3, np.float16))
        model = dist.DataParallel(Holder(w), group=group, virtual_ranks=count)
        for part in model.parts():
            w.grad = np.full(3, 2049 if part.rank == 0 else 1, np.float16)
        return w.grad.tolist()

    told = on_groups(mean)
    assert_equal(told)
    exact = np.float16(np.float32(2048 + count - 1) / np.float32(count))  # 2049 is 2048 in 16 bits
    assert told[0] == [exact] * 3


class Holder:
    """A model of one parameter."""

    def __init__(self, w):
        self.w = w

    def named_parameters(self):
        return [("w", self.w)]


@check.needing(needs_jax)
def jax_has_the_same_bits_on_any_number_of_ranks():
    count = dist.get_world_size() + 1
    assert_equal(on_groups(lambda group: trained(group, count, WithJax)))


@check
def all_levels_of_sharding_have_the_same_bits_on_any_number_of_ranks():
    count = dist.get_world_size() + 1
    assert_equal(at_all_levels(count, Network, "AdamW"))


@check.needing(pytest.mark.thorough)
def all_levels_of_sharding_have_the_same_bits_with_every_kind_of_optimizer():
    count = dist.get_world_size()
    for optimizer in ("Momentum", "LAMB", "LARS", "Adam"):
        assert_equal(at_all_levels(count, Network, optimizer))
    assert_equal(at_all_levels(count, lambda: Network("f2"), "AdamW"))
    assert_equal(at_all_levels(count, Network, "LAMB", accumulating=True))


@check.needing(needs_jax, pytest.mark.thorough)
def sharded_arrays_of_jax_have_the_same_bits_on_any_number_of_ranks():
    count = dist.get_world_size() + 1
    assert_equal(at_all_levels(count, WithJax, "AdamW"))


def at_all_levels(count, make, optimizer, **how):
    told = []
    for level in (None, "os", "os_g"):
        what = count, make, optimizer, level
        told += on_groups(lambda group, what=what: trained(group, *what, **how))
    return told


@check
def each_rank_keeps_its_share_of_what_is_sharded():
    size = dist.get_world_size()
    for level, gradients in (("os", 2 * size), ("os_g", 2)):
        layers = Several(2 * size)
        model = dist.DataParallel(layers, virtual_ranks=size + 1)
        optimizer = dist.optim.AdamW(layers.named_parameters(), 0.1)
        model, optimizer, _ = dist.group_sharded_parallel(model, optimizer, level)
        for _ in model.parts():
            for each in layers.arrays:
                each.grad = np.ones(8)
        optimizer.step()
        slices = [
            each
            for each in optimizer.sharded_state_dict().values()
            if hasattr(each, "global_shape")
        ]
        assert sum(each.data.nbytes for each in slices) == 2 * 2 * 64  # two states of two arrays
        assert sum(each.grad is not None for each in layers.arrays) == gradients


class Several:
    """A model of equal parameters."""

    def __init__(self, count):
        self.arrays = [dist.Parameter(np.ones(8)) for _ in range(count)]

    def named_parameters(self):
        return [(f"w{number}", each) for number, each in enumerate(self.arrays)]


@check
def the_state_of_a_sharded_optimizer_is_that_of_a_whole_one():
    size = dist.get_world_size()
    states = []
    for level in (None, "os", "os_g"):
        training = Training(dist.new_group(range(size)), size, Network, "AdamW", level)
        training.train(stop=2)
        states.append(training.optimizer.state_dict())
        training.optimizer.load_state_dict(states[0])
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(np.array_equal(state[name], states[0][name]) for name in state)


def goes_on_from_a_checkpoint(level):
    size = dist.get_world_size()
    count, path = size + 1, everyone(tempfile.mkdtemp())[0]
    what = count, Network, "AdamW", level
    group = dist.new_group(range(size))
    halted = Training(group, *what)
    halted.train(stop=3)
    dist.checkpoint.save(halted.state(), path, group)

    def resumed(group):
        training = Training(group, *what)
        dist.checkpoint.load(training.state(), path, group)
        training.reported = list(halted.reported)
        training.train()
        return training.digest()

    assert_equal([*everyone(trained(group, count)), *on_groups(resumed)])


@check
def a_checkpoint_goes_on_with_the_same_bits_on_any_number_of_ranks():
    goes_on_from_a_checkpoint(None)


@check
def a_sharded_checkpoint_goes_on_with_the_same_bits_on_any_number_of_ranks():
    for level in ("os", "os_g"):
        goes_on_from_a_checkpoint(level)


@check
def the_mean_of_infinite_gradients_stops_the_scaler_everywhere():
    size = dist.get_world_size()
    w = dist.Parameter(np.zeros(2, np.float32))
    model = dist.DataParallel(Holder(w), virtual_ranks=size + 1)
    optimizer, scaler = dist.optim.SGD([w], 0.1), dist.GradScaler(init_loss_scaling=8.0)
    for part in model.parts():
        w.grad = np.full(2, np.inf if part.rank == size else 1, np.float32)
    assert not scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@check
def a_virtual_rank_without_a_gradient_is_told_of_on_all_ranks():
    size = dist.get_world_size()
    w = dist.Parameter(np.zeros(2))
    model = dist.DataParallel(Holder(w), virtual_ranks=size)

    def step():
        for part in model.parts():
            if part.rank < size - 1:
                w.grad = np.ones(2)

    assert_raised(outcome(step), "UsageError", f"virtual rank {size - 1} has no", [size - 1])
    assert w.grad is None
