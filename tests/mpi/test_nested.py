"""Operations called while another one is under way on the same thread: told, refused, never hung.

What must come in the middle of a wait comes there: a thread looks at the stack of the main thread,
and sends the signal once that waits; the other ranks join when the handler has run.
"""

import contextlib
import signal
import sys
import threading
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.comm.session import current_session
from hpcdist.transport.mpi.requests import Receive
from hpcdist.transport.waiting.polling import add_errand, is_at_errands, remove_errand
from hpcdist.transport.waiting.queue import refusal

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")

REFUSED = "in the middle of another one of the same group"
TAG = 4711


@pytest.fixture
def hears():
    """Subscribe a listener for the test."""
    ends = []
    yield lambda listener: ends.append(dist.subscribe(listener))
    for end in ends:
        end()


@pytest.fixture
def interrupted(rank, size):
    """Call `operation` on all ranks; on the first one `handler` runs in the middle of it."""
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    main, came = threading.get_ident(), threading.Event()

    def is_in_finalizer(frame):
        while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
            frame = frame.f_back
        return frame is not None

    def waits():
        frame = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name in ("_poll", "_await_end"):
                return True
            frame = frame.f_back
        return False

    def interrupt(stop):
        while not stop.wait(1e-3):
            if waits():
                signal.pthread_kill(main, signal.SIGUSR1)
                came.wait()
                came.clear()

    def call(operation, handler, elsewhere=None):
        """The others do `elsewhere` first, which the handler may take part in."""
        if rank:
            MPI.COMM_WORLD.recv(source=0, tag=TAG)
            if elsewhere is not None:
                elsewhere()
            return operation()

        def handle(_, frame):
            if not is_in_finalizer(frame):  # which would keep what the handler raises
                stop.set()
            came.set()
            if not stop.is_set():
                return
            if elsewhere is not None:
                tell()
            try:
                handler()
            finally:
                tell()

        told = []

        def tell():
            for each in range(1, size) if not told else ():
                MPI.COMM_WORLD.send(None, each, TAG)
            told.append(True)

        previous, stop = signal.signal(signal.SIGUSR1, handle), threading.Event()
        interrupter = threading.Thread(target=interrupt, args=(stop,))
        interrupter.start()
        try:
            result = operation()
            assert told
            return result
        finally:
            stop.set()
            interrupter.join()
            signal.signal(signal.SIGUSR1, previous)

    return call


@pytest.fixture
def at_errands(rank, size):
    """Arrange that `handler` runs in the middle of the next errands of the first rank.

    What is returned waits for this on the other ranks.
    """
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    main, ends = threading.get_ident(), []

    def arrange(handler):
        if rank:
            return lambda: MPI.COMM_WORLD.recv(source=0, tag=TAG)

        def handle(*_):
            for each in range(1, size):
                MPI.COMM_WORLD.send(None, each, TAG)
            handler()

        def errand(waited):
            if threading.get_ident() == main and not told:
                told.append(True)
                signal.raise_signal(signal.SIGUSR1)

        told, previous = [], signal.signal(signal.SIGUSR1, handle)
        add_errand(errand)
        ends.extend(
            [lambda: remove_errand(errand), lambda: signal.signal(signal.SIGUSR1, previous)]
        )
        return lambda: None

    yield arrange
    for end in ends:
        end()


def total(size):
    return size * (size + 1) // 2


def summed(rank, sync_op=True, group=None):
    x = np.array([rank + 1.0])
    work = dist.all_reduce(x, sync_op=sync_op, group=group)
    return x if sync_op else (x, work)


# ---- signal handlers


