"""Asynchronous operations: their order, their time limits, their errors and their memory."""

import asyncio
import gc
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from mpi4py import MPI
from tiers import first_of

import hpcdist as dist

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")

threads = pytest.mark.skipif(
    MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="this MPI allows one thread only"
)


def test_operations_of_one_group_take_effect_in_the_order_of_their_calls(rank, size):
    x = np.array([rank + 1.0])
    works = [
        dist.all_reduce(x, sync_op=False),
        dist.all_reduce(x, dist.ReduceOp.PROD, sync_op=False),
        dist.broadcast(x, size - 1, sync_op=False),
        dist.barrier(sync_op=False),
    ]
    gathered = []
    works.append(dist.all_gather(gathered, x, sync_op=False))
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    assert gathered[0][0] == (size * (size + 1) / 2) ** size


def test_an_awaited_message_that_does_not_come_is_a_timeout_and_may_still_come(rank, size):
    group, x = dist.new_group(timeout=0.2), np.empty(1, int)

    async def receive():
        work = dist.irecv(x, (rank - 1) % size, group)
        with pytest.raises(dist.CollectiveTimeout, match=r"within 0\.2 s of await"):
            await work
        return work

    work = asyncio.run(receive())
    dist.barrier()
    sent = dist.isend(np.array([rank]), (rank + 1) % size, group)

    async def again():
        while not work.is_completed():  # the sender may be slow
            await asyncio.sleep(0.001)
        return await work

    assert asyncio.run(again()) is work
    assert work.source == x[0] == (rank - 1) % size
    sent.wait()
    dist.destroy_process_group(group)


def test_plans_messages_of_any_size_and_objects_are_awaited(rank, size):
    x, y, got = np.ones(3), np.full(300_000, float(rank)), np.empty(300_000)
    plan = dist.plan_all_reduce(x)

    async def all_of_them():
        below, above, objects = (rank - 1) % size, (rank + 1) % size, [None]
        await asyncio.gather(dist.isend(y, above), dist.irecv(got, below))
        sends = dist.send_object_list([{"from": rank}], above, sync_op=False)
        receive = dist.recv_object_list(objects, below, sync_op=False)
        await asyncio.gather(sends, receive, plan.start())
        await plan.start()
        return objects

    assert asyncio.run(all_of_them()) == [{"from": (rank - 1) % size}]
    assert (got == (rank - 1) % size).all()
    assert (x == size**2).all()
    plan.free()


@pytest.mark.parametrize("count", [3, 300_000])
def test_an_awaited_send_does_not_wait_for_a_receive_that_comes_later(count, rank, size):
    got = np.empty(count)

    async def send_first():
        await dist.isend(np.full(count, float(rank)), (rank + 1) % size)
        await dist.irecv(got, (rank - 1) % size)

    asyncio.run(send_first())
    assert (got == (rank - 1) % size).all()


def test_many_works_may_be_awaited_at_once(rank, size):
    arrays = [np.empty(1, int) for _ in range(20)]

    async def exchange():
        receives = [dist.irecv(x, (rank - 1) % size, tag=tag) for tag, x in enumerate(arrays)]
        sends = [dist.isend(np.array([tag]), (rank + 1) % size, tag=tag) for tag in range(20)]
        await asyncio.gather(*receives, *sends)

    asyncio.run(exchange())
    assert [int(x[0]) for x in arrays] == list(range(20))


@threads
def test_an_asynchronous_call_returns_before_the_others_have_come(rank, size):
    x, word = np.ones(1000), np.zeros(1)
    if rank == size - 1 > 0:
        dist.recv(word, 0)
    work = dist.all_reduce(x, sync_op=False)
    if rank == 0 and size > 1:
        assert not work.is_completed()
        dist.send(word, size - 1)
    assert work.wait() is True
    assert work.is_completed()
    assert (x == size).all()


