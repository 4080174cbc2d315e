"""What holds for `rpc.Executor` on any number of ranks; much of it is what CPython promises."""

import asyncio
import functools
import itertools
import threading
import uuid
import weakref
from collections import Counter, defaultdict
from concurrent import futures

import numpy as np
import pytest
from checks import Checks, with_rpc

import hpcdist as dist

check = Checks()
PATIENCE_S = 60
GATES = defaultdict(threading.Event)
"""What holds up tasks until a check opens it, by a name that nobody else has."""


def with_executor(function=None, **options):
    """Let a check run between init_rpc and shutdown, with an executor."""
    if function is None:
        return functools.partial(with_executor, **options)

    @with_rpc
    @functools.wraps(function)
    def run():
        with dist.rpc.Executor(**options) as executor:
            function(executor)

    return run


class Gate:
    """Holds up the tasks of this rank's executor, whichever rank they run on."""

    def __init__(self):
        self.name = uuid.uuid4().hex

    def open(self):
        for rank in range(dist.get_world_size()):
            dist.rpc.rpc_sync(rank, open_gate, (self.name,))


def open_gate(name):
    GATES[name].set()


def pass_gate(name, value=None):
    assert GATES[name].wait(PATIENCE_S)
    return value


def fail(error):
    raise error


def given(*args, **kwargs):
    return args, kwargs


def scaled(array, factor):
    return array * factor


def where(_=None):
    return dist.get_rank()


