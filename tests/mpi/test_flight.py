"""Whatever a rank calls leaves a record with its line; errors carry the lines of all ranks."""

import sys
import threading
import time

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.comm.objects import all_gather_object
from hpcdist.transport.flight import recorder
from hpcdist.transport.flight.recording import read_recording

pytestmark = pytest.mark.two_ranks


def recorded():
    return read_recording(bytes(recorder.memory()), 0, newest=40).records


def next_line():
    return f"{__file__}:{sys._getframe(1).f_lineno + 1}"


def one(name):
    """Return the last record of a name."""
    return [each for each in recorded() if each.name == name][-1]


def _plan(x):
    plan = dist.plan_barrier()
    plan.start().wait()
    plan.free()


WAYS = {
    "all_reduce": dist.all_reduce,
    "scan": lambda x: dist.scan(x, sync_op=False).wait(),
    "broadcast": lambda x: dist.stream.broadcast(x, 0),
    "barrier": _plan,
    "all_gather_object": lambda x: all_gather_object([], 1),
    "reduce": lambda x: dist.reduce(x, 0),
    "new_group": lambda x: dist.destroy_process_group(dist.new_group()),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_collective_is_recorded_with_its_number_and_its_line(name, size):
    x, numbers = np.ones(5), []
    for _ in range(2):
        WAYS[name](x)
        record = one(name)
        assert record.end_ns >= record.begin_ns
        assert record.site.startswith(f"{__file__}:")
        numbers.append(record.sequence)
    steps = numbers[1] - numbers[0]  # ranks that have left an operation before are behind for good
    assert steps > 0
    told = []
    dist.all_gather_object(told, (record.name, steps, record.group.ranks))
    assert told == [told[0]] * size


def test_the_bytes_and_the_line_of_an_array_are_recorded(world):
    line = next_line()
    dist.all_reduce(np.ones((3, 5), np.float32))
    record = one("all_reduce")
    assert (record.nbytes, record.site, record.started) == (60, line, False)
    assert record.group.ranks == tuple(world.ranks)


def test_an_asynchronous_operation_is_under_way_until_it_has_ended(rank):
    x = np.ones(4)
    if rank == 0:
        time.sleep(0.05)
        assert one("all_reduce").end_ns > 0
    work = dist.all_reduce(x, sync_op=False)
    record = one("all_reduce")
    assert record.started
    work.wait()
    dist.barrier()
    assert one("all_reduce").number == record.number
    assert one("all_reduce").end_ns > 0


@pytest.mark.parametrize("count", [3, 5_000, 3_000_000])
def test_a_message_is_recorded_with_its_tag_by_every_way(rank, size, count):
    if size < 2 or rank > 1:
        return
    for give in (dist.send, lambda *args, tag: dist.isend(*args, tag=tag).wait()):
        if rank == 0:
            give(np.ones(count), 1, tag=11)
            dist.send_object_list(["x" * count], 1, tag=12)
            assert [one(f"send{kind}").digest for kind in ("", "_object_list")] == [11, 12]
        else:
            dist.recv(np.ones(count), 0, tag=11)
            dist.recv_object_list([None], 0, tag=12)
            assert [one(f"recv{kind}").digest for kind in ("", "_object_list")] == [11, 12]


def test_a_message_is_recorded_with_its_peer_when_it_has_come(rank, size):
    if size < 2:
        return
    x = np.ones(4)
    if rank < 2:
        work = dist.irecv(x, 1 - rank)
        assert one("recv").end_ns == 0
    dist.barrier()
    if rank > 1:
        return
    dist.send(np.ones(4), 1 - rank)
    work.wait()
    assert one("recv").end_ns > 0
    assert (one("recv").peer, one("send").peer) == (1 - rank, 1 - rank)


def test_an_operation_that_fails_is_recorded_as_failed(rank, size):
    if size < 2:
        return
    with pytest.raises(dist.MismatchError):
        dist.all_reduce(np.ones(4 + (rank == 1)))
    assert one("all_reduce").failed


def test_ranks_that_disagree_hear_the_lines_of_all(rank, size):
    if size < 2:
        return
    calls = [
        lambda: dist.all_reduce(np.ones(4)),
        lambda: dist.barrier(),
    ]
    error = hear_lines(calls[rank > 0])
    assert all(f"at {site}" in str(error) for site in error.call_sites.values())


def hear_lines(call):
    """Return the error of a call on which the ranks disagree, which names where each is."""
    with pytest.raises(dist.MismatchError) as caught:
        call()
    told = []
    dist.all_gather_object(told, f"{__file__}:{call.__code__.co_firstlineno}")
    assert dict(caught.value.call_sites) == dict(enumerate(told))
    return caught.value


@pytest.mark.parametrize("count", [3, 30_000])
def test_ranks_whose_shapes_do_not_fit_hear_the_lines_of_all(rank, size, count):
    if size < 2:
        return
    x, odd = np.ones(count), [np.ones(count) for _ in range(size)]
    odd[(rank + 1) % size] = np.ones(count + 1)
    split = [count, *[0] * (size - 1)]
    hear_lines(lambda: dist.all_gather(odd, x))
    hear_lines(lambda: dist.all_gather(odd, x, sync_op=False).wait())
    hear_lines(lambda: dist.gather(x, odd if rank == 0 else None, 0))
    hear_lines(lambda: dist.scatter(x, odd if rank == 0 else None, 0))
    hear_lines(lambda: dist.alltoall(odd, [x] * size))
    hear_lines(
        lambda: dist.alltoall_single(x, x, in_split_sizes=split, out_split_sizes=split[::-1])
    )


def test_a_rank_that_does_not_come_is_told_with_its_last_line(rank, size):
    if size < 2:
        return
    group = dist.new_group(timeout=0.3)
    last = next_line()
    dist.all_reduce(np.ones(1))
    told = []
    if rank:
        with pytest.raises(dist.CollectiveTimeout) as caught:
            dist.barrier(group)
        assert caught.value.call_sites[0] == last
        assert "its last call was all_reduce" in str(caught.value)
    else:
        time.sleep(1.5)
        with pytest.raises(dist.CollectiveTimeout):
            dist.barrier(group)
    dist.all_gather_object(told, None)


GATE = threading.Event()


@pytest.fixture
def rpc():
    dist.rpc.init_rpc()
    yield
    dist.rpc.shutdown()
    GATE.clear()


@pytest.mark.usefixtures("rpc")
def test_a_call_of_a_function_is_under_way_until_its_rank_has_answered(rank, size):
    there = (rank + 1) % size
    line = next_line()
    future = dist.rpc.rpc_async(there, pass_gate)
    record = one("rpc")
    assert (record.peer, record.site, record.end_ns) == (there, line, 0)
    dist.rpc.rpc_sync(there, open_gate)
    future.wait()
    ended = next(each for each in recorded() if each.number == record.number)
    assert ended.end_ns > record.begin_ns
    assert not ended.failed


def pass_gate():
    GATE.wait()


def open_gate():
    GATE.set()


@pytest.mark.usefixtures("rpc")
@pytest.mark.parametrize(("fn", "args", "limit_s"), [(int, ("x",), None), (pass_gate, (), 0.01)])
def test_a_call_that_fails_is_recorded_as_failed(fn, args, limit_s, rank, size):
    there = (rank + 1) % size
    future = dist.rpc.rpc_async(there, fn, args, timeout=limit_s)
    assert future.exception() is not None
    assert one("rpc").failed
    dist.rpc.rpc_sync(there, open_gate)
