"""Batches of messages on device memory that travel together: everything but what carries the data.

In the place of NCCL's communicator there is a `HostCarrier`, which moves host memory with MPI. What
is tested is how ranks agree on a batch, its order, its streams and what goes wrong. Nothing here
says anything about NCCL; `test_gpu.py` has the same patterns on GPUs.
"""

import time

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.runtime import gpu
from hpcdist.testing.slow_device import DEVICE
from hpcdist.transport.device import table
from hpcdist.transport.device.backend import DeviceBackend
from hpcdist.transport.device.choose import STAGED, Standing

LIMIT_S = 2.0


class HostCarrier(DeviceBackend):
    """Carries batches, and only these, through MPI, in the order of the transfers, without tags."""

    def __init__(self, context, runtime):
        self.runtime, self.stream = runtime, runtime.new_stream()
        self.exchanged = []
        self._comm = context.comm.Dup()

    def can(self, call):
        return False  # collectives are staged

    def run(self, launch, detail):
        raise NotImplementedError

    def home(self):
        return self.runtime

    def exchange(self, transfers, stream):
        self.exchanged.append([(each.sends, each.peer, each.data.nbytes) for each in transfers])
        stream.put(lambda: self._move(transfers))

    def _move(self, transfers):
        requests = []
        for each in transfers:
            verb = self._comm.Isend if each.sends else self._comm.Irecv
            requests.append(verb([each.data.view(np.ndarray), MPI.BYTE], each.peer, 0))
        while not all(each.Test() for each in requests):
            time.sleep(1e-4)

    def await_on_host(self, event, call, timeout_s):
        assert event.wait(timeout_s)

    def close(self):
        self._comm.Free()


