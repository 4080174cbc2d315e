"""Messages under MPI: the bound on early ones, time limits, other threads, other libraries' names.

What holds for every transport is in the contract (`hpcdist/testing/contract/messages.py`).
"""

import re
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.arrays.buffer import Buffer
from hpcdist.transport.mpi import transport as mpi_transport
from hpcdist.transport.waiting import polling

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")
MB = 1 << 20

threads = pytest.mark.skipif(
    MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="this MPI allows one thread only"
)


def raised(kind, function, *args, **options):
    with pytest.raises(kind) as caught:
        function(*args, **options)
    return str(caught.value)


# ---- the bound


@pytest.mark.thorough
def test_what_exceeds_the_bound_stays_with_its_sender_and_both_are_told_why(world_with, rank, size):
    if size == 1:
        return
    world_with(early_mb=1)
    limited = dist.new_group(timeout=3)
    large, got = np.full(8 * MB // 8, 7.0), np.empty(8 * MB // 8)
    small = np.full(MB // 16, 5.0)
    if rank == 0:
        dist.send(small, 1, limited, tag=3)
        told = raised(dist.CollectiveTimeout, dist.send, large, 1, limited, tag=4)
    else:
        told = raised(dist.CollectiveTimeout, dist.barrier, limited)
        assert "missing ranks: 0" in told
        assert re.search(r"Rank 0 .*send to rank 1 .* with tag 4", told)
    if rank < 2:
        for words in (
            "HPCDIST_EARLY_MB",
            "the 8 MiB from rank 0 with tag 4 do not fit into the 1 MiB",
            "0.5 MiB are taken by 1 from rank 0 with tag 3",
            "receive messages earlier",
        ):
            assert words in told, told
    if rank == 1:  # nothing is lost
        dist.recv(got, 0, limited, tag=4)
        assert (got == 7).all()
        dist.recv(small, 0, limited, tag=3)
    dist.barrier()


def test_the_bound_does_not_hold_up_what_is_asked_for(world_with, rank, size):
    world_with(early_mb=1)
    to, source = (rank + 1) % size, (rank - 1) % size
    count = 600_000 // 8
    works = [dist.isend(np.full(count, tag), to, tag=tag) for tag in range(5)]
    for tag in (4, 0, 3, 1, 2):
        got = np.empty(count, int)
        dist.recv(got, source, tag=tag)
        assert (got == tag).all()
    for work in works:
        work.wait()


def test_memory_of_early_messages_is_given_back(world_with, rank, size):
    world_with(early_mb=1)
    to, source = (rank + 1) % size, (rank - 1) % size
    count = 600_000 // 8
    for turn in range(5):  # together far above the bound
        dist.send(np.full(count, turn), to, tag=1)
        dist.barrier()
        got = np.empty(count, int)
        dist.recv(got, source, tag=1)
        assert (got == turn).all()


def test_what_was_taken_in_of_a_group_goes_with_it(world_with, rank, size):
    world_with(early_mb=1)
    to, source = (rank + 1) % size, (rank - 1) % size
    x = np.empty(600_000 // 8)
    for _ in range(3):  # nobody receives these
        group = dist.new_group()
        dist.send(x, to, group)
        dist.barrier()
        dist.destroy_process_group(group)
    dist.send(x, to)
    dist.barrier()
    dist.recv(x, source)


# ---- several threads


@threads
def test_threads_that_wait_in_different_groups_take_in_for_each_other(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    groups, wrong = [dist.new_group() for _ in range(3)], []

    def use(group):
        try:
            for turn in range(5):
                for tag in (1, 2):
                    dist.send(np.full(5000, tag + turn), to, group, tag=tag)
                dist.barrier(group)
                for tag in (2, 1):
                    got = np.empty(5000, int)
                    dist.recv(got, source, group, tag=tag)
                    assert (got == tag + turn).all()
        except BaseException as error:
            wrong.append(error)

    users = [threading.Thread(target=use, args=(group,)) for group in groups]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong
    for group in groups:
        dist.destroy_process_group(group)


@threads
def test_another_thread_may_still_send_what_matches(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    go_on = threading.Event()

    def send_later():
        go_on.wait()
        dist.send(np.full(3, 7, "i4"), to)

    sender = threading.Thread(target=send_later)
    sender.start()
    dist.send(np.ones(3), to)
    receive = dist.irecv(got := np.zeros(3, "i4"), source)
    with pytest.raises(dist.CollectiveTimeout, match="a message of float64, which stays"):
        receive.wait(1)
    dist.barrier()
    go_on.set()
    receive.wait()
    sender.join()
    assert (got == 7).all()
    dist.recv(np.empty(3), source)


# ---- time limits


def test_a_message_of_another_dtype_is_named_when_the_time_is_over(rank, size):
    if size < 3:
        return
    group = dist.new_group(timeout=1)
    if rank == 0:
        dist.send(np.ones(3), 1, group)
        dist.recv(np.empty(1), 2)  # it might send what rank 1 waits for after that
    elif rank == 1:
        told = raised(dist.MismatchError, dist.recv, np.empty(3, "i4"), 0, group)
        assert "rank 0 sent 24 bytes of float64, but rank 1 receives 12 bytes of int32" in told
        assert "sent none of that within 1 s" in told
        assert re.search(r"Rank 0 waits in recv from rank 2 .*test_messages.py", told)
        dist.recv(np.empty(3), 0, group)
        MPI.COMM_WORLD.send(None, 2)
    elif rank == 2:
        MPI.COMM_WORLD.recv(source=1)  # outside hpcdist: nobody can know what comes next
        dist.send(np.empty(1), 0)


def test_dtypes_without_a_name_differ_in_messages(rank, size):
    if size == 1:
        return
    given = np.array([1, 2], "M8[s]")
    if rank == 0:
        dist.send(given, 1)
    elif rank == 1:
        for dtype in "M8[ns]", "m8[D]", "S8", "i4,i4":
            told = raised(dist.MismatchError, dist.recv, np.empty(2, dtype), 0)
            assert "16 bytes of a structured or other dtype" in told
        got = np.empty(2, "M8[s]")
        dist.recv(got, 0)
        assert (got == given).all()
    dist.barrier()


def test_a_receive_of_which_nothing_has_come_names_where_its_sender_waits(rank, size):
    if size == 1:
        return
    group, other = dist.new_group(timeout=3), dist.new_group()
    if rank == 1:
        told = raised(dist.CollectiveTimeout, dist.recv, np.empty(1), 0, group, tag=2)
        assert re.search(r"Rank 0 waits in barrier\(\), operation #1 .*test_messages.py", told)
    dist.barrier(other)


def test_a_rank_that_waits_in_new_group_is_named(rank, size):
    if size == 1:
        return
    group = dist.new_group(timeout=1)
    if rank == 1:
        told = raised(dist.CollectiveTimeout, dist.recv, np.empty(1), 0, group)
        assert re.search(r"Rank 0 waits in new_group\(\[0, 1", told)
    dist.destroy_process_group(dist.new_group())


def test_a_wait_with_a_limit_of_its_own_is_short_and_may_be_repeated(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    receive = dist.irecv(got := np.zeros(1), source)
    for limit in (0, 0.01):
        with pytest.raises(dist.CollectiveTimeout, match="recv from rank"):
            receive.wait(limit)
    dist.barrier()
    dist.send(np.ones(1), to)
    receive.wait()
    assert got[0] == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("touch", [lambda work: work.wait(), lambda work: dist.wait_any([work])])
def test_a_receive_whose_group_has_been_destroyed_says_so(touch, rank, size, capfd):
    group = dist.new_group()
    receive = dist.irecv(np.zeros(1), (rank - 1) % size, group)
    dist.destroy_process_group(group)
    with pytest.raises(dist.UsageError, match="had not come when the group was destroyed"):
        touch(receive)
    assert "have ended: recv" in capfd.readouterr().err


# ---- objects


@pytest.mark.parametrize("count", [10, 100_000])
def test_objects_of_several_receives_do_not_mix(count, rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    works = [
        dist.send_object_list([turn, np.full(count, turn)], to, sync_op=False) for turn in range(4)
    ]
    lists = [[None, None] for _ in range(4)]
    receives = [dist.recv_object_list(each, source, sync_op=False) for each in lists]
    for work in reversed([*works, *receives]):
        work.wait()
    assert [each[0] for each in lists] == [0, 1, 2, 3]
    assert all((each[1] == turn).all() for turn, each in enumerate(lists))
    assert all(each[1].size == count for each in lists)


def test_objects_against_an_array_are_a_mismatch(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    dist.send_object_list([1], to)
    told = raised(dist.MismatchError, dist.recv, np.empty(3), source)
    assert "bytes of pickled objects" in told
    dist.barrier()  # or what a rank sends next is what its neighbour waits for
    got = [None]
    dist.recv_object_list(got, source)
    assert got == [1]
    dist.send(np.ones(3), to)
    told = raised(dist.MismatchError, dist.recv_object_list, [None], source)
    assert "24 bytes of float64" in told
    dist.barrier()
    dist.recv(np.empty(3), source)


def test_what_was_not_received_in_time_arrives_whole_all_the_same(world_with, rank, size):
    """MPI cannot take it back, and reads the array until it is received."""
    if size == 1:
        return
    world_with(early_mb=1)
    limited = dist.new_group(timeout=1)
    count = 4 * MB
    if rank == 0:
        told = raised(dist.CollectiveTimeout, dist.send, np.full(count, 7.0), 1, limited)
        assert "leave the array alone" in told
        other = [np.full(count, 3.0) for _ in range(4)]  # in the memory of the first, if it is free
        assert other[0][0] == 3
    elif rank == 1:
        raised(dist.CollectiveTimeout, dist.recv, np.zeros(1), 0, limited, tag=9)
    dist.barrier()
    if rank == 1:
        got = np.zeros(count)
        dist.new_group([1])  # whatever happens in between
        dist.recv(got, 0, limited)
        assert (got == 7).all()
    dist.barrier()


def test_many_receives_may_wait_at_once(rank, size):
    arrays = [np.zeros(3) for _ in range(1000)]
    works = [dist.irecv(array, (rank - 1) % size) for array in arrays]
    works += [dist.isend(np.full(3, at), (rank + 1) % size) for at in np.arange(1000.0)]
    dist.wait_all(works)
    assert [array[0] for array in arrays] == list(range(1000))


def test_a_group_that_cannot_be_made_leaves_nothing_to_be_done_for_it(monkeypatch, world):
    if world.transport.hot is None:
        pytest.skip("needs ranks that share memory by the compiled kernel")

    def fail(*_):
        raise ZeroDivisionError

    errands = list(polling._errands)
    with monkeypatch.context() as broken:
        broken.setattr(mpi_transport, "open_hot", fail)
        with pytest.raises(ZeroDivisionError):
            dist.new_group()
    assert polling._errands == errands
    group = dist.new_group()
    assert len(polling._errands) == len(errands) + 1
    dist.destroy_process_group(group)
    assert polling._errands == errands


# ---- names of other libraries


def test_a_batch_may_hold_messages_to_no_rank(rank, size):
    left = rank - 1 if rank > 0 else dist.PROC_NULL
    right = rank + 1 if rank + 1 < size else dist.PROC_NULL
    halo = np.full(2, -1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, halo[:1], left),
            dist.P2POp(dist.irecv, halo[1:], right),
            dist.P2POp(dist.isend, np.array([rank]), left),
            dist.P2POp(dist.isend, np.array([rank]), right),
        ]
    )
    dist.wait_all(works)
    assert halo.tolist() == [rank - 1, rank + 1 if rank + 1 < size else -1]
    assert (works[1].source == dist.PROC_NULL) == (right == dist.PROC_NULL)


def test_the_null_process_of_mpi4py_is_no_rank_either(rank):
    x = np.full(3, 7.0)
    dist.send(x, MPI.PROC_NULL)
    assert dist.recv(x, MPI.PROC_NULL).source == dist.PROC_NULL
    assert (x == 7).all()
    with pytest.raises(dist.UsageError, match="src"):
        dist.recv(x, MPI.ANY_SOURCE)


# ---- threads


@threads
def test_a_receive_has_ended_only_when_its_array_is_filled(monkeypatch, rank, size):
    """One thread fills the array, slowly, while another one asks whether the receive has ended."""
    unpack, is_filling = Buffer.unpack, threading.Event()

    def slowly(buffer):
        is_filling.set()
        time.sleep(0.05)
        unpack(buffer)

    monkeypatch.setattr(Buffer, "unpack", slowly)
    expected = np.arange(1000.0)
    got = np.zeros((1000, 2))[:, 0]  # not contiguous: filled from a packed copy
    work = dist.irecv(got, (rank - 1) % size)
    filling = threading.Thread(target=work.wait)
    filling.start()
    sent = dist.isend(expected, (rank + 1) % size)
    is_filling.wait()
    assert work.is_completed()
    assert (got == expected).all()
    filling.join()
    sent.wait()
