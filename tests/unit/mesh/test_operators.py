"""Operators of arrays: whose memory they use, and whom they leave alone."""

import functools
import itertools
import operator

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.mesh import operators
from hpcdist.mesh.dist_array import DistArray

LENGTH = operators.LARGE // 8 + 7
reuses = pytest.mark.skipif(operators.LEFT == 0, reason="this Python cannot tell a temporary")


@pytest.fixture
def world():
    """Return what runs a function of two arrays, large enough, on one rank."""

    def run(check):
        def one_rank():
            mesh = dist.ProcessMesh([0])
            a = dist.shard_tensor(np.arange(LENGTH, dtype="f8"), mesh, [])
            b = dist.shard_tensor(np.full(LENGTH, 3.0), mesh, [])
            check(a, b)

        dist.simulate(1, one_rank)

    return run


def address(array):
    return array.local.ctypes.data


@reuses
def test_a_chain_is_computed_in_the_memory_of_its_temporaries(world):
    def check(a, b):
        seen = []

        def told(x):
            seen.append(address(x))
            return x

        told(told(told(a * 2.0) + b) - a) / 3.0
        assert len({*seen}) == 1
        assert seen[0] not in (address(a), address(b))

    world(check)


@reuses
def test_the_right_operand_may_be_the_temporary(world):
    def check(a, b):
        addresses = []
        result = b + (lambda x: addresses.append(address(x)) or x)(a * 2.0)
        assert addresses == [address(result)]
        np.testing.assert_array_equal(result, np.arange(LENGTH) * 2.0 + 3)

    world(check)


