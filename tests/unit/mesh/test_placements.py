"""What one axis of a mesh does to an array: values, with Paddle's methods."""

import copy
import pickle

import pytest

import hpcdist as dist
from hpcdist import DistAttr, Partial, Placement, ProcessMesh, ReduceType, Replicate, Shard

EVERY = [
    Replicate(),
    Shard(0),
    Shard(-1),
    Shard(0, co_shard_order=1),
    Shard(0, split_factor=2),
    *map(Partial, ReduceType),
]


@pytest.mark.parametrize("placement", EVERY, ids=str)
def test_a_placement_is_a_value(placement):
    again = eval(repr(placement).replace("kRed", "ReduceType.kRed"))
    for other in (again, pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert other == placement
        assert hash(other) == hash(placement)
    assert [each for each in EVERY if each == placement] == [placement]
    assert isinstance(placement, Placement)


@pytest.mark.parametrize("placement", EVERY, ids=str)
def test_a_placement_cannot_be_changed(placement):
    for name in ("dim", "reduce_type", "other"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(placement, name, 1)


def test_a_placement_tells_what_it_is():
    assert [
        (each.is_shard(), each.is_replicated(), each.is_partial())
        for each in (Shard(1), Replicate(), Partial())
    ] == [(True, False, False), (False, True, False), (False, False, True)]
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert not Partial().is_shard(0)


def test_a_shard_tells_how_it_cuts():
    assert Shard(1).get_dim() == 1
    assert Shard(1).get_co_shard_order() == 0
    assert Shard(1, co_shard_order=2).get_co_shard_order() == 2
    assert Shard(1).get_split_factor() == 1
    assert Shard(1, split_factor=2).get_split_factor() == 2


def test_partial_values_are_summed_if_nothing_else_is_said():
    assert Partial() == Partial(ReduceType.kRedSum) == Partial(0)
    assert Partial().reduce_type is ReduceType.kRedSum


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shard("x"), "dim must be an integer, got 'x'"),
        (lambda: Shard(True), "dim must be an integer"),
        (lambda: Shard(0, co_shard_order=-1), "at least 0"),
        (lambda: Shard(0, split_factor=0), "at least 1"),
        (lambda: Shard(0, co_shard_order=1, split_factor=2), "give one of them"),
        (lambda: Partial("sum"), "kRedSum"),
        (lambda: Partial(9), "kRedSum"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(dist.UsageError, match=words):
        make()


# ---- DistAttr

GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])


def test_names_of_axes_become_placements():
    assert DistAttr(GRID, ["y", None]).placements == [Replicate(), Shard(0)]
    assert DistAttr(GRID, ["x", "y"]).placements == [Shard(0), Shard(1)]
    assert DistAttr(GRID, []).placements == [Replicate(), Replicate()]


@pytest.mark.parametrize(
    ("mesh", "names", "words"),
    [
        (GRID, ["z"], r"Invalid sharding dimension 'z'. Available dimensions in mesh are: .*x.*y"),
        (GRID, ["x", "x"], "twice"),
        (GRID, "xy", "must be a list"),
        ([0, 1], ["x"], "must be an instance of ProcessMesh"),
    ],
)
def test_names_that_do_not_fit_are_refused(mesh, names, words):
    with pytest.raises(dist.UsageError, match=words):
        DistAttr(mesh, names)
