"""A signal on any rank stops all ranks at the same step."""

import os
import signal

import numpy as np
import pytest

import hpcdist as dist


@pytest.fixture(autouse=True)
def _listening():
    forget = dist.on_preempt()
    yield
    forget()


def steps_until_stop(signalled, group=None):
    """Return after how many steps `should_stop` said so; this rank gets a signal in step 3."""
    for step in range(1, 10):
        if step == 3 and signalled:
            os.kill(os.getpid(), signal.SIGUSR1)
        if dist.should_stop(group):
            return step
    return None


def same_everywhere(value):
    found = []
    dist.all_gather_object(found, value)
    return set(found)


@pytest.mark.parametrize("which", ["first", "last", "every"])
def test_a_signal_on_a_rank_stops_all_ranks_at_the_same_step(rank, size, which):
    signalled = {"first": rank == 0, "last": rank == size - 1, "every": True}[which]
    assert same_everywhere(steps_until_stop(signalled)) == {3}


def test_without_a_signal_no_rank_stops():
    assert same_everywhere(steps_until_stop(False)) == {None}


def test_handlers_of_all_ranks_are_called_and_may_communicate(rank, size):
    sums = []

    def save(number):
        total = np.array([int(number)])
        dist.all_reduce(total)
        sums.append(int(total[0]))

    forget = dist.on_preempt(save)
    assert steps_until_stop(rank == size - 1) == 3
    assert sums == [size * signal.SIGUSR1]
    forget()


@pytest.mark.filterwarnings("ignore::hpcdist.NotInGroupWarning")
def test_a_group_agrees_by_itself(rank, size):
    group = dist.new_group([0])
    if rank == 0:
        assert steps_until_stop(True, group) == 3
    else:
        assert dist.should_stop(group) is False
    dist.barrier()
