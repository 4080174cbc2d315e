"""Buckets: those that Paddle makes, reversed; and what holds for any gradients."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import hpcdist as dist
from hpcdist.parallel import plan_buckets

RECORDED = json.loads((Path(__file__).parent / "data/buckets.json").read_text())
MiB = 1 << 20

sizes = st.one_of(st.just(0), st.integers(1, 1000))
gradients = st.lists(st.tuples(sizes, st.sampled_from("fdh"), st.booleans()), max_size=30)
limits = st.lists(st.integers(0, 2000), min_size=1, max_size=4)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_buckets_are_the_groups_of_paddle_in_reversed_order(case):
    planned = plan_buckets(case["nbytes"], case["dtypes"], case["limits"], case["sparse"])
    assert planned == case["groups"][::-1]


@given(gradients, limits)
def test_every_gradient_is_in_exactly_one_bucket_of_its_dtype(entries, limits):
    nbytes, dtypes, sparse = [list(column) for column in zip(*entries, strict=True)] or [[]] * 3
    planned = plan_buckets(nbytes, dtypes, limits, sparse)
    assert sorted(index for bucket in planned for index in bucket) == list(range(len(nbytes)))
    for bucket in planned:
        assert bucket == sorted(bucket)
        assert len({dtypes[index] for index in bucket}) == 1
        assert len(bucket) == 1 or not any(sparse[index] for index in bucket)
    firsts = [bucket[0] for bucket in planned]
    assert firsts == sorted(firsts, reverse=True)


@given(gradients, limits)
def test_all_but_the_last_bucket_of_a_dtype_reach_their_limit_with_their_last_gradient(
    entries, limits
):
    nbytes, dtypes = [entry[0] for entry in entries], [entry[1] for entry in entries]
    planned = plan_buckets(nbytes, dtypes, limits)
    for dtype in set(dtypes):
        own = [bucket for bucket in reversed(planned) if dtypes[bucket[0]] == dtype]
        for stage, bucket in enumerate(own):
            limit = limits[min(stage, len(limits) - 1)]
            filled = [nbytes[index] for index in bucket]
            assert sum(filled[:-1]) < limit or len(bucket) == 1
            assert sum(filled) >= limit or bucket is own[-1]


def test_the_small_bucket_holds_the_first_parameters_and_is_sent_last():
    planned = plan_buckets([MiB // 2] * 60, ["float32"] * 60, [MiB, 25 * MiB])
    assert planned[-1] == [0, 1]
    assert [len(bucket) for bucket in planned] == [8, 50, 2]


def test_sparse_gradients_may_be_given_as_flags_or_indices():
    flags = plan_buckets([4, 4, 4], "fff", [100], sparse=[False, True, False])
    assert flags == plan_buckets([4, 4, 4], "fff", [100], sparse=[1]) == [[1], [0, 2]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([4], ["f"], []), "at least one number of bytes"),
        (([4], ["f"], [8, -1]), r"none below 0, got \[8, -1\]"),
        (([4, 4], ["f"], [8]), "one entry per gradient, got 2 and 1"),
        (([4, -4], ["f", "f"], [8]), "must not be negative, got -4"),
        (([4, 4], ["f", "f"], [8], [2]), "names gradient 2, but there are 2"),
        (([4, 4], ["f", "f"], [8], [-1]), "names gradient -1"),
        (([4, 4], ["f", "f"], [8], [True]), "one bool per gradient, got 1 for 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(dist.UsageError, match=words):
        plan_buckets(*arguments)
