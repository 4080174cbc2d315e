"""What holds on any number of ranks: how such checks are written, and models to train in them.

A check is a function that every rank runs, on the ranks of an MPI job and on simulated ones.
"""

import functools
from importlib.util import find_spec

import numpy as np
import pytest

import hpcdist as dist

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")


class Checks(list):
    """Parameters for ``pytest.mark.parametrize``, collected by a decorator."""

    def __call__(self, function):
        return self.needing()(function)

    def needing(self, *marks):
        def keep(function):
            self.append(pytest.param(function, id=function.__name__, marks=marks))
            return function

        return keep


def combined(first, second, third):
    """Return all combinations as parameters, of which a third or fewer meet all pairs of values.

    The others are left to `make test-all`, on two ranks.
    """
    others = (pytest.mark.thorough, pytest.mark.two_ranks)
    return [
        pytest.param(one, two, three, marks=() if (i + j) % len(third) == k else others)
        for i, one in enumerate(first)
        for j, two in enumerate(second)
        for k, three in enumerate(third)
    ]


def with_rpc(function=None, **options):
    """Let a check run between `init_rpc` and `shutdown`."""
    if function is None:
        return functools.partial(with_rpc, **options)

    @functools.wraps(function)
    def run():
        dist.init_parallel_env()
        dist.rpc.init_rpc(**options)
        try:
            function()
        finally:
            dist.rpc.shutdown()

    return run


# ---- models, optimizers, data


class Mlp:
    """Two layers with a tanh between them; `backward` assigns the gradients, last layer first."""

    def __init__(self, seed=0, dtype="f8", hidden=7):
        random = np.random.default_rng(seed)

        def parameter(*shape):
            return dist.Parameter(random.normal(0, 0.4, shape).astype(dtype))

        self.w1, self.b1 = parameter(5, hidden), parameter(hidden)
        self.w2, self.b2 = parameter(hidden, 3), parameter(3)

    def named_parameters(self):
        return [(name, getattr(self, name)) for name in ("w1", "b1", "w2", "b2")]

    def __call__(self, x):
        self.x, self.h = x, np.tanh(x @ self.w1.data + self.b1.data)
        return self.h @ self.w2.data + self.b2.data

    def backward(self, slope, put=lambda parameter, gradient: parameter.accumulate(gradient)):
        put(self.b2, slope.sum(0))
        put(self.w2, self.h.T @ slope)
        behind = (slope @ self.w2.data.T) * (1 - self.h**2)
        put(self.b1, behind.sum(0))
        put(self.w1, self.x.T @ behind)


class Vectors:
    """Some parameters of three numbers, and maybe a buffer; its gradients are up to the check."""

    def __init__(self, *names, value=0.0, buffer=None):
        self.all = {name: dist.Parameter(np.full(3, value)) for name in names}
        self.buffer = buffer

    def named_parameters(self):
        return list(self.all.items())

    def named_buffers(self):
        return [] if self.buffer is None else [("running_mean", self.buffer)]

    def __call__(self, x=None):
        return x

    def give(self, value, *names):
        for name in names or reversed(self.all):
            self.all[name].accumulate(np.full(3, float(value)))

    def grads(self):
        gradients = [parameter.grad for parameter in self.all.values()]
        return [None if gradient is None else float(gradient[0]) for gradient in gradients]


def sgd(state, p, gradient):
    p.data -= 0.1 * gradient


def momentum(state, p, gradient):
    speed = state["v"] = 0.9 * state.get("v", 0) + gradient
    p.data -= 0.05 * speed


def adam(state, p, gradient, decay=0.0):
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    p.data *= 1 - 0.01 * decay
    p.data -= 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def adamw(state, p, gradient):
    adam(state, p, gradient, decay=0.1)


def batches(count, rows, seed=1):
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield random.normal(size=(rows, 5)), random.normal(size=(rows, 3))


def step(model, layers, x, y):
    """Do a forward and a backward pass; return the mean loss."""
    error = model(x) - y
    layers.backward(2 * error / error.size)
    return (error**2).mean()


def train(model, layers, optimizer, data):
    """Train and return the losses."""
    states = {name: {} for name, _ in layers.named_parameters()}
    losses = []
    for x, y in data:
        losses.append(step(model, layers, x, y))
        for name, p in layers.named_parameters():
            optimizer(states[name], p, p.grad)
            p.grad = None
    return losses


def values(layers):
    return {name: p.data.copy() for name, p in layers.named_parameters()}


ROUNDED = 2**20 * np.finfo("f8").eps
"""What a million roundings make of 1 in float64: more than two orders of the same sums can differ
by, whatever the processor, and less than any other difference does."""


def assert_close(found, expected, rtol=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=1e-13)


def share(data):
    """Give this rank's rows of every batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [(x[rank::size], y[rank::size]) for x, y in data]


def mean_of(value):
    total = np.array([float(value)])
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total[0]


def everyone(obj):
    gathered = []
    dist.all_gather_object(gathered, obj)
    return gathered


def outcome(function):
    """Return what every rank raised, as pairs of name and message, the same list everywhere."""
    try:
        function()
    except dist.HpcdistError as error:
        return everyone((type(error).__name__, str(error)))
    return everyone(("nothing", ""))


def assert_raised(told, own, words, ranks=None):
    """Check that `ranks` (default: all) raised `own` and the others a RemoteError, with `words`."""
    ranks = range(len(told)) if ranks is None else ranks
    for rank, (kind, message) in enumerate(told):
        assert kind == (own if rank in ranks else "RemoteError"), (rank, kind, message)
        for word in words if isinstance(words, (list, tuple)) else [words]:
            assert word in message, message


def assert_trains(model, layers):
    """Check that a backward pass in which all ranks take part averages."""
    n = dist.get_world_size()
    model.zero_grad()
    model()
    layers.give(dist.get_rank() + 1)
    assert layers.grads() == [(n + 1) / 2] * len(layers.all)
    model.zero_grad()
