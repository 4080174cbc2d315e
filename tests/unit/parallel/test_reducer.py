"""The reducer: buckets are launched in order, whatever the order of the gradients."""

import pytest
from hypothesis import given, strategies as st

import hpcdist as dist
from hpcdist.parallel import Reducer


@st.composite
def partitions(draw):
    """Draw buckets that hold every index once."""
    indices = draw(st.permutations(range(draw(st.integers(1, 20)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(indices) - 1)))) if len(indices) > 1 else []
    return [indices[a:b] for a, b in zip([0, *cuts], [*cuts, len(indices)], strict=True)]


@given(partitions(), st.data())
def test_buckets_are_launched_in_order_and_not_before_they_are_full(buckets, data):
    reducer = Reducer(buckets)
    for _ in range(2):
        order = data.draw(st.permutations([index for bucket in buckets for index in bucket]))
        launched, ready = [], set()
        for index in order:
            ready.add(index)
            new = list(reducer.ready(index))
            assert all(ready.issuperset(buckets[bucket]) for bucket in new)
            launched += new
            assert launched == list(range(reducer.launched))
            waiting = buckets[len(launched) :]
            assert not waiting or not ready.issuperset(waiting[0])
        assert launched == list(range(len(buckets)))
        assert reducer.is_complete()
        reducer.restart()
        assert not reducer.is_complete()


@given(partitions(), st.data())
def test_what_is_missing_can_be_launched_at_the_end(buckets, data):
    reducer = Reducer(buckets)
    indices = sorted(index for bucket in buckets for index in bucket)
    some = data.draw(st.sets(st.sampled_from(indices)))
    launched = [bucket for index in sorted(some) for bucket in reducer.ready(index)]
    assert reducer.missing() == [index for index in indices if index not in some]
    assert [*launched, *reducer.rest()] == list(range(len(buckets)))
    assert reducer.is_complete()
    assert list(reducer.rest()) == []


def test_a_gradient_is_ready_once_per_backward_pass():
    reducer = Reducer([[1], [0]])
    reducer.ready(0)
    with pytest.raises(dist.UsageError, match="gradient 0 is ready for the second time"):
        reducer.ready(0)
    reducer.restart()
    assert list(reducer.ready(0)) == []
    assert list(reducer.ready(1)) == [0, 1]


def test_the_reducer_knows_what_is_where():
    reducer = Reducer([[2, 1], [0]])
    assert [reducer.bucket_of(index) for index in range(3)] == [1, 0, 0]
    reducer.ready(1)
    reducer.ready(2)
    assert [reducer.is_ready(index) for index in range(3)] == [False, True, True]
    assert [reducer.is_launched(index) for index in range(3)] == [False, True, True]


@pytest.mark.parametrize("buckets", [[[0], [0]], [[1]], [[0, 2]], [[-1, 0]]])
def test_buckets_must_hold_every_gradient_once(buckets):
    with pytest.raises(dist.UsageError, match="exactly one bucket"):
        Reducer(buckets)
