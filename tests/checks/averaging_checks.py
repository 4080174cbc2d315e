"""What holds for averaging arrays of every library, on any number of ranks."""

from importlib.util import find_spec

import numpy as np
import pytest
from checks import (
    Checks,
    Vectors,
    assert_raised,
    everyone,
    needs_jax,
    needs_torch,
    outcome,
)

import hpcdist as dist

check = Checks()


# ---- trees


@check
def trees_of_numpy_arrays_are_averaged_in_place():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    w, b = np.full((2, 3), float(rank)), np.array(float(rank), "f4")
    columns = np.full((4, 6), float(rank))
    tree = {"layer": [w, (b, None)], "view": columns[:, ::2], "nothing": np.zeros(0)}
    assert dist.average_gradients(tree) is tree
    assert tree["layer"][0] is w
    assert (w == mean).all()
    assert b == mean
    assert (columns[:, ::2] == mean).all()
    assert (columns[:, 1::2] == rank).all()


@check
def arrays_that_cannot_be_written_are_replaced():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    fixed, free = np.full(3, float(rank)), np.full(2, float(rank))
    fixed.flags.writeable = False
    tree = {"b": fixed, "a": free}
    means = dist.average_gradients(tree)
    assert list(means) == ["b", "a"]
    assert means["a"] is free
    assert means["b"] is not fixed
    assert (fixed == rank).all()
    assert (means["b"] == mean).all()
    assert dist.average_gradients(np.float64(rank)) == mean


@check
def the_order_in_which_keys_were_inserted_does_not_matter():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    keys = "abc" if rank % 2 else "cab"
    tree = {key: np.full(2, float(rank + ord(key))) for key in keys}
    dist.average_gradients(tree)
    assert {key: each[0] for key, each in tree.items()} == {k: mean + ord(k) for k in "abc"}


@check
def trees_that_differ_are_named_on_all_ranks():
    n = dist.get_world_size()
    last = dist.get_rank() == n - 1
    same = {"w": [np.zeros(2), np.zeros(3)]}
    other = {"w": [np.zeros(2), np.zeros(4)]}
    dist.average_gradients({"w": [np.zeros(2), np.zeros(3)]})
    if last:
        alone = dist.new_group([n - 1])
        dist.average_gradients(other, alone)
        dist.destroy_process_group(alone)
    if n == 1:
        return
    for wrong, words in (
        (other, f"rank 0 has \"tree['w'][1]\" of shape (3,), float64, but rank {n - 1} has"),
        ({"w": [np.zeros(2)]}, "has no more"),
        ({"v": same["w"]}, "tree['v'][0]"),
        ({"w": [np.zeros(2), np.zeros(3, "f4")]}, "float32. Pass trees of the same structure"),
    ):
        for _ in range(2):  # the second time each tree has been seen before
            told = outcome(lambda wrong=wrong: dist.average_gradients(wrong if last else same))
            assert_raised(told, "MismatchError", words)
    dist.average_gradients(same)


@check
def leaves_that_cannot_be_averaged_are_named_on_all_ranks():
    n = dist.get_world_size()
    last = dist.get_rank() == n - 1
    for wrong, words in (
        (0.5, "tree['lr']: a float is not an array"),
        (np.arange(3), "tree['lr']: ReduceOp.AVG is not defined for int64"),
        ("adam", "tree['lr']: a str is not an array"),
    ):
        good = np.zeros(3)
        told = outcome(
            lambda wrong=wrong, good=good: dist.average_gradients({"lr": wrong if last else good})
        )
        assert_raised(told, "UsageError", words, [n - 1])
        told = outcome(lambda wrong=wrong: dist.average_gradients({"lr": wrong}))
        assert_raised(told, "UsageError", words)


@check
def large_and_small_arrays_are_averaged_together():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    sizes = [3, 1_200_000, 0, 500_000, 7, 700_000]
    tree = [np.full(size, float(rank), "f8" if size % 2 else "f4") for size in sizes]
    dist.average_gradients(tree)
    assert all((array == mean).all() for array in tree)


