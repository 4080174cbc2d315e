"""Groups made, ended and started by several threads: right, or refused with a sentence."""

import sys
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.comm.session import require_session
from hpcdist.transport.mpi.rendezvous import Rendezvous
from hpcdist.transport.waiting.polling import poll

pytestmark = [
    pytest.mark.usefixtures("and_the_world_goes_on"),
    pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="MPI for one thread only"),
]
TAG = 4712


def in_thread(act):
    """Run `act` in a thread and return a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(act()))
    thread.start()

    def result():
        thread.join()
        return results[0]

    return result


def until_told():
    """Wait until a thread of this rank has told the others that it makes a group."""
    while not any(map(_waits_for_the_others, sys._current_frames().values())):
        time.sleep(1e-3)


def _waits_for_the_others(frame):
    inner = []
    while frame is not None and frame.f_code is not Rendezvous.meet.__code__:
        inner.append(frame.f_code)
        frame = frame.f_back
    return frame is not None and poll.__code__ in inner


@pytest.fixture
def overlapping(rank, size):
    """On one rank a thread makes a group while the main thread makes another; on others in turn."""
    if size == 1:
        pytest.skip("a rank alone waits for nobody")

    def make(where, second):
        if rank != where:
            MPI.COMM_WORLD.recv(source=where, tag=TAG)
            group = dist.new_group(name="first")
            with pytest.raises(dist.RemoteError, match=f"because rank {where} cannot take part"):
                dist.new_group(second)
            return group
        first = in_thread(lambda: dist.new_group(name="first"))
        until_told()
        with pytest.raises(dist.UsageError, match="another thread of this rank is in new_group"):
            dist.destroy_process_group()
        for other in range(size):
            if other != where:
                MPI.COMM_WORLD.send(None, other, TAG)
        # The lock is held until the first group is there, for which the others are told now; so
        # that they cannot be too fast, it is held here for the call as well.
        with pytest.raises(dist.UsageError, match="let one thread make and end all groups"):
            _call_while_busy(lambda: dist.new_group(second))
        return first()

    return make


def _call_while_busy(act):
    change = require_session().groups_change
    if not change.lock.acquire(blocking=False):
        return act()
    try:
        return act()
    finally:
        change.lock.release()


@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("second", [None, "reversed"])
def test_of_two_threads_one_makes_its_group_and_the_other_is_refused_on_all_ranks(
    overlapping, rank, size, where, second
):
    ranks = None if second is None else list(reversed(range(size)))
    group = overlapping(where % size, ranks)
    x = np.array([rank])
    dist.all_reduce(x, group=group)
    assert x[0] == size * (size - 1) // 2
    again = dist.new_group()
    assert again.id != group.id
    dist.all_reduce(x, group=again)
    dist.destroy_process_group(again)
    dist.destroy_process_group(group)


def test_two_threads_that_start_get_one_world(rank, size):
    dist.destroy_process_group()
    other = in_thread(dist.init_parallel_env)
    world = dist.init_parallel_env()
    assert other() is world
    x = np.array([1])
    dist.all_reduce(x)
    assert x[0] == size
