"""Plans of small operations, in slots of the memory that the ranks of a node share."""

import time

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.transport.shm.control import PAYLOAD

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")
SUM = dist.ReduceOp.SUM


@pytest.fixture(autouse=True)
def _slots_here(size, world):
    if size > 1 and world.transport.hot is None:
        pytest.skip("the ranks do not share memory by the compiled kernel")


def planned(rank, size, root):
    """Return for each verb its arguments, what goes in and what comes out."""
    at_root, one, whole = rank == root, np.zeros(3), np.zeros(3 * size)
    parts, blocks = [np.zeros(3) for _ in range(size)], [np.zeros(3) for _ in range(size)]
    return {
        "barrier": ((), one, one),
        "all_reduce": ((one,), one, one),
        "reduce": ((one, root), one, one),
        "reduce_scatter": ((one, whole), whole, one),
        "broadcast": ((one, root), one, one),
        "all_gather": ((whole, one), one, whole),
        "gather": ((one, parts if at_root else None, root), one, parts),
        "scatter": ((one, blocks if at_root else None, root), blocks, one),
        "alltoall": ((parts, blocks), blocks, parts),
        "alltoall_single": ((whole, whole.copy()), one, whole),
    }


def fill(arrays, value):
    for number, each in enumerate(arrays if isinstance(arrays, list) else [arrays]):
        each[:] = value + number


@pytest.mark.parametrize("verb", [*planned(0, 1, 0)])
def test_a_plan_gives_at_each_start_what_the_call_gives(verb, rank, size):
    root = size - 1
    args, given, taken = planned(rank, size, root)[verb]
    called, given_too, taken_too = planned(rank, size, root)[verb]
    plan = getattr(dist, f"plan_{verb}")(*args)
    for step in range(5):
        fill(given, 10.0 * rank + step)
        fill(given_too, 10.0 * rank + step)
        getattr(dist, verb)(*called)
        if rank == step % size:
            time.sleep(1e-3)
        work = plan.start()
        assert work.wait() is True
        assert work.is_completed()
        if verb != "reduce" or rank == root:
            assert np.array_equal(taken, taken_too)
    plan.free()


def test_a_plan_sends_what_arrays_hold_that_cannot_be_sent_as_they_lie(rank, size):
    apart, out = np.zeros((3, 2))[:, 0], np.zeros((size, 3))
    plan = dist.plan_all_gather(out, apart)
    for step in range(3):
        apart[:] = 10 * rank + step
        plan.start().wait()
        assert (out == 10 * np.arange(size)[:, None] + step).all()
    plan.free()


def test_the_works_of_two_plans_are_waited_for_in_any_order(rank, size):
    x, y = np.zeros(1), np.zeros(1)
    first, second = dist.plan_all_reduce(x), dist.plan_all_reduce(y)
    for step in range(20):
        x[:], y[:] = step, 1
        works = [first.start(), second.start()]
        dist.barrier()  # other operations of the group may come in between
        for work in works if (rank + step) % 2 else reversed(works):
            work.wait()
        assert (x[0], y[0]) == (size * step, size)
    first.free()
    second.free()


def test_slots_that_all_ranks_have_given_back_are_taken_again(world, rank, size):
    for _ in range(3):
        arrays = [np.full(2, float(n)) for n in range(20)]
        plans = [dist.plan_all_reduce(each) for each in arrays]
        for plan in plans:
            plan.start().wait()
        assert all((each == size * n).all() for n, each in enumerate(arrays))
        for plan in plans:
            plan.free()
    if size > 1:
        assert len(world.transport._plans._slots._pools) <= 3


def test_what_does_not_fit_or_is_uneven_is_planned_otherwise(rank, size):
    large = np.ones(PAYLOAD)
    plan = dist.plan_all_reduce(large)
    plan.start().wait()
    assert (large == size).all()
    plan.free()
    out, mine = [np.zeros(1 + r) for r in range(size)], np.full(1 + rank, float(rank))
    plan = dist.plan_all_gather(out, mine)
    plan.start().wait()
    assert all((each == r).all() for r, each in enumerate(out))
    plan.free()


def test_ranks_that_plan_different_things_are_told(rank, size):
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    with pytest.raises(dist.MismatchError):
        dist.plan_all_reduce(np.zeros(2 + (rank == 0)))


def test_a_wait_that_is_too_short_can_be_repeated(rank, size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    x = np.ones(1)
    plan = dist.plan_all_reduce(x)
    if rank == 0:
        work = plan.start()
        with pytest.raises(dist.CollectiveTimeout):
            work.wait(1e-3)
        dist.barrier()
    else:
        dist.barrier()
        work = plan.start()
    work.wait()
    assert x[0] == size
    plan.free()