def workers():
    """Return the ranks that run tasks of an executor made without arguments."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    return others or [dist.get_rank()]


# ---- submit


@check
@with_executor
def a_task_returns_its_result(executor):
    assert executor.submit(pow, 2, 8).result() == 256
    array = np.arange(100_000.0)
    np.testing.assert_array_equal(executor.submit(scaled, array, factor=3).result(), 3 * array)


@check
@with_executor
def keywords_of_a_task_may_have_any_name(executor):
    future = executor.submit(given, 1, self=2, fn=3, to=4, timeout=5)
    assert future.result() == ((1,), {"self": 2, "fn": 3, "to": 4, "timeout": 5})
    with pytest.raises(TypeError):
        executor.submit()


@check
@with_executor
def tasks_run_on_all_other_ranks(executor):
    assert set(executor.map(where, range(40))) == set(workers())


@check
@with_executor
def what_a_task_raises_its_future_raises(executor):
    future = executor.submit(fail, ZeroDivisionError("none of that"))
    assert isinstance(future.exception(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError, match="none of that"):
        future.result()
    assert executor.submit(abs, -1).result() == 1


@check
@with_executor
def what_cannot_be_sent_fails_in_its_future(executor):
    future = executor.submit(given, threading.Lock())
    with pytest.raises(dist.UsageError, match="cannot pickle"):
        future.result(PATIENCE_S)
    assert executor.submit(abs, -1).result() == 1


@check
@with_executor
def a_task_that_calls_exit_ends_itself_only(executor):
    assert executor.submit(fail, SystemExit(3)).exception() is not None
    assert executor.submit(abs, -1).result() == 1


@check
@with_executor
def a_rank_runs_one_task_at_a_time(executor):
    gate, places = Gate(), workers()
    begun = [executor.submit(pass_gate, gate.name, each) for each in range(len(places) + 1)]
    last = begun[-1]
    assert not futures.wait(begun, timeout=0.1).done
    assert not last.running()
    gate.open()
    assert [future.result() for future in begun] == list(range(len(places) + 1))


@check
@with_executor(tasks_per_rank=3)
def a_rank_runs_as_many_tasks_at_once_as_it_is_told(executor):
    gate = Gate()
    busy = [executor.submit(pass_gate, gate.name) for _ in range(2 * len(workers()))]
    assert executor.submit(abs, -1).result(PATIENCE_S) == 1
    gate.open()
    assert {future.result() for future in busy} == {None}


@check
@with_executor
def tasks_go_to_the_rank_that_is_free(executor):
    gate, places = Gate(), workers()
    held = executor.submit(pass_gate, gate.name, 0)
    if len(places) > 1:
        ran = Counter(executor.submit(where).result(PATIENCE_S) for _ in range(12))
        assert set(ran) < set(places)
        assert len(ran) == len(places) - 1
        assert max(ran.values()) - min(ran.values()) <= 1
    gate.open()
    assert held.result() == 0


# ---- map


@check
@with_executor
def map_keeps_the_order(executor):
    assert list(executor.map(pow, range(10), range(10))) == [n**n for n in range(10)]
    assert list(executor.map(pow, range(10), range(3))) == [1, 1, 4]
    assert list(executor.map(abs, [])) == []


@check
@with_executor
def map_takes_chunks(executor):
    expected = [n**2 for n in range(40)]
    for size in (1, 6, 40, 1000):
        assert list(executor.map(pow, range(40), [2] * 40, chunksize=size)) == expected
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="chunksize"):
            executor.map(pow, [2], [2], chunksize=wrong)


@check
@with_executor
def map_raises_in_the_place_of_what_failed(executor):
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert next(results) == (0, 1)
    assert next(results) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


@check
@with_executor
def map_has_a_time_limit(executor):
    gate = Gate()
    results = executor.map(pass_gate, [gate.name] * 2, range(2), timeout=0.1)
    with pytest.raises(futures.TimeoutError):
        next(results)
    gate.open()


@check
@with_executor
def map_reads_no_further_than_its_buffer(executor):
    counter = itertools.count()
    results = executor.map(abs, counter, buffersize=3)
    assert next(counter) == 3
    assert [next(results) for _ in range(5)] == [0, 1, 2, 4, 5]
    assert next(counter) == 9
    results.close()
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="buffersize"):
            executor.map(abs, [1], buffersize=wrong)


@check
@with_executor
def a_map_that_is_given_up_cancels_what_has_not_begun(executor):
    gate = Gate()
    results = executor.map(pass_gate, [gate.name] * 100, range(100), chunksize=2)
    opened = executor.submit(abs, -1)
    results.close()
    gate.open()
    assert opened.result(PATIENCE_S) == 1


# ---- futures


@check
@with_executor
def a_task_that_waits_can_be_cancelled_and_one_that_runs_cannot(executor):
    gate = Gate()
    running = [executor.submit(pass_gate, gate.name) for _ in workers()]
    waiting = executor.submit(abs, -1)
    while not all(future.running() for future in running):
        threading.Event().wait(0.01)
    assert waiting.cancel()
    assert waiting.cancelled()
    assert not running[0].cancel()
    gate.open()
    with pytest.raises(futures.CancelledError):
        waiting.result()
    assert futures.wait([*running, waiting], PATIENCE_S).not_done == set()


@check
@with_executor
def futures_can_be_waited_for(executor):
    gate = Gate()
    slow = executor.submit(pass_gate, gate.name)
    wrong = executor.submit(divmod, 1, 0) if len(workers()) > 1 else slow
    if wrong is not slow:
        first = futures.wait([slow, wrong], PATIENCE_S, futures.FIRST_COMPLETED)
        assert first == ({wrong}, {slow})
        assert futures.wait([slow, wrong], PATIENCE_S, futures.FIRST_EXCEPTION) == first
    assert futures.wait([slow, wrong], 0.05).not_done == {slow}
    gate.open()
    assert futures.wait([slow, wrong], PATIENCE_S) == ({slow, wrong}, set())


@check
@with_executor
def futures_come_as_they_are_completed(executor):
    gate = Gate()
    slow = executor.submit(pass_gate, gate.name)
    done = futures.Future()
    done.set_result(None)
    completed = futures.as_completed([slow, done, done], PATIENCE_S)
    assert next(completed) is done
    gate.open()
    assert list(completed) == [slow]
    with pytest.raises(futures.TimeoutError):
        list(futures.as_completed([futures.Future()], timeout=0))


@check
@with_executor
def a_callback_may_submit_and_call_other_ranks(executor):
    told, done = [], threading.Event()

    def go_on(future):
        told.append(future.result())
        told.append(dist.rpc.rpc_sync(workers()[0], abs, (-7,)))
        executor.submit(abs, -8).add_done_callback(end)

    def end(future):
        told.append(future.result())
        told.append(dist.get_rank())
        done.set()

    executor.submit(abs, -6).add_done_callback(go_on)
    assert done.wait(PATIENCE_S)
    assert told == [6, 7, 8, dist.get_rank()]


@check
@with_executor
def nothing_is_kept_of_a_task_that_is_done(executor):
    class Thing:
        pass

    results = [executor.submit(given, Thing).result() for _ in range(2)]
    kept = [weakref.ref(result[0][0]) for result in results]
    del results, Thing
    future = executor.submit(np.zeros, 10)
    array = weakref.ref(future.result())
    del future
    for _ in range(3):  # the thread goes on to other tasks
        executor.submit(abs, -1).result()
    assert array() is None
    del kept


@check
@with_executor
def asyncio_takes_it(executor):
    async def both():
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(executor, pow, 2, power) for power in range(6))
        )

    assert asyncio.run(both()) == [1, 2, 4, 8, 16, 32]


@check
@with_executor
def threads_share_it(executor):
    found = {}

    def use(factor):
        found[factor] = list(executor.map(pow, [factor] * 20, range(20)))

    threads = [threading.Thread(target=use, args=(factor,)) for factor in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {factor: [factor**n for n in range(20)] for factor in range(4)}


@check
@with_executor
def a_task_may_have_an_executor_of_its_own(executor):
    assert list(executor.map(sum_elsewhere, range(3))) == [0, 3, 6]


def sum_elsewhere(n):
    with dist.rpc.Executor(include_self=True) as inner:
        return sum(inner.map(abs, [-n] * 3))


# ---- shutdown


@check
@with_rpc
def after_shutdown_nothing_can_be_submitted():
    executor = dist.rpc.Executor()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(abs, -1)


@check
@with_rpc
def what_was_submitted_is_done_after_shutdown():
    gate = Gate()
    executor = dist.rpc.Executor()
    submitted = [executor.submit(pass_gate, gate.name, n) for n in range(9)]
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="cannot schedule"):
        executor.submit(abs, -1)
    assert not submitted[-1].done()
    gate.open()
    assert [future.result(PATIENCE_S) for future in submitted] == list(range(9))
    executor.shutdown()


@check
@with_rpc
def shutdown_can_cancel_what_has_not_begun():
    gate = Gate()
    executor = dist.rpc.Executor()
    submitted = [executor.submit(pass_gate, gate.name, n) for n in range(50)]
    while not submitted[0].running():
        threading.Event().wait(0.01)
    opener = threading.Timer(0.05, functools.partial(gate_opener(), gate))
    opener.start()
    executor.shutdown(cancel_futures=True)
    assert all(future.done() for future in submitted)
    cancelled = [future.cancelled() for future in submitted]
    assert cancelled[-1]
    assert submitted[0].result() == 0
    assert cancelled == sorted(cancelled)
    assert len([*futures.as_completed(submitted, 0)]) == 50  # waiters have been told
    opener.join()


def gate_opener():
    """Return what opens a gate from a thread that is not this rank's."""
    stop = dist.rpc.agent.require_agent()
    ranks = range(dist.get_world_size())

    def open_it(gate):
        for rank in ranks:
            stop.call(rank, open_gate, (gate.name,), {}, -1).result(PATIENCE_S)

    return open_it