@threads
def test_overlapping_groups_may_be_used_in_another_order_on_every_rank(rank, size):
    pairs = [(each, (each + 1) % size) for each in range(size)] if size > 2 else [(0, size - 1)]
    groups = [dist.new_group(set(pair)) for pair in pairs if rank in pair]
    for turn in range(5):
        order = groups if (rank + turn) % 2 else groups[::-1]
        arrays = [np.full(2000, rank + 1.0) for _ in order]
        works = [
            dist.all_reduce(x, group=group, sync_op=False)
            for x, group in zip(arrays, order, strict=True)
        ]
        for work in works:
            work.wait()
        for x, group in zip(arrays, order, strict=True):
            assert (x == sum(group.ranks) + group.nranks).all()
    for group in groups:
        dist.destroy_process_group(group)


@threads
def test_two_threads_use_two_groups_at_once(rank, size):
    groups = [dist.new_group() for _ in range(2)]
    wrong = []

    def use(group, number):
        try:
            for turn in range(50):
                x, gathered = np.full(10, number + turn + rank), []
                dist.all_reduce(x, group=group)
                dist.all_gather_object(gathered, (number, turn), group)
                assert (x == size * (number + turn) + size * (size - 1) // 2).all()
                assert gathered == [(number, turn)] * size
        except BaseException as error:
            wrong.append(error)

    users = [threading.Thread(target=use, args=(g, 100 * n)) for n, g in enumerate(groups)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong
    for group in groups:
        dist.destroy_process_group(group)


@threads
@pytest.mark.parametrize("timeout", first_of([0.1, timedelta(seconds=0.1)]))
def test_a_wait_that_times_out_may_be_repeated(timeout, rank, size):
    x, word = np.ones(3), np.zeros(1)
    for other in range(rank if rank == size - 1 else 0):
        dist.recv(word, other)
    work = dist.all_reduce(x, sync_op=False)
    if rank != size - 1:
        with pytest.raises(dist.CollectiveTimeout, match=r"all_reduce.*can be waited for again"):
            work.wait(timeout)
        with pytest.raises(TimeoutError):
            work.wait(0)
        dist.send(word, size - 1)
    work.wait()
    assert (x == size).all()


def test_the_error_of_an_operation_is_raised_by_every_wait(rank, size):
    if size > 1:
        x = np.ones(3 + (rank == 0))
        work = dist.all_reduce(x, sync_op=False)
        for _ in range(2):
            with pytest.raises(dist.MismatchError):
                work.wait()
        with pytest.raises(dist.MismatchError):
            work.synchronize()
        assert work.is_completed()
        assert (x == 1).all()
    work = dist.all_gather_object([], (lambda: 0) if rank == 0 else 0, sync_op=False)
    with pytest.raises(dist.UsageError if rank == 0 else dist.RemoteError, match="pickled"):
        work.wait()


def test_works_need_not_be_waited_for(rank, size):
    arrays = [np.ones(5000) for _ in range(20)]
    for x in arrays:
        dist.all_reduce(x, sync_op=False).detach()
    if size > 1:
        dist.all_reduce(np.ones(1 + rank), sync_op=False).detach()  # nobody asks for its error
    dist.isend(np.array([rank]), (rank + 1) % size)
    got = np.empty(1, int)
    dist.irecv(got, (rank - 1) % size)
    gc.collect()
    dist.wait(arrays[0])
    assert all((x == size).all() for x in arrays)
    dist.barrier()
    deadline = time.monotonic() + 10
    while got[0] != (rank - 1) % size and time.monotonic() < deadline:
        time.sleep(0.001)
    assert got[0] == (rank - 1) % size


@threads
def test_a_work_keeps_its_arrays_alive_and_lets_them_go(rank, size):
    class Watched(np.ndarray):
        pass

    def begin():
        x = np.full(200_000, 1.0).view(Watched)
        gone = weakref.ref(x)
        return dist.all_reduce(x, sync_op=False), gone

    if rank == size - 1:
        time.sleep(0.2)
    work, gone = begin()
    gc.collect()
    work.wait()
    del work
    gc.collect()
    assert gone() is None
    sent, got = dist.isend(np.full(200_000, 7.0), (rank + 1) % size), np.empty(200_000)
    gc.collect()
    trash = [np.zeros(200_000) for _ in range(3)]
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    assert (got == 7).all()
    assert not any(each.any() for each in trash)


@threads
def test_messages_move_while_the_ranks_compute(rank, size):
    given, got = np.full(300_000, float(rank)), np.empty(300_000)
    works = [dist.irecv(got, (rank - 1) % size), dist.isend(given, (rank + 1) % size)]
    deadline = time.monotonic() + 10
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(work.is_completed() for work in works)
    assert (got == (rank - 1) % size).all()


def test_objects_move_asynchronously(rank, size):
    out, scattered, shared = [], [], [np.arange(9000)] if rank == 0 else [None]
    given = [np.full(9000, each) for each in range(size)]
    works = [
        dist.all_gather_object(out, rank, sync_op=False),
        dist.broadcast_object_list(shared, 0, sync_op=False),
        dist.scatter_object_list(scattered, given if rank == 0 else None, sync_op=False),
        dist.send_object_list([rank], (rank + 1) % size, sync_op=False),
    ]
    received = [None]
    dist.recv_object_list(received, (rank - 1) % size, sync_op=False).wait()
    for work in works:
        work.wait()
    assert out == list(range(size))
    assert shared[0][-1] == 8999
    assert (scattered[0] == rank).all()
    assert received == [(rank - 1) % size]


def test_many_messages_in_flight_arrive_in_order_per_tag(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    arrays = [np.empty(1, int) for _ in range(40)]
    receives = [dist.irecv(x, source, tag=each % 4) for each, x in enumerate(arrays)]
    sends = [dist.isend(np.array([each]), to, tag=each % 4) for each in reversed(range(40))]
    for work in receives + sends:
        work.wait()
    for tag in range(4):
        assert [int(x[0]) for x in arrays[tag::4]] == list(range(36 + tag, -1, -4))


def test_plans_refuse_to_be_started_twice_or_after_free(rank, size):
    for make in (
        lambda: dist.plan_all_reduce(np.ones(3)),
        lambda: dist.plan_all_reduce(np.ones(3, "f2")),
        dist.plan_barrier,
    ):
        plan = make()
        work = plan.start()
        work.wait()
        work.wait()
        plan.free()
        plan.free()
        assert work.is_completed()
        with pytest.raises(dist.UsageError, match="freed"):
            plan.start()


def test_a_plan_sends_what_the_array_of_the_root_holds_at_each_start(rank, size):
    whole = np.zeros((3, 4))
    x = whole.T if rank == 0 else np.zeros((4, 3))
    plan = dist.plan_broadcast(x, 0)
    for number in (1, 2, 3):
        x[...] = number if rank == 0 else 0
        plan.start().wait()
        assert (x == number).all()
    plan.free()


def test_listeners_hear_the_beginning_and_the_end_of_every_operation(rank, size):
    seen = []
    stop = dist.subscribe(seen.append)
    dist.all_reduce(np.ones(10))
    dist.all_reduce(np.ones(10), sync_op=False).wait()
    work = dist.isend(np.ones(4, "f4"), rank)
    dist.recv(np.empty(4, "f4"), rank)
    work.wait()
    dist.all_gather_object([], 1)
    if size > 1:
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(np.ones(1 + rank))
    stop()
    dist.barrier()
    for name, nbytes in [("all_reduce", 80), ("send", 16), ("recv", 16), ("all_gather_object", 0)]:
        begins = [event for event in seen if (event.name, event.phase) == (name, "begin")]
        ends = [event for event in seen if (event.name, event.phase) == (name, "end")]
        assert len(begins) == len(ends) > 0
        assert begins[0].nbytes >= nbytes
        assert begins[0].group_id == 0
        assert all(end.time_ns >= begins[0].time_ns for end in ends)
    failed = [type(event.error) for event in seen if event.error is not None]
    assert failed == [dist.MismatchError] * (size > 1)


def test_a_listener_that_fails_calls_the_operation_off_on_all_ranks(rank):
    def fail(event):
        raise KeyError("no such key")

    stop = dist.subscribe(fail) if rank == 0 else lambda: None
    try:
        with pytest.raises((dist.UsageError, dist.RemoteError), match="no such key"):
            dist.all_reduce(np.ones(3))
    finally:
        stop()
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()