@pytest.fixture
def batches(monkeypatch, world_with, rank):
    """Start the world anew, with batches that travel together."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("the carrier has a thread of its own")
    monkeypatch.setattr(gpu, "uuid_of", lambda _: f"GPU-{rank}")
    row = table.BACKENDS["nccl"]._replace(standing=lambda *_: Standing("", 22809), open=HostCarrier)
    monkeypatch.setitem(table.BACKENDS, "nccl", row)
    world_with(device_batches="nccl")


def carrier():
    return dist.get_group().transport.on_devices._launches.backend


def on_device(*numbers, dtype="f8"):
    return DEVICE.array(np.array(numbers, dtype))


def numbers(array):
    return DEVICE.numbers(array).tolist()


def send(x, peer, tag=0, group=None):
    return dist.P2POp(dist.isend, x, peer, group, tag)


def receive(x, peer, tag=0, group=None):
    return dist.P2POp(dist.irecv, x, peer, group, tag)


def exchange(*messages):
    works = dist.batch_isend_irecv(list(messages))
    for work in works:
        work.wait()
    return works


@pytest.fixture
def short(batches, size):
    """A group whose ranks wait two seconds for each other, and have met."""
    group = dist.new_group(timeout=LIMIT_S)
    dist.barrier()
    dist.all_reduce(on_device(1), group=group)
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


# ---- what arrives


def test_a_ring_brings_each_rank_the_numbers_of_its_left(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(20):
        inbox = on_device(0, 0)
        works = exchange(send(on_device(rank, step), right), receive(inbox, left))
        doubled = inbox * 2  # on the current stream
        inbox[...] = -1
        assert numbers(doubled) == [2 * left, 2 * step]
        assert [work.source for work in works] == [-1, left]
    assert carrier().exchanged[-1] == [(True, right, 16), (False, left, 16)] or left == right
    assert dist.get_group().transport.on_devices.backend == "nccl"


def test_messages_of_several_tags_meet_whatever_the_order_of_the_lists(batches, rank, size):
    tags = [3, 0, 7, 0]
    outgoing, incoming, inboxes = [], [], []
    for peer in range(size):
        for place, tag in enumerate(tags):
            outgoing.append(send(on_device(*[rank, tag] * (place + 1)), peer, tag))
            inboxes.append((peer, tag, on_device(*[0.0] * 2 * (place + 1))))
            incoming.append(receive(inboxes[-1][2], peer, tag))
    backwards = sorted(incoming, key=lambda each: -each.tag)
    messages = outgoing + backwards if rank % 2 else backwards + outgoing[::1]
    exchange(*messages)
    for peer, tag, inbox in inboxes:
        assert numbers(inbox) == [peer, tag] * (len(numbers(inbox)) // 2)


def test_dtypes_tell_messages_apart_as_on_the_host(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    wide, narrow = on_device(0), on_device(0, 0, dtype="f4")
    exchange(
        send(on_device(rank), right),
        send(on_device(rank, 5, dtype="f4"), right),
        receive(narrow, left),
        receive(wide, left),
    )
    assert (numbers(wide), numbers(narrow)) == ([left], [left, 5])


def test_some_ranks_may_have_more_peers_than_others_and_some_none(batches, rank, size):
    dist.all_reduce(on_device(1))  # all ranks have met
    inboxes = [on_device(-1) for _ in range(size)]
    if rank == 0:
        exchange(*(receive(inboxes[peer], peer) for peer in range(1, size)))
        assert [numbers(each) for each in inboxes[1:]] == [[peer] for peer in range(1, size)]
    else:
        exchange(send(on_device(rank), 0))
    assert dist.batch_isend_irecv([]) == []
    if rank == size - 1:
        exchange(send(on_device(7), rank), receive(inboxes[0], rank))
        assert numbers(inboxes[0]) == [7]


def test_arrays_with_gaps_and_arrays_without_numbers_travel(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    given = DEVICE.array((np.arange(8.0) + rank).reshape(2, 4)[:, ::2])
    inbox = DEVICE.array(np.zeros((2, 4))[:, ::2])
    empty = on_device()
    assert not given.flags.c_contiguous
    assert not inbox.flags.c_contiguous
    exchange(
        send(given, right, 1), send(empty, right), receive(inbox, left, 1), receive(empty, left)
    )
    assert numbers(inbox) == [[left, left + 2], [left + 4, left + 6]]
    assert all(nbytes for _, _, nbytes in carrier().exchanged[-1])


def test_works_tell_when_the_batch_has_ended(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    inboxes = [on_device(*[0.0] * 1000) for _ in range(8)]
    works = [
        dist.batch_isend_irecv([send(on_device(*[step] * 1000), right), receive(inbox, left)])
        for step, inbox in enumerate(inboxes)
    ]
    works[-1][1].synchronize()
    assert all(work.is_completed() for pair in works for work in pair)
    assert [work.source for work in works[-1]] == [-1, left]
    for step, inbox in enumerate(inboxes):
        assert numbers(inbox) == [step] * 1000


def test_batches_and_collectives_keep_the_order_of_their_issue(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    groups = [dist.new_group() for _ in range(2)]
    works, results = [], []
    for step in range(6):
        group = groups[step % 2]
        total, inbox = on_device(step), on_device(-1)
        works.append(dist.all_reduce(total, group=group, sync_op=False))
        works += dist.batch_isend_irecv(
            [receive(inbox, left, 0, group), send(on_device(rank + step), right, 0, group)]
        )
        results.append((step, total, inbox))
    for work in works:
        work.wait()
    for step, total, inbox in results:
        assert (numbers(total), numbers(inbox)) == ([size * step], [left + step])
    for group in groups:
        dist.destroy_process_group(group)


def test_a_result_of_a_collective_may_be_sent_without_waiting(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    x, inbox = on_device(rank + 1), on_device(0)
    dist.all_reduce(x)
    exchange(send(x, right), receive(inbox, left))
    dist.all_reduce(inbox)
    assert numbers(inbox) == [size * size * (size + 1) / 2]


def test_arrays_of_host_and_device_and_of_several_groups_may_be_in_one_list(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    group, other = dist.new_group(), dist.new_group([0])
    inbox, in_group, at_host = on_device(0), on_device(0), np.zeros(1)
    messages = [
        send(on_device(rank), right),
        receive(at_host, left),
        send(on_device(rank + 10), right, 0, group),
        receive(inbox, left),
        send(np.array([rank + 20.0]), right),
        receive(in_group, left, 0, group),
    ]
    if rank:
        with pytest.warns(dist.NotInGroupWarning):
            works = exchange(*messages, send(on_device(1), 0, 0, other))
    else:
        works = exchange(*messages)
    assert (numbers(inbox), numbers(in_group), at_host.tolist()) == (
        [left],
        [left + 10],
        [left + 20],
    )
    assert [work.source for work in works[:6]] == [-1, left, -1, left, -1, left]
    dist.barrier()
    dist.destroy_process_group(group)
    if rank == 0:
        dist.destroy_process_group(other)


def test_listeners_hear_of_each_message(batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    heard, inbox = [], on_device(0, 0)
    unsubscribe = dist.subscribe(heard.append)
    try:
        exchange(send(on_device(rank, 1), right), receive(inbox, left))
    finally:
        unsubscribe()
    told = [(each.phase, each.name, each.nbytes, each.error) for each in heard]
    names = ("send", "recv")
    assert sorted(told[:2]) == sorted(("begin", name, 16, None) for name in names)
    assert sorted(told[2:]) == sorted(("end", name, 16, None) for name in names)


# ---- what stays as it was


def test_without_the_setting_messages_are_staged_and_may_come_from_anywhere(
    monkeypatch, world_with, rank, size
):
    monkeypatch.setitem(table.BACKENDS, "nccl", None)
    world_with()
    inbox = on_device(0)
    works = exchange(send(on_device(rank), (rank + 1) % size), receive(inbox, None))
    assert numbers(inbox) == [works[1].source] == [(rank - 1) % size]
    assert dist.get_group().transport.on_devices.backend is None


def test_where_nccl_is_not_there_messages_are_staged_and_may_come_from_anywhere(
    world_with, rank, size
):
    world_with(device_batches="nccl")
    inbox = on_device(0)
    works = exchange(send(on_device(rank), (rank + 1) % size), receive(inbox, None))
    assert numbers(inbox) == [works[1].source] == [(rank - 1) % size]
    assert dist.get_group().transport.on_devices.backend == STAGED


# ---- what goes wrong


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_receive_from_anywhere_is_refused_before_anything_is_begun(batches, rank):
    with pytest.raises(dist.UsageError, match="HPCDIST_DEVICE_BATCHES=staged"):
        exchange(send(on_device(1), rank), receive(on_device(0), None))
    inbox = on_device(0)
    exchange(send(on_device(2), rank), receive(inbox, rank))
    assert numbers(inbox) == [2]


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("wrong", ["size", "dtype", "tag", "number"])
def test_a_pair_that_disagrees_raises_on_both_and_the_others_get_their_messages(
    batches, rank, size, wrong
):
    peers = range(size)
    pair = (0, size - 1)  # of a rank and itself, where it is alone
    spoils = rank == pair[0]

    def outbox(peer):
        if not (spoils and peer == pair[1]) or wrong in ("tag", "number"):
            return on_device(rank)
        return on_device(rank, rank) if wrong == "size" else on_device(rank, dtype="i8")

    inboxes = [on_device(-1) for _ in peers]
    messages = [receive(inboxes[peer], peer) for peer in peers]
    messages += [
        send(outbox(peer), peer, int(wrong == "tag" and spoils and peer == pair[1]))
        for peer in peers
        if not (wrong == "number" and spoils and peer == pair[1])
    ]
    works = dist.batch_isend_irecv(messages)
    for work, message in zip(works, messages, strict=True):
        if {rank, message.peer} == set(pair) and (size > 1 or rank == message.peer):
            with pytest.raises(dist.MismatchError, match=rf"ranks {pair[0]} and {pair[1]}"):
                work.wait()
            assert work.source == -1
        else:
            work.wait()
    arrived = [numbers(each) for each in inboxes]
    assert arrived == [[-1] if {rank, peer} == set(pair) else [peer] for peer in peers]
    exchange(*(send(on_device(rank + 1), peer) for peer in peers), *messages[:size])
    assert [numbers(each) for each in inboxes] == [[peer + 1] for peer in peers]


def test_a_peer_that_does_not_come_is_named_and_the_others_get_their_messages(short, rank, size):
    if size == 1:
        pytest.skip("one rank is never missing")
    absent, inbox = size - 1, on_device(-1)
    if rank == 0:
        peers = range(1, size)
        works = dist.batch_isend_irecv([send(on_device(5), peer, 0, short) for peer in peers])
        for peer, work in zip(peers, works, strict=True):
            if peer != absent:
                work.synchronize()
                continue
            with pytest.raises(dist.CollectiveTimeout, match=f"not joined by rank {absent}") as e:
                work.wait()
            assert e.value.missing == (absent,)
            assert "test_device_batch.py" in str(e.value)
    elif rank != absent:
        exchange(receive(inbox, 0, 0, short))[0].synchronize()
        assert numbers(inbox) == [5]
    MPI.COMM_WORLD.Barrier()
    if rank == absent:  # too late: it is not left waiting for numbers that never come
        with pytest.raises(dist.CollectiveTimeout, match="given up by rank 0"):
            exchange(receive(inbox, 0, 0, short))
    MPI.COMM_WORLD.Barrier()
    if rank == 0:  # what was given up is not taken for this
        exchange(*(send(on_device(6), peer, 1, short) for peer in range(1, size)))
    else:
        exchange(receive(inbox, 0, 1, short))
        assert numbers(inbox) == [6]


@pytest.mark.thorough
def test_batches_in_opposite_order_time_out_instead_of_hanging(batches, rank, size):
    if size == 1:
        pytest.skip("one rank is in one order")
    group = dist.new_group([0, 1], timeout=LIMIT_S) if rank < 2 else None
    if group is not None:
        dist.all_reduce(on_device(1), group=group)

        def in_this_order():
            steps = [
                lambda: exchange(
                    (send if rank == 0 else receive)(on_device(1), 1 - rank, 0, group)
                ),
                lambda: dist.all_reduce(on_device(1), group=group),
            ]
            for step in steps if rank == 0 else steps[::-1]:
                step()

        with pytest.raises(dist.CollectiveTimeout):
            in_this_order()
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.thorough
def test_a_first_batch_without_all_ranks_times_out_and_says_what_to_do(batches, rank, size):
    if size == 1:
        pytest.skip("one rank is all")
    group = dist.new_group(timeout=LIMIT_S)
    if rank < size - 1:
        with pytest.raises(dist.CollectiveTimeout, match="let a collective come first") as caught:
            exchange(send(on_device(1), rank, 0, group), receive(on_device(1), rank, 0, group))
        assert caught.value.missing == (size - 1,)
    dist.barrier()
    with pytest.raises(dist.CollectiveTimeout):
        dist.all_reduce(on_device(1), group=group)  # one rank is in the operation given up
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_device_that_fails_on_one_rank_is_told_to_its_peers(batches, monkeypatch, rank, size):
    dist.all_reduce(on_device(1))
    right, left = (rank + 1) % size, (rank - 1) % size
    messages = [send(on_device(1), right), receive(on_device(0), left)]

    def fail(*_):
        raise OSError("the device has fallen off the bus")

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(DEVICE, "record", fail)
        works = dist.batch_isend_irecv(messages)
    for work, peer in zip(works, (right, left), strict=True):
        if rank == 0:
            with pytest.raises(dist.TransportError, match="fallen off the bus"):
                work.wait()
        elif peer == 0:
            with pytest.raises(dist.RemoteError, match="fallen off the bus"):
                work.wait()
        else:
            work.wait()


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_communicator_that_was_aborted_is_told_to_its_peers(batches, monkeypatch, rank, size):
    dist.all_reduce(on_device(1))

    def over():
        raise dist.TransportError("NCCL was aborted in this group")

    if rank == 0:
        monkeypatch.setattr(carrier(), "check", over)
    peers = range(size)
    works = dist.batch_isend_irecv(
        [op(on_device(rank), peer) for peer in peers for op in (send, receive)]
    )
    for place, work in enumerate(works):
        if rank == 0:
            with pytest.raises(dist.TransportError, match="aborted"):
                work.wait()
        elif place // 2 == 0:
            with pytest.raises(dist.RemoteError, match="rank 0 cannot take part: NCCL was aborted"):
                work.wait()
        else:
            work.wait()
    monkeypatch.undo()


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("first", [True, False])
def test_a_batch_cannot_be_captured_in_a_graph(batches, monkeypatch, rank, size, first):
    right, left = (rank + 1) % size, (rank - 1) % size
    inbox = on_device(0)
    messages = [send(on_device(rank), right), receive(inbox, left)]
    if not first:
        exchange(*messages)
    with monkeypatch.context() as patch:
        patch.setattr(DEVICE, "is_capturing", lambda _: True)
        with pytest.raises(dist.UsageError, match="CUDA graph"):
            dist.batch_isend_irecv(messages)
    exchange(*messages)
    assert numbers(inbox) == [left]


def test_ranks_with_different_settings_are_refused(monkeypatch, rank, size):
    if size == 1:
        pytest.skip("one rank does not differ")
    dist.destroy_process_group()
    monkeypatch.setenv("HPCDIST_DEVICE_BATCHES", "staged" if rank == 0 else "nccl")
    with pytest.raises(dist.UsageError, match="DEVICE_BATCHES is staged on rank 0, but nccl on"):
        dist.init_parallel_env()
    monkeypatch.delenv("HPCDIST_DEVICE_BATCHES")
    dist.init_parallel_env()
