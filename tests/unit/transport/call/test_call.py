"""Calls and their fingerprints, queues, waiting, events, configuration, errors."""

import pickle
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.config import Config, read_config
from hpcdist.transport.call.call import (
    UNEVEN,
    Barrier,
    Distribution,
    Gathering,
    Objects,
    Reduction,
    Refusal,
    label,
    making,
    shape_detail,
)
from hpcdist.transport.call.kinds import LOOSE, Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.waiting.polling import poll
from hpcdist.transport.waiting.queue import CollectiveQueue, seconds

F4, F8 = dtype_row(np.dtype("f4")), dtype_row(np.dtype("f8"))
X = np.ones(6)
CALL = Reduction(Kind.ALL_REDUCE, None, X, F4, (2, 3), 0, ReduceOp.SUM, rule_for(ReduceOp.SUM, F4))
CALLS = [
    CALL,
    Distribution(Kind.SCATTER, None, X, F4, (2, 3), 0),
    Gathering(Kind.ALL_GATHER, X, None, F4, (2, 3), 0),
]

# ---- fingerprints


@pytest.mark.parametrize(
    "change",
    [
        {"kind": Kind.REDUCE},
        {"dtype": F8},
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"shape": ()},
        {"op": ReduceOp.MAX},
        {"root": 1},
    ],
)
def test_calls_that_differ_have_fingerprints_that_differ(change):
    assert CALL._replace(**change).fingerprint() != CALL.fingerprint()


def test_no_two_families_have_a_fingerprint_in_common():
    calls = [
        *CALLS,
        Barrier(),
        Objects(Kind.ALL_GATHER_OBJECT, ()),
        Objects(Kind.ALL_GATHER_OBJECT, (), words="told"),
        Objects(Kind.ALL_GATHER_OBJECT, (), words="shared"),
        Refusal(Kind.SCAN, 0, KeyError),
    ]
    calls += [making(each, range(2)) for each in (*CALLS, Barrier())]
    calls += [each._replace(device=object()) for each in CALLS]
    assert len({call.fingerprint() for call in calls}) == len(calls)


@pytest.mark.parametrize("device", [None, object()])
def test_dtypes_have_fingerprints_that_differ_on_devices_too(device):
    rows = [dtype_row(np.dtype(name)) for name in ("?", "i1", "i2", "u1", "f4", "c8", "S3")]
    for call in CALLS:
        found = {call._replace(dtype=row, device=device).fingerprint() for row in rows}
        assert len(found) == len(rows)


def test_what_each_rank_may_choose_is_not_in_the_fingerprint():
    for call in CALLS:
        same = call._replace(send=np.ones(1), recv=np.ones(2), detail=9, finish=print)
        assert same.fingerprint() == call.fingerprint()
        is_loose = call._replace(shape=(99,)).fingerprint() == call.fingerprint()
        assert is_loose == (call.kind in LOOSE)
    for kind in LOOSE:
        loose = Objects(kind, ())
        assert loose.fingerprint() == loose._replace(shape=(99,)).fingerprint()


def test_fingerprints_are_the_same_in_every_process():
    script = """
import numpy as np
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.call import Barrier, Distribution, Objects, Reduction
from hpcdist.transport.call.call import making, shape_detail
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
x = np.ones(3)
for dtype in map(np.dtype, ("f4", "S5", "M8[s]", [("a", "i4"), ("b", "f8", (2,))])):
    row = dtype_row(dtype)
    print(Distribution(Kind.SCATTER, None, x, row, (3, 0), 2).fingerprint())
    print(Reduction(Kind.SCAN, None, x, row, (3, 0), 2, ReduceOp.AVG, None).fingerprint())
print(Barrier().fingerprint(), Objects(Kind.BROADCAST_OBJECT_LIST, (), (2,), 1).fingerprint())
print(Objects(Kind.GATHER_OBJECT, (), words="told").fingerprint())
print(making(Barrier(), [0]).fingerprint())
print(shape_detail((1, 2)), shape_detail(()))
"""
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }
    assert len(told) == 1


def test_fingerprints_and_details_fit_into_signed_integers():
    for shape in [(), (0,), (1,), (2**40, 3), tuple(range(10))]:
        assert 0 <= CALL._replace(shape=shape).fingerprint() < 2**62
        assert UNEVEN < shape_detail(shape) < 2**63 - 1


def test_a_call_says_in_words_what_it_is():
    assert label(CALL, [0, 1]) == "all_reduce(shape (2, 3), float32, SUM)"
    broadcast = Distribution(Kind.BROADCAST, None, X, F8, (4,), 1)
    assert label(broadcast, [3, 7]) == "broadcast(shape (4,), float64, root 7)"
    assert label(Barrier(), [0]) == "barrier()"
    assert "2 objects" in label(Objects(Kind.BROADCAST_OBJECT_LIST, (), (2,)), [0])


