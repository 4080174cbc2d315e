"""HPCDIST_REDUCTIONS=ordered: the bits of reductions do not depend on the nodes, or on MPI."""

import time
from functools import reduce

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.reduction import ReduceOp, local_result, rule_for
from hpcdist.transport.tuning import OPERATIONS, Algorithm, TuningRule

DTYPES = [np.float32, np.float64, np.float16, np.complex64]
OPS = [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG]
LAYOUTS = {
    "one node": ({}, []),
    "a node for each": ({"ranks_per_node": 1}, []),
    "pairs": ({"ranks_per_node": 2}, []),
    "MPI alone": (
        {"ranks_per_node": 2},
        [TuningRule(each, "ordinary", Algorithm.MPI, nodes="several") for each in OPERATIONS],
    ),
}


def given(rank, dtype, items):
    random = np.random.default_rng(rank)
    x = random.standard_normal(items) * 2.0 ** random.integers(-9, 9, items)
    return (x + 1j * x[::-1] if np.dtype(dtype).kind == "c" else x).astype(dtype)


def in_order(arrays, op):
    """Return the reduction of arrays from the first to the last."""
    rule, out = rule_for(op, dtype_row(arrays[0].dtype)), np.empty_like(arrays[0])
    with np.errstate(over="ignore", invalid="ignore"):
        total = local_result(rule, [each if rule.encode is None else rule.encode(each)
                                    for each in arrays])  # fmt: skip
        if rule.decode is None:
            return total
        rule.decode(total, out, len(arrays))
    return out


def same(a, b):
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.four_ranks
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("items", [5, 30_001])
def test_reductions_are_in_the_order_of_the_ranks_wherever_they_are(layout, items, tuned):
    settings, rules = LAYOUTS[layout]
    tuned(rules, reductions="ordered", **settings)
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        everyone = [given(each, dtype, items * size) for each in range(size)]
        mine, cut = everyone[rank], slice(rank * items, (rank + 1) * items)
        for op in OPS:
            expected = in_order(everyone, op)
            x = mine.copy()
            dist.all_reduce(x, op)
            assert same(x, expected), (dtype, op)
            x = mine.copy()
            dist.reduce(x, size - 1, op)
            assert rank != size - 1 or same(x, expected), (dtype, op)
            part = np.empty(items, dtype)
            dist.stream.reduce_scatter(part, mine, op)
            assert same(part, expected[cut]), (dtype, op)
        scanned, before = mine.copy(), mine.copy()
        dist.scan(scanned)
        dist.exscan(before)
        assert same(scanned, in_order(everyone[: rank + 1], ReduceOp.SUM)), dtype
        assert same(before, in_order(everyone[:rank], ReduceOp.SUM) if rank else mine), dtype


@pytest.mark.four_ranks
@pytest.mark.parametrize("reductions", ["fast", "ordered"])
def test_no_part_is_taken_for_another_one_whoever_is_late(reductions, world_with):
    world_with(reductions=reductions, ranks_per_node=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    late = np.random.default_rng(rank)
    for turn in range(20):
        numbers = np.arange(300_000) % 1000 + turn
        whole = numbers * (size * (size + 1) // 2)
        time.sleep(late.choice([0, 0, 1e-3]))
        x = numbers * (rank + 1)
        dist.all_reduce(x)
        assert np.array_equal(x, whole), turn
        x = numbers * (rank + 1)
        dist.reduce(x, turn % size)
        assert rank != turn % size or np.array_equal(x, whole), turn
        part = np.empty(numbers.size // size, int)
        dist.stream.reduce_scatter(part, numbers * (rank + 1))
        assert np.array_equal(part, whole[rank * part.size : (rank + 1) * part.size]), turn


def test_plans_works_and_gradients_keep_the_order_between_nodes(world_with):
    world_with(reductions="ordered", ranks_per_node=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [given(each, np.float64, 1000) for each in range(size)]
    expected = in_order(everyone, ReduceOp.SUM)
    planned, started = everyone[rank].copy(), everyone[rank].copy()
    plan = dist.plan_all_reduce(planned)
    plan.start().wait()
    dist.all_reduce(started, sync_op=False).wait()
    assert same(planned, expected)
    assert same(started, expected)
    plan.free()
    averaged = dist.average_gradients({"weight": everyone[rank].copy()})
    assert same(averaged["weight"], in_order(everyone, ReduceOp.AVG))


def test_what_has_no_order_stays_with_mpi(world_with):
    world_with(reductions="ordered", ranks_per_node=1)
    size = dist.get_world_size()
    for x, op, expected in [
        (np.full(3, 2), ReduceOp.SUM, 2 * size),
        (np.arange(3.0), ReduceOp.MAX, np.arange(3.0)),
        (np.full(3, 2), ReduceOp.PROD, reduce(lambda a, b: a * b, [2] * size)),
    ]:
        dist.all_reduce(x, op)
        assert (x == expected).all()
