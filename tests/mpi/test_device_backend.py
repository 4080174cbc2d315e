"""A backend that is no part of hpcdist, registered in the table of backends, carries collectives.

It is to the slow device what NCCL is to a GPU: its operations are put on a stream, wait there for
other ranks, and leave the host alone. What carries the numbers is MPI, called by the stream.
"""

import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.errors import TransportError
from hpcdist.testing.slow_device import DEVICE, SlowDevice
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.device import table
from hpcdist.transport.device.backend import DeviceBackend
from hpcdist.transport.device.choose import STAGED, Candidate, Standing
from hpcdist.transport.device.host_waits import await_end
from hpcdist.transport.device.launch_order import LAUNCH_ORDER

VERBS = {
    Kind.ALL_REDUCE: lambda comm, call: comm.Iallreduce(MPI.IN_PLACE, memory(call.recv)),
    Kind.BROADCAST: lambda comm, call: comm.Ibcast(memory(call.recv), call.root),
    Kind.REDUCE: lambda comm, call: (
        comm.Ireduce(MPI.IN_PLACE, memory(call.recv), root=call.root)
        if comm.rank == call.root
        else comm.Ireduce(memory(call.recv), None, root=call.root)
    ),
}


def memory(array):
    return array.view(np.ndarray)


class Toy(DeviceBackend):
    """Sums and broadcasts of float64; everything else is staged."""

    def __init__(self, context, runtime):
        self.context, self.runtime = context, runtime
        self.stream, self.comm = runtime.new_stream(), context.comm.Dup()
        self.told, self.trouble = [], None

    def can(self, call):
        return (
            call.kind in VERBS
            and getattr(call, "op", ReduceOp.SUM) is ReduceOp.SUM
            and call.dtype.name == "float64"
        )

    def can_capture(self, call):
        return self.can(call)

    def home(self):
        return self.runtime

    def run(self, launch, detail):
        call = launch.call
        stream = launch.streams[-1] if call.on_current else self.stream
        launch.put(stream, self.check, lambda: stream.put(lambda: self.move(call)))
        self.told.append((call.kind, "current" if call.on_current else "own"))
        return None, stream

    def move(self, call):
        request = VERBS[call.kind](self.comm, call)
        while not request.Test():
            time.sleep(1e-4)

    def await_on_host(self, event, call, timeout_s):
        await_end(event, call, self.context.ranks, timeout_s)

    def check(self):
        if self.trouble is not None:
            raise self.trouble

    def abort(self):
        self.told.append("abort")
        self.trouble = TransportError("the toy was aborted")

    def close(self):
        self.told.append("close")
        self.comm.Free()


ROW = table.BackendRow(Candidate("toy", "it is a toy"), lambda *_: Standing(), Toy)