# ---- queues


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
        with queue.running:  # as while a job runs on another thread
            work = queue.start(lambda done=done: done.append("first"), "job")
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
        queue.start(lambda: done.append(each), "job")

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
        assert queue.close()


def test_a_queue_that_is_busy_says_so_at_its_end():
    queue, gate = CollectiveQueue("busy"), threading.Event()
    queue.start(gate.wait, "job")
    assert not queue.close(patience_s=0.01)
    gate.set()
    assert queue.close()


def test_time_limits_are_seconds_timedeltas_or_endless():
    assert seconds(None) is None
    assert seconds(2) == seconds(timedelta(seconds=2)) == 2.0
    assert not threading.Event().wait(min(0.001, seconds(float("inf"))))
    assert 1e9 < seconds(float("inf")) < float("inf")


# ---- waiting


def test_poll_stops_when_it_is_done_or_when_time_is_up():
    answers = iter([False] * 100 + [True])
    assert poll(lambda: next(answers), 10)
    began = time.monotonic()
    assert not poll(lambda: False, 0.05)
    assert time.monotonic() - began >= 0.05
    assert poll(lambda: True, 0)
    assert not poll(lambda: False, 0)


def test_poll_attends_to_other_things_now_and_then():
    waited = []
    poll(lambda: len(waited) >= 3, 10, waited.append, 0.01)
    assert waited == sorted(waited)
    assert len(waited) == 3


# ---- configuration


def test_the_configuration_is_read_from_the_environment():
    assert read_config({}) == Config(timeout_s=1800.0, piece_mb=4.0, allow_singleton=False)
    given = {"HPCDIST_TIMEOUT_S": "2.5", "HPCDIST_PIECE_MB": "1", "HPCDIST_ALLOW_SINGLETON": "Yes"}
    assert read_config(given) == Config(timeout_s=2.5, piece_mb=1.0, allow_singleton=True)
    assert read_config({"HPCDIST_TIMEOUT_S": ""}) == Config()
    assert read_config({"HPCDIST_ARRAY_PLACEMENTS": "S-1, r"}).array_placements == (-1, None)


def test_a_former_variable_counts_where_the_new_one_is_not_set():
    former, new = "HPCDIST_DEVICE_WAY", "HPCDIST_DEVICE_BACKEND"
    assert read_config({former: "staged"}).device_backend == "staged"
    assert read_config({former: "staged", new: "MPI"}).device_backend == "mpi"
    with pytest.raises(dist.UsageError, match=f"{former}='tcp' is none of auto, nccl, mpi, staged"):
        read_config({former: "tcp"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "nan"),
        ("PIECE_MB", "-1"),
        ("ALLOW_SINGLETON", "2"),
        ("ARRAY_REPLICATE", "gather"),
        ("ARRAY_PLACEMENTS", "S"),
        ("ARRAY_PLACEMENTS", "S0,P"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(name, value):
    with pytest.raises(dist.UsageError, match=f"HPCDIST_{name}='{value}'"):
        read_config({f"HPCDIST_{name}": value})


# ---- errors and events


def test_errors_are_what_python_programs_expect_and_survive_pickling():
    assert issubclass(dist.UsageError, ValueError)
    assert issubclass(dist.CollectiveTimeout, TimeoutError)
    assert issubclass(dist.NotInGroupWarning, UserWarning)
    for kind in (dist.UsageError, dist.MismatchError, dist.TransportError):
        assert issubclass(kind, dist.HpcdistError)
        assert issubclass(kind, RuntimeError)
    timeout = pickle.loads(pickle.dumps(dist.CollectiveTimeout("late", (1, 2))))
    assert (str(timeout), timeout.missing) == ("late", (1, 2))
    remote = pickle.loads(pickle.dumps(dist.RemoteError("failed", 3, "its traceback")))
    assert (str(remote), remote.rank, remote.traceback) == ("failed", 3, "its traceback")


def test_listeners_come_and_go():
    seen = []
    stop = dist.subscribe(seen.append)

    def reduce_once():
        dist.all_reduce(np.ones(2))

    dist.simulate(1, reduce_once)
    stop()
    stop()
    dist.simulate(1, reduce_once)
    assert [(event.phase, event.name, event.nbytes) for event in seen] == [
        ("begin", "all_reduce", 16),
        ("end", "all_reduce", 16),
    ]


def test_a_batch_of_which_one_message_is_wrong_is_not_told_to_begin():
    seen = []

    def program():
        good, wrong = np.zeros(2), np.zeros(2)
        batch = [dist.P2POp(op, x, 0) for op, x in [(dist.isend, good), (dist.irecv, wrong)]]
        wrong.flags.writeable = False
        with pytest.raises(dist.UsageError, match="read-only"):
            dist.batch_isend_irecv(batch)

    stop = dist.subscribe(seen.append)
    try:
        dist.simulate(1, program)
    finally:
        stop()
    assert seen == []