@pytest.mark.parametrize(
    "nested",
    [
        lambda: dist.barrier(),
        lambda: dist.all_reduce(np.ones(1)),
        lambda: dist.all_gather_object([], "x"),
        lambda: dist.all_reduce(np.ones(1 << 20)),
        lambda: dist.plan_all_reduce(np.ones(1)),
        lambda: dist.destroy_process_group(),
    ],
    ids=["barrier", "all_reduce", "object", "large", "plan", "destroy"],
)
def test_a_signal_handler_is_refused_and_the_operation_goes_on(interrupted, rank, size, nested):
    said = []

    def handler():
        with pytest.raises(dist.UsageError, match=REFUSED) as refused:
            nested()
        said.append(str(refused.value))

    assert interrupted(lambda: summed(rank), handler) == total(size)
    assert len(said) == (rank == 0)
    assert all(f"{__file__}:" in each for each in said)


def test_a_refusal_that_leaves_the_handler_is_raised_once_the_operation_has_ended(
    interrupted, rank, size
):
    x = np.array([rank + 1.0])

    def operation():
        if rank:
            dist.all_reduce(x)
        else:
            with pytest.raises(dist.UsageError, match=REFUSED):
                dist.all_reduce(x)

    interrupted(operation, dist.barrier)
    assert x[0] == total(size)


def test_what_is_refused_takes_no_number(interrupted, hears, rank, size):
    numbers = []
    hears(lambda event: numbers.append((event.name, event.sequence)))

    def refused():
        with pytest.raises(dist.UsageError, match=REFUSED):
            dist.barrier()

    interrupted(lambda: summed(rank), refused)
    with contextlib.suppress(dist.UsageError):  # the refusal, which leaves the handler here
        interrupted(lambda: summed(rank), dist.barrier)
    with contextlib.suppress(dist.UsageError):
        interrupted(lambda: summed(rank), lambda: dist.plan_all_reduce(np.ones(1)))
    numbers.clear()
    dist.scan(np.ones(1))
    assert numbers[0] == numbers[1] == ("scan", numbers[0][1])
    everyone = []
    dist.all_gather_object(everyone, numbers[0])
    assert everyone == [numbers[0]] * size


def test_a_signal_handler_may_issue_an_operation_but_not_wait_for_it(interrupted, rank, size):
    issued = []

    def handler():
        x, work = summed(rank, sync_op=False)
        issued.append((x, work))
        for wait in (lambda: work.wait(), lambda: dist.wait_any([work], 5)):
            with pytest.raises(dist.UsageError, match=REFUSED):
                wait()

    assert interrupted(lambda: summed(rank), handler) == total(size)
    x, work = issued[0] if issued else summed(rank, sync_op=False)
    work.wait()
    assert x[0] == total(size)


def test_a_signal_handler_may_use_another_group(interrupted, rank, size):
    other, sums = dist.new_group(), []

    def elsewhere():
        sums.append(summed(rank, group=other)[0])

    sums.append(interrupted(lambda: summed(rank), elsewhere, elsewhere)[0])
    assert sums == [total(size)] * 2
    dist.destroy_process_group(other)


@pytest.mark.parametrize(
    "wait",
    [
        lambda work: work.wait(),
        lambda work: dist.wait_all([work]),
        lambda work: dist.wait_all([work], timeout=600),
        lambda work: dist.wait_any([work]),
    ],
)
def test_a_refusal_in_the_middle_of_waiting_for_a_message_is_raised_at_its_end(
    at_errands, rank, size, wait
):
    def handler():
        raise refusal()

    x, until_then = np.zeros(1), at_errands(handler)
    if rank == 0:
        work = dist.irecv(x, 1)
        with pytest.raises(dist.UsageError, match=REFUSED):
            wait(work)
        assert x[0] == 7
    until_then()
    if rank == 1:
        dist.send(np.full(1, 7.0), 0)
    assert summed(rank)[0] == total(size)


def test_a_refusal_in_the_middle_of_new_group_is_raised_when_the_group_is_there(
    at_errands, rank, size
):
    def handler():
        raise refusal()

    until_then = at_errands(handler)
    if rank == 0:
        with pytest.raises(dist.UsageError, match=REFUSED):
            dist.new_group()
    until_then()
    if rank:
        dist.new_group()
    group = [*current_session().groups.values()][-1]
    assert group.id > 0
    assert summed(rank, group=group)[0] == total(size)
    dist.destroy_process_group(group)


