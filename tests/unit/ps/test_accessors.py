"""The rules for rows: the bits of the dense optimizers, in rows that are pushed at other times."""

import ml_dtypes
import numpy as np
import pytest

import hpcdist as dist
from hpcdist.compiled import load
from hpcdist.errors import UsageError
from hpcdist.ps import RowStore, accessor_of
from hpcdist.ps.accessors import CHOICES, Corrections

compiled = load("hpcdist.ps._native")
DTYPES = ["float32", "float64", "float16", "bfloat16"]
DENSE = [
    ("sgd", dist.optim.SGD, {"learning_rate": 0.3}),
    ("sgd", dist.optim.SGD, {"weight_decay": 0.1}),
    ("momentum", dist.optim.Momentum, {"learning_rate": 0.05}),
    ("momentum", dist.optim.Momentum, {"dampening": 0.3, "weight_decay": 0.2}),
    ("momentum", dist.optim.Momentum, {"nesterov": True}),
    ("adam", dist.optim.Adam, {"learning_rate": 0.02}),
    ("adam", dist.optim.Adam, {"weight_decay": 0.3, "beta1": 0.5}),
    ("adamw", dist.optim.AdamW, {"learning_rate": 0.1}),
    ("adamw", dist.optim.AdamW, {"weight_decay": 0.0, "epsilon": 1e-4}),
]
ids_of_dense = [f"{name}-{'-'.join(options)}" for name, _, options in DENSE]


def type_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def gradients(steps, shape, dtype, seed=2):
    drawn = np.random.default_rng(seed).standard_normal((steps, *shape))
    drawn[:, 0] = 0
    return drawn.astype(dtype)


def store_of(rows, ids, optimizer, **settings):
    store = RowStore(rows.shape[1], optimizer=optimizer, dtype=rows.dtype, **settings)
    store.assign(ids, rows)
    return store


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "algorithm", "options"), DENSE, ids=ids_of_dense)
def test_rows_have_the_bits_of_a_dense_parameter(name, algorithm, options, dtype):
    dtype = type_of(dtype)
    rows = gradients(1, (7, 5), dtype, seed=1)[0]
    parameter = dist.Parameter(rows.copy())
    dense = algorithm([parameter], **options)
    ids = np.array([5, -1, 3, 2**40, 17, 0, 8])
    store = store_of(rows, ids, (name, options))
    for grads in gradients(8, rows.shape, dtype):
        parameter.grad = grads
        dense.step()
        store.push(ids, grads)
        np.testing.assert_array_equal(bits(store.pull(ids)), bits(parameter.data))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "algorithm", "options"), DENSE, ids=ids_of_dense)
def test_every_row_counts_its_own_steps(name, algorithm, options, dtype):
    dtype = type_of(dtype)
    rows = gradients(1, (6, 4), dtype, seed=1)[0]
    alone = [dist.Parameter(row.copy()) for row in rows]
    dense = [algorithm([parameter], **options) for parameter in alone]
    store = store_of(rows, np.arange(6), (name, options))
    rng = np.random.default_rng(8)
    for grads in gradients(8, rows.shape, dtype):
        pushed = np.flatnonzero(rng.random(6) < 0.5)
        store.push(pushed, grads[pushed])
        for row in pushed:
            alone[row].grad = grads[row]
            dense[row].step()
    expected = np.stack([parameter.data for parameter in alone])
    np.testing.assert_array_equal(bits(store.pull(np.arange(6))), bits(expected))


@np.errstate(over="ignore", invalid="ignore", under="ignore")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", sorted(CHOICES))
def test_both_loops_have_the_same_bits(name, dtype, monkeypatch):
    rows = gradients(1, (9, 33), dtype, seed=1)[0]
    options = {"l1": 0.5, "l2": 0.1} if name == "ftrl" else {}
    found = []
    for python in (False, True):
        if python:
            monkeypatch.setattr("hpcdist.ps.accessors._update_rows", None)
        store = store_of(rows, np.arange(9), (name, options))
        rng = np.random.default_rng(8)
        for grads in gradients(8, rows.shape, dtype):
            grads[1, :3] = 1e30, -0.0, 1e-30
            pushed = np.flatnonzero(rng.random(9) < 0.7)
            store.push(pushed, grads[pushed])
        (chunk,) = store.chunks()
        found.append(chunk)
    np.testing.assert_array_equal(bits(found[0].rows), bits(found[1].rows))
    np.testing.assert_array_equal(bits(found[0].state), bits(found[1].state))


