"""The queue of a group: its order, what its works say, time limits."""

import threading
from datetime import timedelta

import pytest

import hpcdist as dist
from hpcdist.transport.waiting.queue import CollectiveQueue, seconds


@pytest.fixture
def queue():
    queue = CollectiveQueue("queue under test")
    yield queue
    queue.close()


def test_a_queue_runs_a_job_at_once_when_nothing_is_ahead(queue):
    assert queue.run(threading.current_thread) is threading.current_thread()


def test_a_queue_keeps_the_order_of_both_kinds_of_jobs(queue):
    done, gate = [], threading.Event()
    queue.start(gate.wait, "gate")
    for number in range(20):
        queue.start(lambda number=number: done.append(number), "job")
    threading.Timer(0.05, gate.set).start()
    queue.run(done.append, "after all of them")
    assert done == [*range(20), "after all of them"]


def test_a_job_does_not_overtake_one_that_is_queued_and_has_not_begun(queue):
    for _ in range(20):
        done = []
        assert queue.turn.take(False)  # as while a job runs on another thread
        work = queue.start(lambda done=done: done.append("first"), "job")
        queue.turn.give_back()
        queue.run(done.append, "second")
        work.wait()
        assert done == ["first", "second"]


def test_a_work_returns_the_result_or_raises_the_error_each_time(queue):
    assert queue.start(lambda: 42, "job").result() == 42
    failing = queue.start(lambda: 1 / 0, "job")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.wait()
    assert failing.is_completed()
    assert queue.run(lambda: "goes on") == "goes on"
    with pytest.raises(ZeroDivisionError):
        queue.run(lambda: 1 / 0)
    assert queue.run(lambda: "goes on") == "goes on"


def test_a_wait_names_the_operation_when_it_gives_up(queue):
    gate = threading.Event()
    work = queue.start(gate.wait, "all_reduce(shape (3,))")
    with pytest.raises(dist.CollectiveTimeout, match=r"all_reduce\(shape \(3,\)\).*0.01 s"):
        work.wait(0.01)
    assert not work.is_completed()
    gate.set()
    assert work.wait(timedelta(seconds=10))


def test_a_job_may_use_its_own_queue(queue):
    def outer():
        return queue.run(lambda: "inner")

    assert queue.start(outer, "job").result() == "inner"


def test_many_threads_may_start_a_queue_at_once():
    def use(queue, done, each):
        queue.start(lambda: done.append(each), "job", detached=True)

    for _ in range(20):
        queue, done = CollectiveQueue("crowded"), []
        users = [threading.Thread(target=use, args=(queue, done, each)) for each in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        queue.run(lambda: None)
        assert sorted(done) == [0, 1, 2, 3]
        assert sum(thread.name == "crowded" for thread in threading.enumerate()) == 1
        assert queue.close(30)


def test_a_queue_that_is_busy_says_so_at_its_end():
    queue, gate = CollectiveQueue("busy"), threading.Event()
    queue.start(gate.wait, "job", detached=True)
    assert not queue.close(patience_s=0.01)
    gate.set()
    assert queue.close(30)


def test_time_limits_are_seconds_timedeltas_or_endless():
    assert seconds(None) is None
    assert seconds(2) == seconds(timedelta(seconds=2)) == 2.0
    assert not threading.Event().wait(min(0.001, seconds(float("inf"))))
    assert 1e9 < seconds(float("inf")) < float("inf")
