"""An interrupted rank leaves an operation, and then uses its memory: see the drill."""

import gc
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext, suppress

import numpy as np
import pytest
from interrupted_at import InterruptError
from interrupted_drill import (
    MAKERS,
    OPERATIONS,
    SIZES,
    TAG,
    WEIGHT,
    all_gather,
    all_reduce,
    alltoall,
    await_first,
    broadcast,
    broadcast_to_it,
    drill,
    interrupts,
    ordinary,
    reduce,
    reduce_scatter,
    shared,
    tell,
)
from mpi4py import MPI

import hpcdist as dist
import hpcdist.comm.hot
from hpcdist.transport.call.call import Barrier
from hpcdist.transport.mpi import messages, transport
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.tuning import Algorithm, TuningRule, TuningTable
from hpcdist.transport.waiting.polling import Ending, poll
from hpcdist.transport.waiting.queue import QueuedWork

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on", "quick_collections")


@pytest.fixture
def group(size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    made = dist.new_group(timeout=60)
    yield made
    dist.destroy_process_group(made)


def interrupt_once(monkeypatch, where, name, meanwhile=lambda: None):
    """Have the next call of a function do something else, and raise an interrupt."""
    usual = getattr(where, name)

    def interrupted(*args):
        monkeypatch.setattr(where, name, usual)
        meanwhile()
        raise InterruptError

    monkeypatch.setattr(where, name, interrupted)


USUAL = [
    (ordinary, "compiled", "100kB"),
    (ordinary, "python", "60kB"),
    (shared, "compiled", "1MB"),
]
PATHS = {"compiled": nullcontext, "python": switched_off}


def combinations():
    for make in MAKERS:
        for path in PATHS:
            for size, nbytes in SIZES.items():
                marks = [] if (make, path, size) in USUAL else [pytest.mark.thorough]
                name = f"{make.__name__}-{path}-{size}"
                yield pytest.param(make, PATHS[path], nbytes, marks=marks, id=name)


def sizes():
    marks = {"small": [], "100kB": [], "60kB": [pytest.mark.thorough]}
    each = [
        pytest.param(nbytes, id=name, marks=marks.get(name, [pytest.mark.thorough]))
        for name, nbytes in SIZES.items()
    ]
    return pytest.mark.parametrize("nbytes", each)


@pytest.mark.parametrize(("make", "path", "nbytes"), [*combinations()])
def test_what_was_lent_is_the_program_s_again(group, make, path, nbytes):
    found = {}
    with path():
        for operation in OPERATIONS:
            wrong = drill(group, operation, make, nbytes)
            if wrong:
                found[operation.__name__] = wrong
    assert found == {}


@pytest.mark.parametrize("way", [Algorithm.ATTACHED, Algorithm.PIPELINED, Algorithm.MPI])
def test_so_it_is_by_every_way(group, way):
    rules = [
        TuningRule(operation, "ordinary", way)
        for operation in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
        if way is not Algorithm.PIPELINED or "reduce" in operation
    ]
    group.transport.use_rules(TuningTable(rules, group.nranks, several_nodes=False))
    found = {}
    for operation in (all_reduce, reduce, reduce_scatter, broadcast, broadcast_to_it, all_gather):
        wrong = drill(group, operation, ordinary, 300_000)
        if wrong:
            found[operation.__name__] = wrong
    assert found == {}


def test_who_leaves_an_operation_that_others_have_ended_by_copies_waits_for_nobody(
    group, monkeypatch
):
    if group.transport.hot is None:
        pytest.skip("without the compiled path nothing lies between it and what goes on after it")
    rules = [TuningRule("all_gather", "ordinary", Algorithm.STAGED)]
    group.transport.use_rules(TuningTable(rules, group.nranks, several_nodes=False))

    def others_end():
        tell(group.nranks)
        for each in range(1, group.nranks):
            MPI.COMM_WORLD.recv(source=each, tag=TAG)

    operate = all_gather(ordinary, 60_000, 1.0)
    if group.rank == 0:
        interrupt_once(monkeypatch, hpcdist.comm.hot, "described", others_end)
        with pytest.raises(InterruptError):
            operate(group)
    else:
        await_first()
        operate(group)
        MPI.COMM_WORLD.send(None, 0, TAG)
    assert group.transport.empty(8) is not None
    dist.barrier(group)


# ---- messages


@pytest.mark.parametrize("path", [*PATHS.values()], ids=[*PATHS])
@sizes()
def test_an_interrupted_send_delivers_what_there_was_to_send(group, path, nbytes):
    rank, size = group.rank, group.nranks
    found, is_boxed = None, group.transport.mail is not None and nbytes <= SIZES["small"]
    with path():
        if rank == 0 and not is_boxed:
            x = ordinary(nbytes, 1.0)
            with interrupts():
                dist.send(x, 1, group=group)
            x[:] = WEIGHT  # the sender's later data
            del x
            weights = [ordinary(nbytes, WEIGHT) for _ in range(4)]
            tell(size)
            del weights
        elif rank == 0:
            dist.send(ordinary(nbytes, 1.0), 1, group=group)
            tell(size)
        else:
            await_first()
            if rank == 1:
                found = ordinary(nbytes, 0.0)
                dist.recv(found, 0, group=group)
    dist.barrier(group)
    if found is not None and nbytes <= 8 << 20:
        assert (found == 1.0).all()


@pytest.mark.parametrize("path", [*PATHS.values()], ids=[*PATHS])
@sizes()
def test_an_interrupted_recv_takes_nothing(group, path, nbytes):
    rank, size = group.rank, group.nranks
    found = weights = None
    with path():
        if rank == 0:
            out = ordinary(nbytes, 0.0)
            with interrupts():
                dist.recv(out, 1, group=group)
            del out
            weights = [ordinary(nbytes, WEIGHT) for _ in range(4)]
            tell(size)
            dist.all_reduce(np.ones(1), group=group)  # a wait, which takes in what has come
            found = ordinary(nbytes, 0.0)
            dist.recv(found, 1, group=group)
        else:
            await_first()
            if rank == 1:
                work = dist.isend(ordinary(nbytes, 1.0), 0, group=group)
            dist.all_reduce(np.ones(1), group=group)
            if rank == 1:
                work.wait()
    dist.barrier(group)
    if rank == 0:
        assert all((each == WEIGHT).all() for each in weights)
        assert (found == 1.0).all()


@pytest.mark.parametrize("nbytes", [100, 60_000, 1 << 20])
def test_an_interrupted_send_of_objects_delivers_what_there_was(group, nbytes):
    rank, size = group.rank, group.nranks
    found = [None]
    if rank == 0:
        x = ordinary(nbytes, 1.0)
        if nbytes > SIZES["small"]:
            with interrupts():
                dist.send_object_list([x], 1, group=group)
        else:
            dist.send_object_list([x], 1, group=group)
        x[:] = WEIGHT
        tell(size)
    else:
        await_first()
        if rank == 1:
            dist.recv_object_list(found, 0, group=group)
    dist.barrier(group)
    assert rank != 1 or (found[0] == 1.0).all()


def test_a_recv_that_an_interrupt_kept_from_being_posted_leaves_nothing_behind(group, monkeypatch):
    matching = group.transport.context.messages.matching
    if group.rank == 0:
        interrupt_once(monkeypatch, type(matching), "post")
        with switched_off(), pytest.raises(InterruptError):
            dist.recv(np.empty(10_000), 1, group=group)
        assert matching.progress.stop() == []
    dist.barrier(group)


def test_an_irecv_that_is_interrupted_when_it_has_been_posted_takes_nothing(group, monkeypatch):
    progress = group.transport.context.messages.matching.progress
    given_up, found = np.zeros(10_000), np.zeros(10_000)
    if group.rank == 0:
        interrupt_once(monkeypatch, type(progress), "keep")
        with pytest.raises(InterruptError):
            dist.irecv(given_up, 1, group=group)
        tell(group.nranks)
        dist.recv(found, 1, group=group)
        assert (found == 1).all()
        assert not given_up.any()
    else:
        await_first()
    if group.rank == 1:
        dist.send(np.ones(10_000), 0, group=group)
    dist.barrier(group)


def test_a_progress_thread_that_an_interrupt_kept_from_starting_starts_with_the_next(
    group, monkeypatch
):
    progress = group.transport.context.messages.matching.progress
    interrupt_once(monkeypatch, threading.Thread, "start")
    with pytest.raises(InterruptError):
        progress.keep(QueuedWork(None, "the first"))
    progress.keep(QueuedWork(None, "the second"))
    assert progress._thread is None or progress._thread.is_alive()
    assert len(progress.stop()) == 2


def test_an_isend_that_is_interrupted_when_it_has_begun_keeps_its_array(group, monkeypatch):
    count = 1 << 18
    if group.rank == 0:
        interrupt_once(monkeypatch, messages, "Send")
        with pytest.raises(InterruptError):
            dist.isend(np.ones(count), 1, group=group)
        later = [np.full(count, WEIGHT) for _ in range(4)]
        tell(group.nranks)
    else:
        await_first()
    if group.rank == 1:
        later = np.zeros(count)
        dist.recv(later, 0, group=group)
        assert (later == 1).all()
    dist.barrier(group)


# ---- objects

INTERRUPTED = []


def interrupted_at_first(value):
    if not INTERRUPTED:
        INTERRUPTED.append(value)
        raise InterruptError
    return value


class Interrupting:
    """An object whose unpickling is interrupted, once."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return interrupted_at_first, (self.value,)


@pytest.mark.parametrize("nbytes", [10, 60_000, 1 << 20])
def test_an_interrupted_recv_of_objects_that_had_come_has_them(group, nbytes):
    INTERRUPTED.clear()
    if group.rank == 0:
        dist.send_object_list([Interrupting(bytes(nbytes))], 1, group=group)
    if group.rank == 1:
        found = [None]
        with pytest.raises(InterruptError):
            dist.recv_object_list(found, 0, group=group)
        assert found == [bytes(nbytes)]
    dist.barrier(group)


def all_gather_object(make, nbytes, value):
    return lambda group: dist.all_gather_object([], make(nbytes, value), group=group)


def broadcast_object_list(make, nbytes, value):
    return lambda group: dist.broadcast_object_list([make(nbytes, value)], 0, group=group)


def broadcast_object_to_it(make, nbytes, value):
    root = MPI.COMM_WORLD.size - 1
    return lambda group: dist.broadcast_object_list([make(nbytes, value)], root, group=group)


def all_to_all_object(make, nbytes, value):
    size = MPI.COMM_WORLD.size
    given = [make(nbytes // size, value) for _ in range(size)]
    return lambda group: dist.all_to_all_object([], given, group=group)


@pytest.mark.parametrize("nbytes", [1000, 60_000, 1 << 20])
def test_objects_are_called_off_too(group, nbytes):
    found = {}
    for operation in (
        all_gather_object,
        broadcast_object_list,
        broadcast_object_to_it,
        all_to_all_object,
    ):
        wrong = drill(group, operation, ordinary, nbytes)
        if wrong:
            found[operation.__name__] = wrong
    assert found == {}


@pytest.mark.parametrize("others", ["come first", "come later"])
def test_who_leaves_before_it_knows_that_the_objects_are_large_keeps_nobody(
    group, monkeypatch, others
):
    if group.transport.hot is None:
        pytest.skip("without the compiled path nothing lies between it and what goes on after it")

    def others_come():
        if others == "come first":
            tell(group.nranks)
            time.sleep(0.1)

    operate = broadcast_object_to_it(ordinary, 1 << 20, 1.0)
    if group.rank == 0:
        interrupt_once(monkeypatch, hpcdist.comm.hot, "described", others_come)
        with pytest.raises(InterruptError):
            operate(group)
        if others == "come later":
            tell(group.nranks)
    else:
        await_first()
        with pytest.raises(dist.RemoteError, match="rank 0"):
            operate(group)
    total = np.full(3, 1.0)
    dist.all_reduce(total, group=group)
    assert (total == group.nranks).all()


@pytest.mark.parametrize(
    "operation", [all_reduce, broadcast, broadcast_to_it, all_gather, alltoall, all_gather_object]
)
def test_between_nodes_the_others_go_on_with_what_there_was(world_with, rank, size, operation):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(ranks_per_node=1)
    group = dist.new_group(timeout=60)
    assert [drill(group, operation, ordinary, each, goes_on=True) for each in (80, 100_000)] == [
        [],
        [],
    ]


@contextmanager
def alarms():
    """Yield what has an InterruptError come to this thread some microseconds later."""

    def handle(*_):
        raise InterruptError

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Python prints what an alarm raises in a callback of the collector, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", [nullcontext, switched_off])
@pytest.mark.parametrize("nbytes", [8, 4096, 100_000])
def test_between_nodes_an_interrupt_leaves_nobody_behind_whenever_it_comes(
    world_with, rank, size, nbytes, way
):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(ranks_per_node=1)
    group, x, drawn = dist.new_group(timeout=60), ordinary(nbytes, 1.0), random.Random(nbytes)

    def begun():
        poll(lambda: not group.transport.queue.queued, 60)  # what another thread does, too
        return group.transport.context.agreement.sequence

    with alarms() as come, way():
        while begun() < 200:  # what was interrupted before it began is called again
            with suppress(InterruptError):
                if rank == 0:
                    come(drawn.uniform(5e-6, 3e-4))
                dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
                come(0)
    dist.barrier(group)
    y = ordinary(nbytes, rank + 1.0)
    dist.all_reduce(y, group=group)
    assert (y == size * (size + 1) / 2).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("freed", [0, 1])
def test_who_is_interrupted_at_the_end_of_a_group_ends_it_again(freed, rank, size, monkeypatch):
    group = dist.new_group(timeout=60)
    dist.barrier(group)
    if rank == 0:
        usual, calls = transport.discard_unread, []

        def interrupted(*args):
            calls.append(args)
            if len(calls) == 1 + freed:
                raise InterruptError
            usual(*args)

        monkeypatch.setattr(transport, "discard_unread", interrupted)
        with pytest.raises(InterruptError):
            dist.destroy_process_group(group)
        assert not group.transport.together_at_end()  # as the end of the program asks
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize(
    ("where", "name"), [(transport.MpiTransport, "_translated"), (Ending, "wait")]
)
def test_a_group_is_made_by_no_member_if_one_is_interrupted_before_all_have_come(
    where, name, victim, rank, size, monkeypatch
):
    """Before the others have heard of it, or while it waits for them."""
    if rank == (0 if victim == "first" else size - 1):
        interrupt_once(monkeypatch, where, name)
        with pytest.raises(InterruptError):
            dist.new_group(range(size))
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(dist.RemoteError, match="it was interrupted"):
            dist.new_group(range(size))
    dist.destroy_process_group(dist.new_group(range(size)))


@contextmanager
def stopped_now_and_then(pid):
    """Stop a process some hundred times for twice as long as compiled functions wait."""
    cycle = f"kill -STOP {pid}; sleep 0.04; kill -CONT {pid}; sleep 0.01"
    with subprocess.Popen(["sh", "-c", f"for i in $(seq 100); do {cycle}; done"]) as stopping:
        try:
            yield
        finally:
            stopping.kill()
            stopping.wait()
            os.kill(pid, signal.SIGCONT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_large_messages_of_a_rank_that_stops_in_their_middle_arrive_whole(world, rank, size):
    if size == 1:
        pytest.skip("a rank alone sends nothing")
    sender, count, drawn = MPI.COMM_WORLD.bcast(os.getpid()), 250, random.Random(1)
    x, got = np.zeros(1 << 20), np.zeros(1 << 20)
    if rank == 0:
        for number in range(count):
            x[::512] = number
            dist.send(x, 1)
    if rank == 1:
        with alarms() as come, stopped_now_and_then(sender):
            number = -1
            while number < count - 1:
                with suppress(InterruptError):
                    come(drawn.uniform(5e-6, 5e-2) if number < count - 10 else 0)
                    dist.recv(got, 0)
                    come(0)
                    before, number = number, int(got[0])
                    assert number > before  # one in whose end the interrupt came has arrived
                    assert (got[::512] == number).all()
    dist.barrier()


def test_what_is_interrupted_before_another_thread_took_over_is_done_all_the_same(
    world, monkeypatch
):
    tries, done = [], []

    def interrupted_at_first(context, what, perform):
        tries.append(what())
        if len(tries) == 1:
            raise InterruptError
        return perform()

    context = world.transport.context
    monkeypatch.setattr(type(context), "on_helper", interrupted_at_first)
    with pytest.raises(InterruptError):
        context.to_its_end(Barrier(), lambda: done.append(True))
    assert (len(tries), done) == (2, [True])


def test_between_nodes_the_numbers_are_those_of_the_call(world_with, rank, size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    world_with(ranks_per_node=1)
    x = ordinary(100_000, 1.0)
    if rank == 0:
        with interrupts():
            dist.all_reduce(x)
        x[:] = WEIGHT
        tell(size)
    else:
        await_first()
        dist.all_reduce(x)
    dist.barrier()
    assert (x == (WEIGHT if rank == 0 else size)).all()


@pytest.mark.parametrize("nbytes", [80, 1 << 20])
@pytest.mark.parametrize("per_node", [1, None])
def test_a_plan_under_way_that_nobody_has_any_more_keeps_its_arrays(
    world_with, rank, size, nbytes, per_node
):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    if per_node is not None:
        world_with(ranks_per_node=per_node)
    plan = dist.plan_all_reduce(ordinary(nbytes, 1.0))
    if rank == 0:
        plan.start()
        del plan
        gc.collect()
        weights = [ordinary(nbytes, WEIGHT) for _ in range(4)]
        tell(size)
    else:
        await_first()
        plan.start().wait()
    dist.barrier()
    assert rank or all((each == WEIGHT).all() for each in weights)