@check
@with_rpc
def an_executor_that_is_dropped_does_what_was_submitted():
    future = dist.rpc.Executor().submit(pow, 2, 5)
    assert future.result(PATIENCE_S) == 32


@check
@with_rpc
def shutdown_in_a_callback_does_not_wait_for_itself():
    executor, done = dist.rpc.Executor(), threading.Event()

    def end(_):
        executor.shutdown()
        done.set()

    executor.submit(abs, -1).add_done_callback(end)
    assert done.wait(PATIENCE_S)
    executor.shutdown()


# ---- which ranks


@check
@with_rpc
def ranks_are_chosen_by_rank_name_and_info():
    rank, size = dist.get_rank(), dist.get_world_size()
    after = (rank + 1) % size
    info = dist.rpc.get_all_worker_infos()[after]
    for to in (after, info.name, info):
        with dist.rpc.Executor(ranks=[to]) as executor:
            assert set(executor.map(where, range(5))) == {after}
    with dist.rpc.Executor(include_self=True) as executor:
        assert set(executor.map(where, range(4 * size))) == set(range(size))


@check
@with_rpc
def the_ranks_of_a_group_run_tasks():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.get_group().split(rank % 2)
    with dist.rpc.Executor(group, include_self=True) as executor:
        assert set(executor.map(where, range(20))) == set(range(rank % 2, size, 2))


@check
@with_rpc
def wrong_ranks_are_told():
    rank = dist.get_rank()
    wrong = [
        ({"ranks": []}, "no rank is left"),
        ({"ranks": [rank], "include_self": False}, "no rank is left"),
        ({"ranks": [rank, rank]}, "twice"),
        ({"ranks": [dist.get_world_size()]}, str(dist.get_world_size())),
        ({"ranks": ["nobody"]}, "nobody"),
        ({"tasks_per_rank": 0}, "tasks_per_rank"),
        ({"group": 3}, "group must be a Group"),
    ]
    for options, words in wrong:
        with pytest.raises(dist.UsageError, match=words):
            dist.rpc.Executor(**options)


@check
def without_rpc_there_is_no_executor():
    dist.init_parallel_env()
    with pytest.raises(dist.UsageError, match="init_rpc"):
        dist.rpc.Executor()