# ---- other libraries


@check.needing(needs_torch)
def trees_of_torch_tensors_are_averaged_in_place():
    import torch

    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    half = torch.full((4,), float(rank), dtype=torch.bfloat16)
    columns = torch.full((4, 6), float(rank))
    tree = (weight, [half], columns.T)
    assert dist.average_gradients(tree) is tree
    assert (weight == mean).all()
    assert (half == mean).all()
    assert (columns == mean).all()


@check.needing(needs_torch)
def gradients_of_torch_parameters_are_averaged():
    import torch

    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layer = torch.nn.Linear(3, 2)
    (layer(torch.ones(1, 3)).sum() * rank).backward()
    layer.extra = torch.nn.Parameter(torch.zeros(1))
    place = layer.weight.grad.data_ptr()
    dist.fused_allreduce_gradients(layer.parameters())
    assert (layer.weight.grad == mean).all()
    assert layer.weight.grad.data_ptr() == place
    assert layer.extra.grad is None
    dist.sync_params_buffers(layer, src_rank=dist.get_world_size() - 1)
    assert len(set(everyone(layer.weight.tolist()[0][0]))) == 1


@check.needing(needs_torch)
def parameters_may_hold_torch_tensors():
    import torch

    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layers = Vectors()
    layers.all["w"] = dist.Parameter(torch.full((2, 3), float(rank)))
    layers.all["b"] = dist.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16))
    dist.DataParallel(layers)
    for p in layers.all.values():
        assert (p.data == 0).all()
        p.grad = torch.full_like(p.data, rank)
    for p in layers.all.values():
        assert (p.grad == mean).all()
        assert p.grad.dtype == p.dtype
        assert p.grad.data_ptr() == p.grad.data_ptr()
        p.data -= p.grad
        assert (p.data == -mean).all()


@check.needing(needs_jax)
def trees_of_jax_arrays_are_replaced_by_their_means():
    import jax
    import jax.numpy as jnp

    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    mine = np.full(2, float(rank))
    tree = {"w": jnp.full((2, 3), float(rank)), "b": [jnp.bfloat16(rank), mine, None]}
    means = dist.average_gradients(tree)
    assert isinstance(means["w"], jax.Array)
    assert (means["w"] == mean).all()
    assert (tree["w"] == rank).all()
    assert means["b"][0].dtype == jnp.bfloat16
    assert means["b"][0] == mean
    assert means["b"][1] is mine
    assert means["b"][2] is None


@check.needing(needs_jax)
def containers_registered_with_jax_are_understood():
    import jax
    import jax.numpy as jnp

    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layer = Layer(jnp.full(2, float(rank)), {"b": jnp.full(3, float(rank))}, "relu")
    means = dist.average_gradients([layer])
    assert isinstance(means[0], Layer)
    assert means[0].kind == "relu"
    assert all((leaf == mean).all() for leaf in jax.tree_util.tree_leaves(means))
    told = outcome(lambda: dist.average_gradients([Layer(1.0, None, "relu")]))
    assert_raised(told, "UsageError", "tree[0].weight: a float is not an array")
    told = outcome(lambda: dist.average_gradients([object()]))
    assert_raised(told, "UsageError", "tree[0]: an object is not an array")


class Layer:
    """What users register with JAX as a container."""

    def __init__(self, weight, rest, kind):
        self.weight, self.rest, self.kind = weight, rest, kind

    @staticmethod
    def register():
        from jax.tree_util import register_dataclass

        register_dataclass(Layer, data_fields=["weight", "rest"], meta_fields=["kind"])


if find_spec("jax") is not None:
    Layer.register()