def test_a_refusal_in_the_middle_of_an_operation_that_fails_is_not_raised_by_the_next(
    interrupted, rank, size
):
    def operation():
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(np.ones(1 if rank == 0 else 2))

    interrupted(operation, dist.barrier)
    assert summed(rank)[0] == total(size)


def test_a_signal_handler_may_communicate_while_a_blocking_operation_is_queued(
    interrupted, rank, size
):
    queue, gate, sums = dist.get_group().transport.queue, threading.Lock(), []

    def operation():
        if rank == 0:
            gate.acquire()
            queue.start(gate.acquire, "gate")
        sums.append(summed(rank)[0])
        if rank:
            sums.append(summed(rank)[0])

    def handler():
        gate.release()
        sums.append(summed(rank)[0])

    interrupted(operation, handler, lambda: None)
    assert sums == [total(size)] * 2


def test_a_signal_handler_may_make_a_group_in_the_middle_of_errands(at_errands, rank, size):
    x, made = np.zeros(1), []

    def make():
        made.append(dist.new_group())

    until_then = at_errands(make)
    if rank == 0:
        dist.recv(x, 1)
        assert x[0] == 7
    until_then()
    if rank:
        make()
    if rank == 1:
        dist.send(np.full(1, 7.0), 0)
    assert summed(rank, group=made[0])[0] == total(size)
    dist.destroy_process_group(made[0])


def test_a_signal_handler_may_not_destroy_a_group_in_the_middle_of_errands(at_errands, rank, size):
    x, group = np.zeros(1), dist.new_group()

    def handler():
        with pytest.raises(dist.UsageError, match=REFUSED):
            dist.destroy_process_group(group)

    until_then = at_errands(handler)
    if rank == 0:
        dist.recv(x, 1)
        assert x[0] == 7
    until_then()
    if rank == 1:
        dist.send(np.full(1, 7.0), 0)
    assert summed(rank, group=group)[0] == total(size)
    dist.destroy_process_group(group)


def _looked_at(works):
    assert not any(work.is_completed() for work in works)
    raise refusal()


@pytest.mark.parametrize(
    "nested",
    [
        lambda works: works[1].wait(),
        lambda works: dist.wait_any(works, 5),
        lambda works: dist.wait_all(works, 5),
        _looked_at,
    ],
    ids=["wait", "wait_any", "wait_all", "is_completed"],
)
def test_a_signal_handler_in_the_middle_of_matching_messages_does_not_match_others(
    monkeypatch, at_errands, rank, size, nested
):
    other, depths, sums, x = dist.new_group(), [], [], np.zeros((2, 1))
    works = [dist.irecv(each, 1, tag=tag) for tag, each in enumerate(x)] if rank == 0 else []

    def interrupt(*_):
        with pytest.raises(dist.UsageError, match=REFUSED):
            nested(works)
        sums.append(summed(rank, group=other)[0])

    until_then = at_errands(lambda: None)  # those of the wait in the handler
    if rank == 0:
        match, inside = Receive.match, []

        def interrupted_match(receive, promised):
            depths.append(len(inside))
            inside.append(True)
            on_main = threading.current_thread() is threading.main_thread()
            if not sums and on_main and not is_at_errands():
                interrupt()  # as Python calls a signal handler: between two instructions
            try:
                return match(receive, promised)
            finally:
                inside.pop()

        monkeypatch.setattr(Receive, "match", interrupted_match)
        for work in works:
            work.wait()
        assert set(depths) == {0}
        assert x.ravel().tolist() == [0, 1]
    until_then()
    if rank:
        sums.append(summed(rank, group=other)[0])
    if rank == 1:
        for tag in range(2):
            dist.send(np.full(1, float(tag)), 0, tag=tag)
    assert sums == [total(size)]
    dist.barrier()
    dist.destroy_process_group(other)


# ---- what runs while an object is unpickled