@pytest.mark.usefixtures("loops")
def test_adagrad_is_that_of_torch():
    torch = pytest.importorskip("torch")
    rows = gradients(1, (7, 5), "float64", seed=1)[0]
    weights = torch.nn.Parameter(torch.tensor(rows))
    theirs = torch.optim.Adagrad([weights], lr=0.2, eps=1e-6)
    store = store_of(rows, np.arange(7), ("adagrad", {"learning_rate": 0.2}))
    for grads in gradients(8, rows.shape, "float64"):
        weights.grad = torch.tensor(grads)
        theirs.step()
        store.push(np.arange(7), grads)
    np.testing.assert_allclose(store.pull(np.arange(7)), weights.detach().numpy(), rtol=1e-12)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dim", [1, 7, 8, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rowwise_adagrad_has_one_number_for_a_row(dim, dtype):
    rows = gradients(1, (5, dim), "float64", seed=1)[0].astype(type_of(dtype))
    options = {"learning_rate": 0.2, "epsilon": 1e-3}
    store = store_of(rows, np.arange(5), ("rowwise_adagrad", options))
    assert store.state.width == 1 + dim * (rows.dtype.itemsize == 2)
    w, squares = rows.astype(float), np.zeros((5, 1))
    for grads in gradients(6, rows.shape, rows.dtype):
        store.push(np.arange(5), grads)
        grads = grads.astype(float)
        squares += (grads**2).mean(axis=1, keepdims=True)
        w -= 0.2 * grads / (np.sqrt(squares) + 1e-3)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    found = store.pull(np.arange(5)).astype(float)
    np.testing.assert_allclose(found, w, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")
@pytest.mark.parametrize("name", sorted(CHOICES))
def test_the_compiled_loop_refuses_a_state_that_is_too_short(name):
    choice, floats = CHOICES[name], np.ones(64, np.float32)
    where = np.array([floats.ctypes.data], np.uintp)
    width = accessor_of(name).state_width(4)
    steps = np.ones((2 if choice.counts else 0, 2))
    for short in range(2):
        arrays = np.ones((1, 4), np.float32), np.zeros(1, np.int64), where, where, 0, 4
        given = (4, choice.loop, *arrays, width - short, np.ones(8), steps, False)
        if short and width:
            with pytest.raises(ValueError, match="do not fit"):
                compiled.update_rows(*given)
        elif not short:
            assert compiled.update_rows(*given) == 0


@pytest.mark.usefixtures("loops")
def test_ftrl_is_the_published_algorithm():
    options = {"learning_rate": 0.1, "beta": 0.7, "l1": 0.4, "l2": 0.2}
    rows = gradients(1, (3, 4), "float64", seed=1)[0]
    store = store_of(rows, np.arange(3), ("ftrl", options))
    rate, beta, l1, l2 = options.values()
    w, z, n = rows.copy(), np.zeros_like(rows), np.zeros_like(rows)
    for grads in gradients(8, rows.shape, "float64"):
        sigma = (np.sqrt(n + grads**2) - np.sqrt(n)) / rate
        z += grads - sigma * w
        n += grads**2
        w = np.where(abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / rate + l2))
        store.push(np.arange(3), grads)
    np.testing.assert_allclose(store.pull(np.arange(3)), w, rtol=1e-12, atol=1e-14)
    assert (w == 0).any()


@pytest.mark.usefixtures("loops")
def test_nan_gradients_do_what_they_do_to_a_dense_parameter():
    rows = np.ones((2, 2), np.float32)
    parameter = dist.Parameter(rows.copy())
    dense = dist.optim.Adam([parameter])
    store = store_of(rows, [0, 1], "adam")
    grads = np.array([[np.nan, 1], [np.inf, -np.inf]], np.float32)
    parameter.grad = grads
    with np.errstate(invalid="ignore"):
        dense.step()
        store.push([0, 1], grads)
    np.testing.assert_array_equal(store.pull([0, 1]), parameter.data)


def test_corrections_end_where_they_are_one():
    options = {"beta1": 0.9, "beta2": 0.99}
    corrections = Corrections()
    pairs, is_open = corrections.upto(10, options)
    assert is_open
    assert len(pairs) > 10
    pairs, is_open = corrections.upto(10**6, options)
    assert not is_open
    assert (pairs[-1] == 1).all()


def test_an_optimizer_is_a_name_a_pair_a_class_or_an_instance():
    made = dist.optim.Adam([dist.Parameter(np.ones(1))], learning_rate=0.5)
    assert accessor_of("Adam").options["learning_rate"] == 1e-3
    assert accessor_of(("adam", {"learning_rate": 0.5})).options["learning_rate"] == 0.5
    assert accessor_of(dist.optim.Adam).name == "adam"
    assert accessor_of(made).options["learning_rate"] == 0.5
    assert accessor_of(accessor_of(made)).options == accessor_of(made).options


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ("lamb", "no rule for rows"),
        (dist.optim.LAMB, "no rule for rows"),
        (("adam", {"lr": 1}), "no option lr"),
        (("adam", {"beta1": 1.5}), "below 1"),
        (("ftrl", {"l1": -1}), "at least 0"),
        (("ftrl", {"learning_rate": 0}), "above 0"),
        (7, "is not an optimizer"),
    ],
    ids=str,
)
def test_optimizers_without_a_rule_for_rows_are_refused(optimizer, told):
    with pytest.raises(UsageError, match=told):
        accessor_of(optimizer)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float33", object, "bool"])
def test_rows_are_real_floats(dtype):
    with pytest.raises(UsageError, match=r"dtype|float"):
        accessor_of("sgd", dtype)