@pytest.fixture
def register(monkeypatch, world_with):
    """Start the world anew with one more backend, before all others."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("its streams call MPI on threads of their own")

    def start(row=ROW):
        monkeypatch.setattr(table, "BACKENDS", {"toy": row, **table.BACKENDS})
        world_with(share_gpu=1)

    return start


@pytest.fixture
def toy(register):
    register()
    dist.all_reduce(on_device(1.0))
    made = toy_of(dist.get_group())
    made.told.clear()
    return made


def toy_of(group):
    return group.transport.on_devices._launches.backend


def on_device(*numbers):
    return DEVICE.array(np.array(numbers, "f8"))


def numbers(array):
    return DEVICE.numbers(array).tolist()


# ---- what it carries


def test_a_registered_backend_is_chosen_and_carries_what_it_can(toy, rank, size):
    group = dist.get_group()
    assert group.transport.on_devices.backend == "toy"
    for step in range(20):
        x = on_device(rank + step, 1.0)
        dist.all_reduce(x)
        doubled = x * 2  # on the current stream
        x[...] = -1
        assert numbers(doubled) == [2 * (size * step + sum(range(size))), 2 * size]
    root = size - 1
    x = on_device(rank + 5.0)
    dist.broadcast(x, root)
    assert numbers(x) == [root + 5]
    x = on_device(rank, 1)
    dist.reduce(x, root)
    assert numbers(x) == ([sum(range(size)), size] if rank == root else [rank, 1])
    kinds = [Kind.ALL_REDUCE] * 20 + [Kind.BROADCAST, Kind.REDUCE]
    assert toy.told == [(kind, "own") for kind in kinds]


def test_what_it_cannot_do_is_staged(toy, rank, size):
    largest, short, inbox = on_device(rank), on_device(rank).astype("f4"), on_device(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(short)
    gathered = []
    dist.all_gather(gathered, on_device(rank))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, on_device(rank), (rank + 1) % size),
            dist.P2POp(dist.irecv, inbox, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    assert (numbers(largest), numbers(short)) == ([size - 1], [sum(range(size))])
    assert [numbers(each) for each in gathered] == [[each] for each in range(size)]
    assert numbers(inbox) == [(rank - 1) % size]
    assert toy.told == []


def test_an_array_with_gaps_is_unpacked_on_the_stream_of_the_backend(toy, size):
    gaps = DEVICE.array(np.arange(8.0).reshape(2, 4)[:, ::2])
    assert not gaps.flags.c_contiguous
    dist.all_reduce(gaps)
    assert numbers(gaps) == [[0, 2 * size], [4 * size, 6 * size]]
    assert toy.told == [(Kind.ALL_REDUCE, "own")]


def test_operations_of_both_ways_and_of_several_groups_follow_each_other(toy, rank, size):
    groups = [dist.get_group(), dist.new_group(), dist.new_group()]
    works, results = [], []
    for step in range(18):
        total, largest = on_device(rank + step), on_device(rank + step)
        works.append(dist.all_reduce(total, group=groups[step % 3], sync_op=False))
        works.append(
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=groups[(step + 1) % 3], sync_op=False)
        )
        results.append((step, total, largest))
    works[-1].synchronize()
    for work in works:
        work.wait()
    for step, total, largest in results:
        assert numbers(total) == [size * step + sum(range(size))]
        assert numbers(largest) == [size - 1 + step]
    for group in groups[1:]:
        dist.destroy_process_group(group)


def test_the_host_does_not_wait_for_the_device(toy, rank, size):
    held = threading.Event()
    DEVICE.current.put(held.wait)
    try:
        x = on_device(rank)
        work = dist.all_reduce(x)  # returns, though its numbers are not there yet
        assert not work.is_completed()
    finally:
        held.set()
    work.synchronize()
    assert work.is_completed()
    assert numbers(x) == [sum(range(size))]


def test_an_operation_on_the_current_stream_waits_there_and_so_does_what_is_staged(toy, rank, size):
    for op, expected in ((dist.ReduceOp.SUM, sum(range(size))), (dist.ReduceOp.MAX, size - 1)):
        DEVICE.current.put(lambda: time.sleep(0.05))  # longer than all copies
        x = on_device(rank)
        dist.stream.all_reduce(x, op, use_calc_stream=True)
        assert numbers(x) == [expected]
    assert toy.told == [(Kind.ALL_REDUCE, "current")]


def test_a_queued_operation_makes_its_device_the_current_one_of_its_thread(toy, monkeypatch):
    used = []
    monkeypatch.setattr(DEVICE, "use", lambda: used.append(threading.current_thread()))
    dist.all_reduce(on_device(1))
    assert threading.main_thread() not in used  # whose device is the user's choice
    used.clear()
    dist.all_reduce(on_device(1), sync_op=False).synchronize()
    assert used == [dist.get_group().transport.context.queue._thread]


def test_once_memory_was_lent_a_queued_operation_waits_for_what_came_after_its_issue(toy, size):
    """The caller may have dropped an array that his streams still read."""
    queue, gate, held = (
        dist.get_group().transport.context.queue,
        threading.Event(),
        threading.Event(),
    )
    gathered = []
    dist.all_gather(gathered, on_device(1))
    queue.start(gate.wait, "gate", detached=True)
    x = on_device(1)
    work = dist.all_reduce(x, sync_op=False)
    DEVICE.current.put(held.wait)
    gate.set()
    try:
        while not work._queued.is_completed():
            time.sleep(1e-3)
        time.sleep(0.1)  # longer than the operation takes
        assert not work.is_completed()
    finally:
        held.set()
    work.synchronize()
    assert numbers(x) == [size]


def test_what_it_can_capture_is_captured_and_the_rest_is_refused(toy, monkeypatch, rank, size):
    x = on_device(rank)
    with monkeypatch.context() as patch:
        patch.setattr(DEVICE, "is_capturing", lambda stream: stream is DEVICE.current)
        patch.setattr(DEVICE, "is_done", None)  # which a capture forbids
        work = dist.stream.all_reduce(x, use_calc_stream=True)
        assert work.is_completed()
        with pytest.raises(dist.UsageError, match="CUDA graph"):
            dist.all_reduce(x)
        with pytest.raises(dist.UsageError, match="CUDA graph"):
            dist.stream.all_reduce(x, dist.ReduceOp.MAX, use_calc_stream=True)
        with pytest.raises(dist.UsageError, match="CUDA graph"):
            dist.isend(x, rank)
    assert numbers(x) == [sum(range(size))]
    assert toy.told == [(Kind.ALL_REDUCE, "current")]


# ---- when it is chosen, and how it ends


def test_a_backend_that_one_rank_cannot_use_is_used_by_none(register, rank, size):
    def standing(config, runtime, uuid):
        return Standing("the toy is broken" if rank == size - 1 else "")

    register(ROW._replace(standing=standing))
    x = on_device(rank)
    dist.all_reduce(x)
    assert numbers(x) == [sum(range(size))]
    devices = dist.get_group().transport.on_devices
    assert devices.backend == STAGED
    assert devices._choice.why == f"on rank {size - 1} the toy is broken"


def test_settings_that_name_another_backend_leave_it_alone(register, world_with):
    def standing(*_):
        raise AssertionError("it was asked")

    register(ROW._replace(standing=standing))
    world_with(device_backend="staged")
    dist.all_reduce(on_device(1.0))
    assert dist.get_group().transport.on_devices.backend == STAGED


def test_it_is_closed_with_its_group_and_aborted_where_the_device_does_not_end(toy, size):
    group = dist.new_group()
    dist.all_reduce(on_device(1.0), group=group)
    ended = toy_of(group)
    dist.destroy_process_group(group)
    assert ended.told[1:] == ["close"]
    group = dist.new_group()
    dist.all_reduce(on_device(1.0), group=group)
    group.transport.set_timeout(0.5)
    late, held = toy_of(group), threading.Event()
    late.stream.put(held.wait)
    try:
        dist.all_reduce(on_device(1.0), group=group)
        dist.destroy_process_group(group)
        assert late.told[2:] == ["abort"]
    finally:
        held.set()


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_device_that_fails_ends_it_and_what_it_reports_is_raised(toy, monkeypatch, rank, size):
    group = dist.new_group()
    x = on_device(rank)
    work = dist.all_reduce(x, group=group, sync_op=False)
    work.synchronize()

    def fail(*_):
        raise OSError("the device has fallen off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(DEVICE, "wait_event", fail)
        with pytest.raises(dist.TransportError, match="fallen off the bus"):
            work.wait()
    assert toy_of(group).told == [(Kind.ALL_REDUCE, "own"), "abort"]
    with pytest.raises(dist.TransportError, match="the toy was aborted"):
        work.wait()
    with pytest.raises(dist.TransportError, match="the toy was aborted"):
        dist.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    assert LAUNCH_ORDER.holder is None


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_an_array_on_another_device_of_a_rank_is_an_error_on_every_rank(toy, monkeypatch, rank):
    other = SlowDevice()
    other.name = "slow:1"
    devices = dist.get_group().transport.on_devices
    if rank == 0:
        monkeypatch.setattr(toy, "runtime", other)
    expected = dist.UsageError if rank == 0 else dist.RemoteError
    with pytest.raises(expected, match="slow:0, but the group works on slow:1 of this rank"):
        dist.all_reduce(on_device(1.0))
    monkeypatch.undo()
    assert devices.backend == "toy"
