"""The threads that run calls: `Pool`; and what gives up calls: `Clock`."""

import contextlib
import threading
import time

import pytest

from hpcdist.rpc.clock import Clock
from hpcdist.rpc.future import Future
from hpcdist.rpc.serve import Pool, as_call

PATIENCE_S = 60


@pytest.fixture
def make():
    pools = []

    def pool(keep=2, most=4):
        pools.append(Pool(keep, most, contextlib.nullcontext))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()


def test_as_many_calls_run_at_a_time_as_are_allowed(make):
    for most in (1, 3, 7):
        pool, lock, now, top = make(most=most), threading.Lock(), [0], [0]
        all_run, ended = threading.Semaphore(0), threading.Semaphore(0)
        gate = threading.Event()

        def call(lock=lock, now=now, top=top, all_run=all_run, gate=gate, ended=ended):
            with lock:
                now[0] += 1
                top[0] = max(top[0], now[0])
            all_run.release()
            assert gate.wait(PATIENCE_S)
            with lock:
                now[0] -= 1
            ended.release()

        for _ in range(3 * most):
            pool.submit(call)
        for _ in range(most):
            assert all_run.acquire(timeout=PATIENCE_S)
        gate.set()
        for _ in range(3 * most):
            assert ended.acquire(timeout=PATIENCE_S)
        assert top[0] == most


def test_calls_that_wait_for_futures_let_others_run(make):
    pool, last = make(most=1), Future("the last")
    ended = threading.Semaphore(0)

    def wait(future):
        with as_call(pool):
            future.wait(PATIENCE_S)
        ended.release()

    for _ in range(20):
        pool.submit(lambda: wait(last))
    pool.submit(lambda: last.set_result(1))
    for _ in range(20):
        assert ended.acquire(timeout=PATIENCE_S)


def test_a_call_that_fails_keeps_no_place(make):
    pool, ended = make(most=1), threading.Event()
    for _ in range(5):
        pool.submit(lambda: 1 // 0)
    pool.submit(ended.set)
    assert ended.wait(PATIENCE_S)


def test_the_clock_runs_tasks_at_their_times_in_order():
    threads, done, last = [], [], threading.Event()

    def spawn(task):
        threads.append(threading.Thread(target=task))
        threads[-1].start()

    clock, now = Clock(spawn), time.monotonic()
    clock.at(now + 0.1, lambda: done.append(3) or last.set())
    clock.at(now + 0.02, lambda: done.append(1))
    clock.at(now + 0.02, lambda: done.append(2))
    assert last.wait(PATIENCE_S)
    assert done == [1, 2, 3]
    assert time.monotonic() >= now + 0.1
    clock.at(now + 1e6, done.clear)
    clock.stop()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert done