class Calls:
    """Communicates when it is unpickled."""

    def __init__(self, nested):
        self.nested = nested

    def __reduce__(self):
        return self.nested, ()


def _barrier():
    dist.barrier()


def _send_to_oneself():
    dist.send(np.ones(1), dist.get_rank())


def test_an_object_that_communicates_while_it_is_unpickled_is_refused(rank, size):
    with pytest.raises(dist.UsageError, match=REFUSED):
        dist.all_gather_object([], Calls(_barrier))


def test_a_message_whose_object_sends_while_it_is_unpickled_is_refused(rank, size):
    dist.send_object_list([Calls(_send_to_oneself)], rank)
    with pytest.raises(dist.UsageError, match=REFUSED):
        dist.recv_object_list([None], rank)


# ---- listeners


@pytest.mark.parametrize("phase", ["begin", "end"])
@pytest.mark.parametrize("sync_op", [True, False])
@pytest.mark.parametrize("nested_sync", [True, False])
def test_a_listener_may_communicate_at_the_beginning_and_at_the_end(
    hears, rank, size, phase, sync_op, nested_sync
):
    sums, told = [], []

    def listener(event):
        told.append((event.phase, event.name))
        if event.phase == phase and event.name == "all_reduce":
            x = np.array([rank + 1.0])
            work = dist.all_reduce(x, dist.ReduceOp.MAX, sync_op=nested_sync)
            work.wait()
            sums.append(x[0])

    hears(listener)
    for _ in range(3):
        x = np.array([rank + 1.0])
        dist.all_reduce(x, sync_op=sync_op).wait()
        assert x[0] == total(size)
    dist.barrier()
    assert sums == [size] * 3
    assert told == [("begin", "all_reduce"), ("end", "all_reduce")] * 3 + [
        ("begin", "barrier"),
        ("end", "barrier"),
    ]


def test_what_a_listener_issues_is_told_to_the_others(hears, rank, size):
    told = []

    def communicates(event):
        if event.phase == "end":
            dist.barrier()

    hears(communicates)
    hears(lambda event: told.append((event.phase, event.name)))
    dist.all_reduce(np.ones(1))
    assert sorted(told) == sorted(
        (phase, name) for phase in ("begin", "end") for name in ("all_reduce", "barrier")
    )


def test_a_listener_may_not_wait_for_what_is_to_come_after_it(hears, rank, size):
    said = []

    def listener(event):
        if event.phase == "end" and not said:
            with pytest.raises(dist.UsageError, match="by a listener") as refused:
                later[0].wait()
            said.append(str(refused.value))

    later = []
    hears(listener)
    gate = threading.Lock()
    group = dist.get_group()
    with gate:
        first = group.transport.queue.start(gate.acquire, "gate")
        works = [dist.all_reduce(np.ones(1), sync_op=False) for _ in range(2)]
        later.append(works[1])
    first.wait()
    for work in works:
        work.wait()
    assert len(said) == 1


def test_a_listener_that_is_told_the_end_of_a_message_is_refused(hears, rank, size):
    said = []

    def listener(event):
        if event.phase == "end" and event.name == "recv":
            for nested in (dist.barrier, _send_to_oneself):
                with pytest.raises(dist.UsageError, match="the end of a recv") as refused:
                    nested()
                said.append(str(refused.value))

    hears(listener)
    work = dist.isend(np.ones(1), rank)
    dist.recv(np.zeros(1), rank)
    work.wait()
    assert len(said) == 2


def test_a_listener_may_not_destroy_its_group_on_the_thread_of_the_group(hears, rank, size):
    group, said = dist.new_group(), []

    def listener(event):
        if event.phase == "end" and event.group_id == group.id and not said:
            with pytest.raises(dist.UsageError, match=REFUSED) as refused:
                dist.destroy_process_group(group)
            said.append(str(refused.value))

    hears(listener)
    dist.all_reduce(np.ones(1), group=group, sync_op=False).wait()
    assert len(said) == 1
    assert summed(rank, group=group)[0] == total(size)
    dist.destroy_process_group(group)
