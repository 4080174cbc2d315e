"""Trees of arrays: their leaves, paths and containers."""

from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.arrays.trees import leaves, map_leaves, with_leaves

Layer = namedtuple("Layer", "weight bias")


def test_every_leaf_has_a_path_as_in_python():
    tree = {"b": [1, (2, None)], "a": Layer(3, {0: 4})}
    assert leaves(tree) == [
        ("tree['a'].weight", 3),
        ("tree['a'].bias[0]", 4),
        ("tree['b'][0]", 1),
        ("tree['b'][1][0]", 2),
    ]
    assert leaves(5) == [("tree", 5)]
    assert leaves(None) == leaves([]) == leaves({}) == []


def test_leaves_are_replaced_and_containers_keep_their_type_and_order():
    tree = OrderedDict(z=[1, None], a=Layer(2, (3,)))
    new = with_leaves(tree, [20, 30, 10])
    assert new == OrderedDict(z=[10, None], a=Layer(20, (30,)))
    assert list(new) == ["z", "a"]
    assert type(new["a"]) is Layer
    assert tree["z"] == [1, None]
    assert with_leaves(defaultdict(list, x=1), [2])["unknown"] == []


def test_keys_that_cannot_be_sorted_are_visited_as_they_were_inserted():
    assert [path for path, _ in leaves({"b": 1, 2: 2, None: 3})] == [
        "tree['b']",
        "tree[2]",
        "tree[None]",
    ]


def test_leaves_are_visited_in_the_order_in_which_they_are_found():
    tree = {"b": 1, "a": [2, 3]}
    visited = []
    map_leaves(lambda path, leaf: visited.append((path, leaf)), tree)
    assert visited == leaves(tree)


# ---- arrays of JAX


def test_jax_arrays_are_read_without_a_copy_and_made_new():
    jnp = pytest.importorskip("jax.numpy")
    from hpcdist.arrays.buffer import as_buffer, carried, wrap_like

    for dtype in ("bfloat16", "float32", "complex64", "int8", "bool"):
        x = jnp.ones((2, 3), dtype)
        buffer = as_buffer(x)
        assert buffer.shape == (2, 3)
        assert buffer.dtype.name == dtype
        assert not buffer.data.flags.writeable
        source = np.ones(4, buffer.dtype.numpy)
        new = wrap_like(x, carried(source, buffer.dtype), buffer.dtype, (4,))
        source[:] = 0
        assert new.dtype == x.dtype
        assert new.all()
    assert as_buffer(x).data.ctypes.data == x.unsafe_buffer_pointer()


def test_jax_arrays_without_memory_are_refused_with_the_remedy():
    jax = pytest.importorskip("jax")
    from hpcdist.arrays.buffer import as_buffer

    def inside(x):
        with pytest.raises(dist.UsageError, match=r"is tracing the function; use the verb"):
            as_buffer(x)
        return x.sum()

    jax.jit(inside)(jax.numpy.ones(3))
    jax.grad(inside)(jax.numpy.ones(3))
    with pytest.raises(dist.UsageError, match=r"send jax.random.key_data\(x\)"):
        as_buffer(jax.random.key(0))