WITH_NAMES = {
    "names": lambda a, b: (a + b, a - b, a * 2.0, 2.0 * b, a / b, b // a if False else a % b),
    "the same twice": lambda a, b: (a + a, a * a),
    "in a list": lambda a, b: [x + y for x, y in zip([a, b], [b, a], strict=True)],
    "in a dict": lambda a, b: {"a": a}["a"] + b,
    "an attribute": lambda a, b: functools.partial(max, a).args[0] + b,
    "reduce": lambda a, b: functools.reduce(operator.add, [a, b, a]),
    "map": lambda a, b: [*map(operator.add, [a, b], [b, a])],
    "sum": lambda a, b: sum([a, b, a]),
    "in place of a sum": lambda a, b: a + b + a + b,
    "closures": lambda a, b: (lambda: a + b)(),
}


@pytest.mark.parametrize("how", WITH_NAMES)
def test_operands_that_have_a_name_never_change(world, how):
    def check(a, b):
        x, y = a.local.copy(), b.local.copy()
        WITH_NAMES[how](a, b)
        np.testing.assert_array_equal(a, x)
        np.testing.assert_array_equal(b, y)

    world(check)


HELD = {
    "a tuple, unpacked into a call": lambda held, b: operator.add(*held, b),
    "starmap": lambda held, b: [*itertools.starmap(operator.add, [(held[0], b)])],
    "starmap of what holds it": lambda held, b: [*itertools.starmap(operator.mul, [(*held, 2.0)])],
    "a list's item": lambda held, b: held[0] + b,
    "a slice of a list": lambda held, b: held[:][0] * 2.0,
    "a view": lambda held, b: held[0][:] + b,
    "a generator": lambda held, b: [*(x + b for x in held)],
    "a comprehension": lambda held, b: [x + b for x in held],
    "a conditional": lambda held, b: (held[0] if b is not None else b) + b,
    "a walrus": lambda held, b: ((x := held[0]) + b, x),
}


@pytest.mark.parametrize("how", HELD)
def test_what_only_a_container_holds_never_changes(world, how):
    def check(a, b):
        held = (a * 1.0,)
        HELD[how](held, b)
        np.testing.assert_array_equal(held[0], np.arange(LENGTH))

    world(check)


def test_a_tuple_that_alone_holds_an_operand_keeps_it_when_c_code_adds_its_items(world):
    def check(a, b):
        pairs = [(a * 1.0, b)]
        [*itertools.starmap(operator.add, pairs)]
        operator.add(*pairs[0])
        np.testing.assert_array_equal(pairs[0][0], np.arange(LENGTH))

    world(check)


def test_items_of_an_array_of_objects_never_change(world):
    def check(a, b):
        items = np.empty(1, object)
        items[0] = a * 1.0
        items + items
        items * 2.0
        b + (items * 1.0)[0]
        np.testing.assert_array_equal(items[0], np.arange(LENGTH))

    world(check)


def test_a_part_that_somebody_else_has_never_changes(world):
    def check(a, b):
        part = np.arange(LENGTH, dtype="f8")
        DistArray._of(part, a.layout) + b
        DistArray._of(part[:], a.layout) * 2.0
        np.testing.assert_array_equal(part, np.arange(LENGTH))

    world(check)


def test_a_result_of_another_dtype_is_new_memory(world):
    def check(a, b):
        found = (a * 2.0) > b
        assert found.dtype == bool
        assert ((a * 2.0) + 1j).dtype == np.complex128
        assert (a.astype("i8") * 2 / 4).dtype == np.float64
        assert ((a.astype("f4") * 2.0) + b).dtype == np.float64

    world(check)


def test_assignment_operators_write_where_the_array_is():
    def check():
        mesh = dist.ProcessMesh([0, 1])
        a = dist.shard_tensor(np.arange(6.0), mesh, [dist.Shard(0)])
        same, part = a, a.local
        a += 1
        a *= dist.shard_tensor(np.arange(6.0), mesh, [])
        a -= np.ones(6)
        assert same is a
        assert a.local is part
        np.testing.assert_array_equal(
            dist.unshard_dtensor(a), (np.arange(6.0) + 1) * np.arange(6.0) - 1
        )

    dist.simulate(2, check)


def test_numpy_arrays_on_the_left_leave_the_operation_to_the_dist_array():
    def check():
        a = dist.shard_tensor(np.arange(6.0), dist.ProcessMesh([0, 1]), [dist.Shard(0)])
        for found in (np.ones(6) + a, np.float64(1) + a, 1 + a, True + a):
            assert type(found) is DistArray
            assert found.layout is a.layout

    dist.simulate(2, check)


def test_operands_of_no_use_are_left_to_python():
    def check():
        a = dist.shard_tensor(np.arange(6.0), dist.ProcessMesh([0, 1]), [dist.Shard(0)])
        with pytest.raises(TypeError):
            a + "text"
        with pytest.raises(TypeError):
            object() @ a
        if np.lib.NumpyVersion(np.__version__) >= "1.25.0":  # which compares by element
            assert not (a == "text").any()

    dist.simulate(2, check)


def test_contributions_are_combined_before_anything_is_computed_of_them():
    def check():
        mesh = dist.ProcessMesh([0, 1])
        a = dist.dtensor_from_local(np.ones(3), mesh, [dist.Partial()])
        for found in (a * a, np.exp(a) * 0 + 4, a + a, a.T * 2, a[None][0] * 2 if False else a * 2):
            assert not found.layout.is_partial
            np.testing.assert_array_equal(dist.unshard_dtensor(found), [4.0] * 3)
        assert a.sum() == 6
        with pytest.raises(dist.UsageError, match="contributions"):
            a[0]

    dist.simulate(2, check)


def test_two_layouts_meet_in_that_of_the_larger_array():
    def check():
        mesh = dist.ProcessMesh([0, 1])
        large = dist.shard_tensor(np.ones((6, 4)), mesh, [dist.Shard(0)])
        for placement in (dist.Replicate(), dist.Shard(0), dist.Shard(1)):
            small = dist.shard_tensor(np.ones((6, 1)), mesh, [placement])
            assert (small + large).layout is large.layout
        other = dist.shard_tensor(np.ones((6, 4)), mesh, [dist.Shard(1)])
        assert (large + other).layout is large.layout
        assert (other + large).layout is other.layout
        assert (dist.shard_tensor(np.ones((6, 4)), mesh, []) + other).layout is other.layout

    dist.simulate(2, check)


def test_slices_are_views_and_nothing_is_moved():
    def check():
        a = dist.shard_tensor(np.arange(10.0), dist.ProcessMesh([0, 1]), [dist.Shard(0)])
        part = a[1:8:2]
        assert np.shares_memory(part.local, a.local)
        part[...] = 0
        np.testing.assert_array_equal(dist.unshard_dtensor(a), [0, 0, 2, 0, 4, 0, 6, 0, 8, 9])

    dist.simulate(2, check)
