"""Between nodes a few bytes travel along with the agreement: one exchange, and nothing else."""

import time
from contextlib import nullcontext

import numpy as np
import pytest
from every_verb import calls, without_splits
from interrupted_drill import OPERATIONS, drill, ordinary
from mpi4py import MPI

import hpcdist as dist
from hpcdist.comm.hot import VERBS, hot
from hpcdist.transport.mpi import transport
from hpcdist.transport.mpi.exchange import GATHERED_UP_TO, ROOM
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.waiting.work import DONE


@pytest.fixture
def alone(world_with, size, monkeypatch):
    """Put each rank on a node of its own; return the kinds of what MPI carries besides."""
    if not 1 < size <= GATHERED_UP_TO:
        pytest.skip("needs two to sixteen ranks")
    world_with(ranks_per_node=1)
    carried, verb_of = [], transport.verb_of

    def noted(kind):
        return lambda *args: [carried.append(kind.name.lower()), verb_of(kind)(*args)][1]

    monkeypatch.setattr(transport, "verb_of", noted)
    return carried


def numbers(nbytes):
    return np.arange(nbytes // 8.0)


def test_arrays_of_a_few_bytes_are_all_there(alone, rank, size):
    x, y = numbers(ROOM), np.empty((size, 1))
    dist.all_reduce(x)
    np.testing.assert_array_equal(x, size * numbers(ROOM))
    dist.stream.all_gather(y, np.array([rank / 2]))
    np.testing.assert_array_equal(y[:, 0], np.arange(size) / 2)
    x = numbers(ROOM) if rank == size - 1 else np.zeros(ROOM // 8)
    dist.broadcast(x, size - 1)
    np.testing.assert_array_equal(x, numbers(ROOM))
    dist.alltoall_single(y, np.full((size, 1), float(rank)))
    np.testing.assert_array_equal(y[:, 0], np.arange(size))
    assert alone == []


def test_what_is_longer_goes_by_mpi(alone, size):
    x = numbers(ROOM + 8)
    dist.all_reduce(x)
    np.testing.assert_array_equal(x, size * numbers(ROOM + 8))
    assert alone == ["all_reduce"]


@pytest.mark.parametrize(("length", "carried"), [(20, []), (1000, ["all_gather_object"])])
def test_objects_travel_along_where_the_longest_fits(alone, rank, size, length, carried):
    found = []
    dist.all_gather_object(found, (rank, "x" * (length if rank == 0 else 3)))
    assert [first for first, _ in found] == list(range(size))
    assert [len(text) for _, text in found] == [length, *[3] * (size - 1)]
    assert alone == carried


def test_an_array_that_fits_on_some_ranks_only_is_whole_on_all(alone, rank, size):
    found = []
    dist.all_gather(found, numbers(8 if rank else 2 * ROOM))
    assert [each.nbytes for each in found] == [2 * ROOM, *[8] * (size - 1)]
    assert alone == ["all_gather"]


# ---- in one compiled call


@pytest.fixture
def in_one_call(alone, and_the_world_goes_on):
    if dist.get_group().transport.hot is None:
        pytest.skip("needs the compiled kernel, and persistent collectives of MPI")


LISTS = "gather", "alltoall"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 3)])
@pytest.mark.parametrize("dtype", ["?", "i1", "f4", "f8"])
@pytest.mark.usefixtures("in_one_call")
def test_both_ways_meet_and_give_the_same_bits(verb, shape, dtype, rank, size):
    for root in {0, size - 1}:
        found = []
        for is_hot in (False, True, rank % 2 == 0):
            args, result = calls(rank, size, shape, dtype, root)[verb]
            with nullcontext() if is_hot else switched_off():
                getattr(dist, verb)(*without_splits(args))
            found.append(np.array(result).tobytes())
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("verb", [each for each in VERBS if each not in LISTS])
@pytest.mark.usefixtures("in_one_call")
def test_what_has_no_room_in_a_slot_is_agreed_on_in_the_same_call(verb, rank, size):
    for shape in (1,), (ROOM,), (50_000,):
        args, result = calls(rank, size, shape, "f8", 1 % size)[verb]
        assert getattr(hot, verb)(*args, None, True) is DONE
        args, expected = calls(rank, size, shape, "f8", 1 % size)[verb]
        with switched_off():
            getattr(dist, verb)(*without_splits(args))
        np.testing.assert_array_equal(result, expected)


@pytest.mark.usefixtures("in_one_call")
def test_others_may_come_late_and_nobody_may_wait(rank, size):
    x, y = np.array([rank + 1.0]), np.zeros(2)
    for last in range(size):
        if rank == last:
            time.sleep(0.05)
        work = dist.all_reduce(x, sync_op=False)
        y[:] = rank
        dist.broadcast(y, last)
        work.wait()
        assert (y == last).all()
    assert x[0] == size ** (size - 1) * size * (size + 1) / 2


@pytest.mark.usefixtures("in_one_call")
def test_ranks_that_disagree_are_told_and_go_on(rank, size):
    x = np.ones(1 + (rank == 0))
    with pytest.raises(dist.MismatchError, match=r"all_reduce\(shape \(1,\)"):
        dist.all_reduce(x)
    assert (x == 1).all()
    with pytest.raises(dist.MismatchError):
        dist.barrier() if rank else dist.all_reduce(x)
    dist.all_reduce(x[:1])
    assert x[0] == size


@pytest.mark.usefixtures("in_one_call")
def test_who_comes_after_the_time_limit_hears_of_it_and_all_are_in_step(rank, size):
    group, x, last = dist.new_group(timeout=30), np.ones(1), size - 1
    assert group.transport.hot is not None
    dist.barrier(group)
    group.transport.set_timeout(0.3)
    for other in range(rank if rank == last else 0):
        dist.recv(np.zeros(1), other)
    with pytest.raises(dist.CollectiveTimeout):
        dist.all_reduce(x, group=group)
    if rank != last:
        dist.send(x, last)
    group.transport.set_timeout(30)
    dist.all_reduce(x, group=group)
    assert x[0] == size
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("in_one_call")
def test_a_rank_that_is_interrupted_takes_part_and_the_others_go_on(size):
    group = dist.new_group(timeout=30)
    assert {each.__name__: drill(group, each, ordinary, 8, True) for each in OPERATIONS} == {
        each.__name__: [] for each in OPERATIONS
    }
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("in_one_call")
def test_what_mpi_raises_is_an_error_of_hpcdist_and_nothing_is_left(size):
    group, x = dist.new_group(), np.ones(1)
    context, called = group.transport.context, group.transport.hot

    def fail():
        raise MPI.Exception(MPI.ERR_OTHER)

    wire = context.slots.wire
    called.learn_slots(*wire._replace(start=fail), context.agreement.clock_ns, context.under_way)
    with pytest.raises(dist.TransportError):
        dist.all_reduce(x, group=group)
    assert x[0] == 1
    called.learn_slots(*wire, context.agreement.clock_ns, context.under_way)
    for _ in range(2):
        dist.all_reduce(x, group=group)
    assert x[0] == size**2
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("in_one_call")
def test_what_is_under_way_ends_before_its_group_does(rank, size):
    group, x = dist.new_group(), np.array([rank + 1.0])
    if rank == size - 1:
        time.sleep(0.05)
    work = dist.all_reduce(x, sync_op=False, group=group)
    dist.destroy_process_group(group)
    work.wait()
    assert x[0] == size * (size + 1) / 2
