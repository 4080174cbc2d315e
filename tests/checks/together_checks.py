"""What `together` promises at any number of ranks: sentences for simulated ranks and for MPI."""

import contextlib
from collections import Counter

import numpy as np
import pytest

import hpcdist as dist

CHECKS = []


class Drill(Exception):
    """What ranks fail with."""


def sentence(check):
    CHECKS.append(check)
    return check


def in_step():
    """All ranks are: the next operation of the group is for all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.array([rank + 1])
    dist.all_reduce(x)
    assert x[0] == size * (size + 1) // 2


def expected(failing):
    """Return the class of what this rank raises when the ranks `failing` do."""
    return Drill if dist.get_rank() in failing else dist.RemoteError


def last():
    return dist.get_world_size() - 1


@sentence
def a_block_without_failure_is_just_a_block():
    with dist.together() as ranks:
        x = np.ones(3)
        dist.all_reduce(x)
    assert x[0] == ranks.size == dist.get_world_size()
    in_step()


@sentence
def a_listener_that_fails_at_any_begin_keeps_no_block_from_its_end():
    failing = dist.get_rank() == last()

    def fails(event):
        if failing and dist.get_rank() == last():
            raise Drill(event.name)

    unsubscribe = dist.subscribe(fails)
    with dist.together():
        pass
    unsubscribe()
    in_step()


@sentence
def the_rank_that_fails_raises_its_own_and_the_others_know_all_of_it():
    own = Drill("no such file")
    with pytest.raises(expected({last()})) as caught, dist.together():
        if dist.get_rank() == last():
            raise own
    if dist.get_rank() == last():
        assert caught.value is own
    else:
        assert caught.value.rank == last()
        assert f"rank {last()} failed with together_checks.Drill: no such file" in str(caught.value)
        assert "raise own" in caught.value.traceback
    in_step()


@sentence
def whoever_waits_in_an_operation_of_the_group_is_told_there():
    with pytest.raises(expected({last()})) as caught, dist.together():
        if dist.get_rank() == last():
            raise Drill("in the middle")
        dist.all_reduce(np.ones(5))
    if dist.get_rank() != last():
        assert caught.value.rank == last()
        assert "in the middle" in str(caught.value)
        assert "raise Drill" in caught.value.traceback
    in_step()


@sentence
def ranks_may_be_in_different_operations_when_one_fails():
    works = []
    with pytest.raises(expected({last()})), dist.together():
        rank = dist.get_rank()
        if rank == last():
            raise Drill
        if rank % 2:
            works.append(dist.all_reduce(np.ones(2), sync_op=False))
        else:
            dist.all_gather_object([], rank)
    for work in works:
        with pytest.raises(dist.RemoteError):
            work.wait()
    in_step()


@sentence
def asynchronous_operations_that_nobody_waits_for_change_nothing():
    works = []
    with pytest.raises(expected({last()})) as caught, dist.together():
        if dist.get_rank() == last():
            raise Drill("before them")
        works = [dist.all_reduce(np.ones(2), sync_op=False) for _ in range(3)]
    if dist.get_rank() != last():
        assert caught.value.rank == last()
        assert "before them" in str(caught.value)
    for work in works:
        with pytest.raises((dist.RemoteError, dist.MismatchError)):
            work.wait()
    in_step()


@sentence
def whoever_hides_the_error_and_goes_on_hears_of_it_at_the_end():
    with pytest.raises(expected({0})) as caught, dist.together():
        if dist.get_rank() == 0:
            raise Drill("the first one")
        for _ in range(3):
            with contextlib.suppress(dist.HpcdistError):
                dist.all_reduce(np.ones(2))
    if dist.get_rank() != 0:
        assert caught.value.rank == 0
        assert "the first one" in str(caught.value)
    in_step()


@sentence
def of_several_failures_each_rank_raises_its_own_and_the_rest_the_first():
    failing = {max(last() - 1, 0), last()}
    with pytest.raises(expected(failing)) as caught, dist.together():
        if dist.get_rank() in failing:
            raise Drill(f"of rank {dist.get_rank()}")
    if dist.get_rank() in failing:
        assert f"of rank {dist.get_rank()}" in str(caught.value)
    else:
        assert caught.value.rank == min(failing)
    in_step()


@sentence
def a_rank_that_refuses_an_operation_while_another_one_fails_leaves_nobody_waiting():
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        return
    kinds = {0: Drill, 1: dist.UsageError}
    with pytest.raises(kinds.get(rank, dist.RemoteError)), dist.together():
        if rank == 0:
            raise Drill
        dist.all_gather_object([], (lambda: None) if rank == 1 else rank)
    in_step()


@sentence
def errors_inside_a_block_may_be_caught_there():
    with dist.together():
        try:
            raise Drill
        except Drill:
            pass
        with pytest.raises(expected({0})), dist.together():
            if dist.get_rank() == 0:
                raise Drill
        in_step()
    in_step()


@sentence
def a_failure_leaves_nested_blocks_one_after_the_other():
    with pytest.raises(expected({last()})), dist.together(), dist.together(), dist.together():
        if dist.get_rank() == last():
            raise Drill
    in_step()


@sentence
def a_rank_may_fail_outside_the_block_that_others_are_in():
    with pytest.raises(expected({last()})) as caught, dist.together():
        if dist.get_rank() == last():
            raise Drill("further out")
        with dist.together():
            dist.barrier()
    if dist.get_rank() != last():
        assert caught.value.rank == last()
    in_step()


@sentence
def a_rank_may_come_to_the_inner_end_while_another_one_fails_further_out():
    with pytest.raises(expected({0})) as caught, dist.together():
        if dist.get_rank() == 0:
            raise Drill("further out")
        with dist.together():
            pass
    if dist.get_rank() != 0:
        assert "further out" in str(caught.value)
    in_step()


@sentence
def a_block_that_not_all_ranks_enter_is_an_error_on_all():
    if dist.get_world_size() == 1:
        return
    with pytest.raises((dist.MismatchError, dist.RemoteError)), dist.together():
        if dist.get_rank() == 0:
            with dist.together():
                pass
    in_step()


@sentence
def an_operation_that_only_one_rank_has_in_its_block_is_an_error_on_all():
    if dist.get_world_size() == 1:
        return
    with pytest.raises(dist.MismatchError, match=r"end of a block of hpcdist\.together"):
        with dist.together():
            if dist.get_rank() == 0:
                dist.all_gather_object([], "only here")
    in_step()


@sentence
def blocks_may_end_in_another_order_than_they_began():
    outer, inner = dist.together(), dist.together()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    with dist.together():
        in_step()


@sentence
def interrupts_and_exits_are_told_too():
    for kind in (KeyboardInterrupt, SystemExit):
        wanted = kind if dist.get_rank() == 0 else dist.RemoteError
        with pytest.raises(wanted) as caught, dist.together():
            if dist.get_rank() == 0:
                raise kind("stop")
        if dist.get_rank() != 0:
            assert f"rank 0 failed with {kind.__name__}: stop" in str(caught.value)
        wanted = kind if dist.get_rank() == 0 else dist.RemoteError
        with pytest.raises(wanted):
            dist.together().lead(_raise, kind("stop"))
    in_step()


@sentence
def an_interrupt_as_an_inner_block_begins_leaves_no_block_behind():
    def begin():
        with dist.together():
            if dist.get_rank() == last():
                dist.together().__enter__()  # and `with` never comes to its block
                raise KeyboardInterrupt
            in_step()

    with pytest.raises(KeyboardInterrupt if dist.get_rank() == last() else dist.RemoteError):
        begin()
    with dist.together():
        in_step()


class Line:
    """A model of one parameter."""

    def __init__(self):
        self.w = dist.Parameter(np.zeros(4))
        self.b = dist.Parameter(np.zeros(2))

    def named_parameters(self):
        return [("w", self.w), ("b", self.b)]


@sentence
def a_training_loop_goes_on_after_the_step_in_which_a_rank_failed():
    line = Line()
    model = dist.DataParallel(line, comm_buffer_size=0)
    rank, size = dist.get_rank(), dist.get_world_size()
    done = []
    for step in range(4):
        try:
            with dist.together():
                if step == 1 and rank == last():
                    raise Drill
                line.b.grad = np.full(2, float(rank))
                line.w.grad = np.full(4, float(rank))
                model.synchronize()
                done.append(step)
        except expected({last()}):
            assert step == 1
            model.zero_grad()
        else:
            assert line.w.grad[0] == line.b.grad[0] == (size - 1) / 2
            model.zero_grad()
    assert done == [0, 2, 3]
    in_step()


@sentence
def ranks_of_a_group_are_by_themselves():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.get_group().split(rank % 2)
    first = rank % 2
    with pytest.raises(Drill if rank == first else dist.RemoteError) as caught:
        with dist.together(group):
            if rank == first:
                raise Drill(f"of {first}")
            dist.barrier(group)
    if rank != first:
        assert caught.value.rank == first
    with dist.together(group):
        pass
    assert dist.together(group).lead(dist.get_rank) == first
    in_step()
    other = dist.new_group([0])
    if size > 1 and rank:
        with pytest.raises(dist.UsageError, match="is not in group"):
            dist.together(other)


@sentence
def the_first_rank_does_it_and_everyone_has_the_result():
    called = []

    def download(what, *, times):
        called.append(dist.get_rank())
        return {what: np.arange(3) * times}

    got = dist.together().lead(download, "data", times=2)
    assert got["data"].tolist() == [0, 2, 4]
    assert called == ([0] if dist.get_rank() == 0 else [])
    in_step()


@sentence
def what_the_first_rank_fails_with_is_raised_on_all():
    with pytest.raises(expected({0})) as caught:
        dist.together().lead(_raise, Drill("no network"))
    if dist.get_rank():
        assert caught.value.rank == 0
        assert "rank 0 failed with together_checks.Drill: no network" in str(caught.value)
        assert "def _raise" not in caught.value.traceback
        assert "raise error" in caught.value.traceback
    in_step()


@sentence
def a_result_that_does_not_pickle_is_an_error_on_all():
    if dist.get_world_size() > 1:
        with pytest.raises((dist.UsageError, dist.RemoteError), match="cannot be pickled"):
            dist.together().lead(lambda: lambda: None)
    in_step()


PICKLED_BY = Counter()


class Told:
    """Counts by rank how often it is pickled."""

    def __reduce__(self):
        PICKLED_BY[dist.get_rank()] += 1
        return Told, ()


@sentence
def what_ranks_share_each_of_them_pickles_once():
    before = PICKLED_BY[dist.get_rank()]
    found = dist.together().share(Told)
    assert len(found) == dist.get_world_size()
    assert PICKLED_BY[dist.get_rank()] - before <= 1


def _raise(error):
    raise error
