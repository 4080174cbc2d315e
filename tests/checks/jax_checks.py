"""What holds for the verbs on JAX arrays, on any number of ranks."""

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from checks import Checks, assert_raised, everyone, outcome

import hpcdist as dist

if find_spec("jax") is not None:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.test_util import check_grads

    import hpcdist.jax as hj
    from hpcdist.jax import handler

check = Checks()
Op = dist.ReduceOp


@pytest.fixture(params=["compiled", pytest.param("called back", marks=pytest.mark.thorough)])
def way(request, monkeypatch):
    """How XLA begins an operation: by the compiled handler, or by io_callback."""
    if request.param == "compiled" and not handler.IS_THERE:
        pytest.skip("no compiled handler")
    monkeypatch.setattr(handler, "IS_THERE", request.param == "compiled")
    return request.param


def place():
    """Return rank, number of ranks, the rank before and the rank behind."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank - 1) % n, (rank + 1) % n


def of_rank(rank, *shape):
    return np.random.default_rng(rank).normal(size=shape).astype("f4")


def of_all(*shape):
    return np.stack([of_rank(rank, *shape) for rank in range(dist.get_world_size())])


def last():
    return dist.get_world_size() - 1


def verbs():
    """Return functions of an array (n, 2), and what they make of those of all ranks, (n, n, 2)."""
    rank, n, before, behind = place()
    here = rank == last()
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return {
        "all_reduce": (hj.all_reduce, lambda xs: xs.sum(0)),
        "average": (partial(hj.all_reduce, op=Op.AVG), lambda xs: xs.mean(0)),
        "max": (partial(hj.all_reduce, op=Op.MAX), lambda xs: xs.max(0)),
        "min": (partial(hj.all_reduce, op=Op.MIN), lambda xs: xs.min(0)),
        "prod": (partial(hj.all_reduce, op=Op.PROD), lambda xs: xs.prod(0)),
        "reduce": (partial(hj.reduce, dst=last()), lambda xs: xs.sum(0) * here),
        "reduce_max": (partial(hj.reduce, dst=last(), op=Op.MAX), lambda xs: xs.max(0) * here),
        "reduce_avg": (partial(hj.reduce, dst=last(), op=Op.AVG), lambda xs: xs.mean(0) * here),
        "reduce_scatter": (hj.reduce_scatter, lambda xs: xs.sum(0)[rank]),
        "reduce_scatter_avg": (partial(hj.reduce_scatter, op=Op.AVG), lambda xs: xs.mean(0)[rank]),
        "reduce_scatter_prod": (
            partial(hj.reduce_scatter, op=Op.PROD),
            lambda xs: xs.prod(0)[rank],
        ),
        "all_gather": (hj.all_gather, lambda xs: xs),
        "gather": (partial(hj.gather, dst=last()), lambda xs: xs * here),
        "scatter": (partial(hj.scatter, src=last()), lambda xs: xs[-1][rank]),
        "broadcast": (partial(hj.broadcast, src=last()), lambda xs: xs[-1]),
        "alltoall": (hj.alltoall, lambda xs: xs[:, rank]),
        "sendrecv": (partial(hj.sendrecv, dst=behind, src=before), lambda xs: xs[before]),
        "permute": (partial(hj.permute, perm=pairs), lambda xs: xs[before]),
        "permute_some": (
            partial(hj.permute, perm=pairs[: n - 1]),
            lambda xs: xs[before] * (rank > 0),
        ),
    }


NAMES = """
all_reduce average max min prod reduce reduce_max reduce_avg reduce_scatter reduce_scatter_avg
reduce_scatter_prod all_gather gather scatter broadcast alltoall sendrecv permute permute_some
"""
NAMES = [*NAMES.split()]


def gradients_agree_with_differences(name):
    """Check a function of what all ranks have, whose result all ranks have, too."""
    rank, n, *_ = place()
    verb, _ = verbs()[name]

    def of_everything(xs):
        x = hj.all_reduce(xs, Op.AVG)[rank]  # which is what it is given
        return hj.all_gather(verb(jnp.sin(x)) * 0.5)

    check_grads(of_everything, (of_all(n, 2),), order=2, modes=["fwd", "rev"], rtol=0.05, atol=0.05)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)


@check
def every_verb_does_as_numpy_says_eagerly_and_in_jit():
    rank, n, *_ = place()
    assert list(verbs()) == NAMES
    for verb, twin in verbs().values():
        x, expected = of_rank(rank, n, 2), twin(of_all(n, 2))
        close(verb(x), expected)
        close(jax.jit(lambda x, verb=verb: verb(x))(x), expected)


@check
def vmap_makes_one_operation_of_many():
    rank, n, *_ = place()
    for name, (verb, twin) in verbs().items():
        x, xs = of_rank(rank, n, 3, 2), of_all(n, 3, 2)
        expected = np.stack([twin(xs[:, :, i]) for i in range(3)])
        close(jax.vmap(verb, in_axes=1)(x), expected)
        assert str(jax.make_jaxpr(jax.vmap(verb, in_axes=1))(x)).count("hpcdist_") == 1, name


@check
def messages_arrive_in_jit():
    rank, n, before, behind = place()

    @jax.jit
    def around(x):
        if n == 1:
            return x
        if rank % 2 == 0:
            hj.send(x, dst=behind, tag=3)
        y = hj.recv(jax.ShapeDtypeStruct(x.shape, x.dtype), src=before, tag=3)
        if rank % 2:
            hj.send(x, dst=behind, tag=3)
        return y

    close(around(of_rank(rank, 4)), of_rank(before, 4))
    assert hj.recv(1.0, src=dist.PROC_NULL) == 0


@check
def order_is_that_of_the_program_in_loops_and_branches():
    rank, n, before, behind = place()

    @jax.jit
    def program(x):
        def body(carry, i):
            carry = lax.cond(
                i % 2 == 0,
                lambda y: hj.all_reduce(y),  # JAX keeps what it has traced of a function for others
                lambda y: hj.sendrecv(y, behind, before) * n,
                carry,
            )
            hj.barrier()
            return carry / n, hj.all_gather(carry).sum()

        x, sums = lax.scan(body, x, jnp.arange(4))
        x = lax.fori_loop(0, 3, lambda i, y: hj.broadcast(y + i, src=last()), x)
        return lax.while_loop(
            lambda y: hj.all_reduce(y, Op.MAX).max() < 50, lambda y: 2 * y, x
        ), sums

    def twin(xs):
        sums = []
        for i in range(4):
            xs = np.stack([xs.sum(0)] * n) if i % 2 == 0 else np.roll(xs, 1, 0) * n
            sums.append(xs.sum())
            xs = xs / n
        xs = np.stack([xs[-1] + 3] * n)
        while xs.max() < 50:
            xs = 2 * xs
        return xs[rank], sums

    inputs = np.abs(of_all(5)) + 1
    for found, expected in zip(program(inputs[rank]), twin(inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@check
def gradients_of_programs_are_those_of_the_sum_over_all_ranks():
    rank, _, before, behind = place()

    def loss(x):
        hj.barrier()

        def body(carry, _):
            carry = jnp.tanh(hj.all_reduce(carry, Op.AVG) + hj.sendrecv(carry, behind, before))
            return carry, carry.sum()

        x, sums = lax.scan(body, x, None, length=2)
        return (x**2).sum() + sums.sum()

    def of_all_ranks(xs):
        total = 0.0
        for _ in range(2):
            xs = jnp.tanh(xs.mean(0) + jnp.roll(xs, 1, 0))
            total += xs.sum()
        return (xs**2).sum() + total

    xs = of_all(3)
    expected = jax.grad(of_all_ranks)(xs)[rank]
    close(jax.grad(loss)(xs[rank]), expected)
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(xs[rank]), expected)


@check
def trees_and_numbers_are_taken():
    rank, n, *_ = place()
    total = n * (n - 1) / 2
    found = hj.all_reduce({"a": rank, "b": [float(rank), None, np.full((2, 0), 1.0)]})
    assert found["a"] == total
    assert found["b"][0] == total
    assert found["b"][2].shape == (2, 0)
    assert hj.all_reduce(rank > 0, Op.MAX) == (n > 1)
    half = hj.all_reduce(jnp.full(2, rank, "bfloat16"))
    assert half.dtype == "bfloat16"
    assert (half == total).all()
    tree = {"bool": rank > 0, "half": np.full(3, 0.5, "f2"), "none": np.zeros((3, 0, 2)), "c": 1j}
    found = jax.jit(lambda tree: hj.all_gather(tree))(tree)
    assert found["bool"].tolist() == [rank > 0 for rank in range(n)]
    assert np.asarray(found["half"]).sum() == 1.5 * n  # XLA has no halves without F16C
    assert found["none"].shape == (n, 3, 0, 2)
    assert found["c"].sum() == 1j * n


@check
def groups_are_static():
    rank, n, *_ = place()
    evens = dist.new_group(range(0, n, 2))
    step = jax.jit(lambda x, group: hj.all_reduce(x, group=group), static_argnames="group")
    if rank % 2 == 0:
        assert step(1.0, group=evens) == (n + 1) // 2
        assert jax.jit(lambda x: hj.broadcast(x, src=0, group=evens))(rank) == 0
    else:
        with pytest.warns(dist.NotInGroupWarning):
            assert step(1.0, group=evens) == 1
    assert step(1.0, group=None) == n


@check
def wrong_arguments_are_told_when_they_are_traced():
    n = dist.get_world_size()
    wrong = [
        (lambda x: hj.broadcast(x, src=n), "can not be found inside the group"),
        (lambda x: hj.broadcast(x, src=x[0]), "src is traced by JAX"),
        (lambda x: hj.all_reduce(x, group=x), "group is traced by JAX"),
        (lambda x: hj.all_reduce(x, Op.BAND), "BAND is not defined for float32"),
        (lambda x: hj.all_reduce(x, op=77), "op"),
        (lambda x: hj.alltoall(jnp.zeros((n + 1, 2))), "first axis is"),
        (lambda x: hj.scatter(x[0]), "first axis is"),
        (lambda x: hj.all_reduce("text"), "of which JAX makes no array"),
        (lambda x: hj.all_reduce(jax.random.key(0)), "jax.random.key_data"),
        (lambda x: hj.send(x, dst=0, tag=-1), "tag=-1"),
        (lambda x: hj.permute(x, [(0, 0), (0, 0)]), "sends or receives twice"),
        (jax.grad(lambda x: hj.recv(x, src=0).sum()), "has no derivative"),
    ]
    for function, words in wrong:
        with pytest.raises(dist.UsageError, match=words):
            jax.jit(lambda x, function=function: function(x))(jnp.ones(n))


@check
def ranks_that_disagree_raise_out_of_jit_and_go_on():
    rank, n, *_ = place()

    @jax.jit
    def step(x):
        x = hj.all_reduce(x)
        return hj.all_reduce(jnp.ones(2 + (n > 1 and rank == 0))) + x.sum()  # the line

    if n > 1:
        told = outcome(lambda: jax.block_until_ready(step(jnp.ones(3))))
        assert_raised(told, "MismatchError", ["all_reduce(shape (3,)", "jax_checks.py:"])
        line = ranks_that_disagree_raise_out_of_jit_and_go_on.__code__.co_firstlineno + 7
        assert f"jax_checks.py:{line}" in told[0][1], told[0][1]
    assert jax.jit(lambda x: hj.all_reduce(x))(1.0) == n


@check
def a_rank_that_fails_is_heard_of_inside_of_jit():
    rank, n, *_ = place()

    def fails():
        with dist.together():
            if rank == 0 and n > 1:
                raise ValueError("no data")
            jax.jit(lambda x: hj.all_reduce(x))(1.0)

    if n > 1:
        with pytest.raises((ValueError, dist.RemoteError), match="no data"):
            fails()
    assert everyone(rank) == list(range(n))
    assert jax.jit(lambda x: hj.all_reduce(x))(1.0) == n


@check
def a_rank_that_does_not_come_is_a_collective_timeout_inside_of_jit():
    rank, n, *_ = place()
    group = dist.new_group(range(n), timeout=2)
    program = jax.jit(lambda x: lax.fori_loop(0, 2, lambda _, y: hj.all_reduce(y, group=group), x))
    add_up = program.lower(1.0).compile()  # which takes longer on one rank than on another
    everyone(rank)
    if rank != last():
        with pytest.raises(dist.CollectiveTimeout, match=r"all_reduce.*jax_checks\.py") as caught:
            add_up(1.0)
        assert caught.value.missing == (last(),)
    assert everyone(rank) == list(range(n))
    if rank == last() and n > 1:
        with pytest.raises(dist.CollectiveTimeout):  # the others have given it up
            add_up(1.0)
    assert add_up(1.0) == n**2
    dist.destroy_process_group(group)


@check
def a_donated_array_is_reduced_where_it_is():
    n = dist.get_world_size()
    step = jax.jit(lambda x: hj.all_reduce(x), donate_argnums=0)
    x = jnp.ones(1 << 14)
    there = x.unsafe_buffer_pointer()
    y = step(x)
    assert (np.asarray(y) == n).all()
    assert not handler.IS_THERE or y.unsafe_buffer_pointer() == there


@check
def what_is_not_donated_stays_as_it_was():
    n = dist.get_world_size()
    x = jnp.ones(5)
    for verb in (hj.all_reduce, partial(hj.reduce, dst=0), partial(hj.broadcast, src=0)):
        both = jax.jit(lambda x, verb=verb: (x, verb(x * 2), x * 2))(x)
        close(both[0], np.ones(5))
        close(both[2], np.full(5, 2.0))
    close(jax.jit(lambda x: hj.all_reduce(x) + x)(x), np.full(5, n + 1.0))
    close(x, np.ones(5))


@check
def gradients_are_averaged_inside_of_the_step():
    rank, n, *_ = place()

    @jax.jit
    def step(weights):
        def loss(w):
            return (rank + 1) * (w["a"] ** 2).sum() + 2 * rank * w["b"][0].sum()

        return hj.average_gradients(jax.grad(loss)(weights))

    weights = {"a": jnp.ones((2, 3)), "b": (jnp.zeros(4, "bfloat16"), jnp.zeros((0, 2)))}
    means = step(weights)
    close(means["a"], np.full((2, 3), n + 1))
    assert means["b"][0].dtype == "bfloat16"
    assert (means["b"][0] == n - 1).all()
    assert means["b"][1].shape == (0, 2)
    with pytest.raises(dist.UsageError, match=r"the gradient \['steps'\] is of int32"):
        hj.average_gradients({"steps": 3})


@check
def an_optimizer_of_optax_steps_along_the_mean():
    optax = pytest.importorskip("optax")
    rank, n, *_ = place()
    optimizer = optax.chain(optax.clip(100.0), hj.average(optax.sgd(0.5)))
    weight = jnp.ones(3)
    state = optimizer.init(weight)

    @jax.jit
    def step(weight, state):
        updates, state = optimizer.update(jnp.full(3, 2.0 * rank), state, weight)
        return optax.apply_updates(weight, updates), state

    close(step(weight, state)[0], np.full(3, 1 - 0.5 * (n - 1)))
    with pytest.raises(dist.UsageError, match="average needs an optimizer of optax"):
        hj.average(step)