@check.needing(needs_jax)
def parameters_may_hold_jax_arrays():
    import jax
    import jax.numpy as jnp

    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layers = Vectors()
    layers.all["w"] = dist.Parameter(jnp.full((2, 3), rank + 1.0))
    layers.all["b"] = dist.Parameter(jnp.full(3, rank + 1, jnp.bfloat16))
    model = dist.DataParallel(layers)
    loss = jax.grad(lambda w: (w**2).sum())
    for p in reversed(layers.all.values()):
        assert (p.data == 1).all()
        p.grad = loss(p.data) * rank
    for p in layers.all.values():
        assert isinstance(p.grad, jax.Array)
        assert (p.grad == 2 * mean).all()
        p.data = p.data - p.grad
    kept = model.state_dict()
    for p in layers.all.values():
        p.data = p.data + 1
    model.set_state_dict(kept)
    assert all((p.data == 1 - 2 * mean).all() for p in layers.all.values())
    assert all(isinstance(p.data, jax.Array) for p in layers.all.values())


@check.needing(needs_jax)
def collectives_read_jax_arrays_and_give_jax_arrays():
    import jax
    import jax.numpy as jnp

    rank, n = dist.get_rank(), dist.get_world_size()
    x = jnp.full((2, 2), float(rank))
    gathered = []
    dist.all_gather(gathered, x)
    assert all(isinstance(each, jax.Array) for each in gathered)
    assert [float(each[0, 0]) for each in gathered] == list(range(n))
    filled = np.zeros((n, 2, 2), "f4")
    dist.all_gather(filled, x)
    assert (filled[:, 1, 1] == range(n)).all()
    received = []
    dist.alltoall(received, [jnp.bfloat16(rank + peer) for peer in range(n)])
    assert [float(each) for each in received] == [rank + peer for peer in range(n)]
    assert all(isinstance(each, jax.Array) for each in received)
    objects = []
    dist.all_gather_object(objects, {"x": x})
    assert [float(each["x"][0, 0]) for each in objects] == list(range(n))
    work = dist.isend(x, (rank + 1) % n)
    y = np.zeros((2, 2), "f4")
    dist.recv(y, (rank - 1) % n)
    work.wait()
    assert (y == (rank - 1) % n).all()


@check.needing(needs_jax)
def jax_arrays_are_never_written():
    import jax.numpy as jnp

    x = jnp.ones(3)
    for write in (
        lambda: dist.all_reduce(x),
        lambda: dist.scan(x),
        lambda: dist.recv(x, 0),
        lambda: dist.all_gather(x, np.ones(1, "f4")),
    ):
        with pytest.raises(dist.HpcdistError, match="JAX arrays never change; average with"):
            write()
    told = outcome(lambda: dist.broadcast(x, 0))
    if len(told) > 1:
        assert told[1][0] in ("UsageError", "RemoteError")
        assert "JAX arrays never change" in told[1][1]


# ---- Paddle's functions


@check
def gradients_of_a_list_of_parameters_are_averaged():
    rank, n = dist.get_rank(), dist.get_world_size()
    mean = (n - 1) / 2
    layers = Vectors("a", "b", "c")
    layers.give(rank, "a", "c")
    grad = layers.all["a"].grad

    class Topology:
        def get_data_parallel_group(self):
            return None

    dist.fused_allreduce_gradients(layers.all.values(), Topology())
    assert layers.grads() == [mean, None, mean]
    assert layers.all["a"].grad is grad
    if n > 1:
        layers.all["b"].grad = np.zeros(3) if rank == n - 1 else None
        told = outcome(lambda: dist.fused_allreduce_gradients(layers.all.values()))
        assert_raised(told, "MismatchError", ["parameter_list[1].grad", "on every rank"])


@check
def a_model_is_made_equal_to_that_of_one_rank():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    layers = Vectors("a", "b", value=float(rank), buffer=np.full(2, float(rank)))
    layers.all["b"].data.flags.writeable = False
    dist.sync_params_buffers(layers, src_rank=last)
    assert [p.data[0] for p in layers.all.values()] == [last, last]
    assert layers.buffer[0] == last
    told = outcome(lambda: dist.sync_params_buffers(layers, src_rank=99))
    assert_raised(told, "UsageError", "src_rank=99 can not be found inside the group")
