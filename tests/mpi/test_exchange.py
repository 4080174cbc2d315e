"""Exchanges: by which way boxes go, and what happens where a rank fails; on any number of ranks."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.comm.exchanges import exchange
from hpcdist.comm.session import require_session
from hpcdist.testing.contract.exchanges import (
    Trade,
    all_of,
    some_trades,
    trade,
    traded,
    transposing,
    whole_to_all,
)
from hpcdist.transport.call.call import Give, Read
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi import boxes, intranode_boxes
from hpcdist.transport.mpi.hierarchical import boxes as hierarchical_boxes
from hpcdist.transport.mpi.objects import OBJECT_VERBS

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
LARGE, SMALL = 512, 8
"""Rows of every rank: more than the staging memory holds, and as few as the control block does."""


@pytest.fixture
def by_mpi(monkeypatch):
    """Count the exchanges that go by MPI."""
    counted, verb = [], OBJECT_VERBS[Kind.EXCHANGE]

    def counting(*args):
        counted.append(args)
        return verb(*args)

    monkeypatch.setitem(OBJECT_VERBS, Kind.EXCHANGE, counting)
    return counted


def transpose(rows, make=np.empty, **options):
    """Make columns of rows and compare; every rank has `rows` of them."""
    shape, turned, trades = transposing(SIZE, rows)
    send, recv = make(shape, "f8"), make(turned, "f8")
    whole = np.arange(float((rows * SIZE) ** 2)).reshape(rows * SIZE, -1)
    send[...] = whole[RANK * rows : (RANK + 1) * rows]
    trade(send, recv, trades, [shape] * SIZE, **options)
    np.testing.assert_array_equal(recv, whole[:, RANK * rows : (RANK + 1) * rows])


@several
@pytest.mark.parametrize("rows", [SMALL, 100, LARGE])
@pytest.mark.parametrize("make", [np.empty, dist.empty], ids=["ordinary", "shared"])
def test_on_one_node_boxes_are_read_where_they_lie(by_mpi, rows, make):
    for _ in range(3):
        transpose(rows, make)
    assert by_mpi == []


@several
def test_a_copy_for_others_is_given_back(world):
    heap = world.transport.context.heap
    transpose(LARGE)
    before = heap.used
    for _ in range(5):
        transpose(LARGE)
    assert heap.used <= before


@several
@pytest.mark.parametrize("full_on", ["one rank", "all ranks"])
def test_where_a_heap_is_full_all_ranks_send_by_mpi(monkeypatch, world, by_mpi, full_on):
    if full_on == "all ranks" or RANK == SIZE - 1:
        monkeypatch.setattr(type(world.transport.context.heap), "empty", lambda *_: None)
    transpose(LARGE)
    assert len(by_mpi) == 1
    transpose(SMALL)
    assert len(by_mpi) == 1


@several
def test_a_heap_that_is_too_small_is_told_once(world_with, by_mpi):
    world_with(shared_heap_mb=1)
    with pytest.warns(RuntimeWarning, match="does not fit into shared memory"):
        transpose(LARGE)
    transpose(LARGE)
    assert len(by_mpi) == 2


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_warning_that_is_an_error_is_one_on_every_rank(world_with, by_mpi):
    world_with(shared_heap_mb=1)
    with pytest.raises(dist.TransportError, match="does not fit into shared memory"):
        transpose(LARGE)
    assert by_mpi == []


def test_between_nodes_boxes_go_by_mpi(world_with, by_mpi):
    world_with(ranks_per_node=1)
    for rows in (SMALL, LARGE):
        transpose(rows)
    assert len(by_mpi) == 2


@pytest.fixture
def messages(monkeypatch):
    """Note between which ranks messages go."""
    noted, start = [], hierarchical_boxes._started

    def noting(begin, runs):
        if begin.__name__ == "Isend":
            noted.extend((RANK, rank) for rank, run in enumerate(runs) if run.size)
        return start(begin, runs)

    monkeypatch.setattr(hierarchical_boxes, "_started", noting)
    return noted


@pytest.mark.skipif(SIZE < 3, reason="needs a node of two ranks, and another one")
@pytest.mark.parametrize("make", [np.empty, dist.empty], ids=["ordinary", "shared"])
def test_between_nodes_only_what_crosses_them_is_sent(world_with, messages, by_mpi, make):
    world_with(ranks_per_node=2)
    for rows in (100, LARGE):
        for _ in range(3):
            transpose(rows, make)
    assert by_mpi == []
    assert {*messages} == {(RANK, other) for other in range(SIZE) if other // 2 != RANK // 2}


@pytest.mark.skipif(SIZE < 3, reason="needs a node of two ranks, and another one")
def test_between_nodes_who_has_no_memory_that_others_see_sends_to_all(
    monkeypatch, world_with, messages
):
    world_with(ranks_per_node=2)
    transpose(LARGE)
    messages.clear()
    if RANK == 0:
        heap = require_session().world.transport.context.heap
        monkeypatch.setattr(type(heap), "empty", lambda *_: None)
    transpose(LARGE)
    others = {other for other in range(SIZE) if other != RANK and (other // 2 != RANK // 2)}
    assert {*messages} == {(RANK, other) for other in (range(1, SIZE) if RANK == 0 else others)}


def without_memory(*_):
    raise MemoryError("none left")


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize(
    ("module", "step", "per_node"),
    [
        pytest.param(boxes, "packed", 1, marks=several),
        *(
            pytest.param(hierarchical_boxes, step, 2, marks=pytest.mark.skipif(SIZE < 3, reason=""))
            for step in ("send_apart", "_offered", "packed", "in_place")
        ),
    ],
)
def test_between_nodes_one_rank_without_memory_fails_on_all(
    monkeypatch, world_with, module, step, per_node
):
    world_with(ranks_per_node=per_node)
    transpose(LARGE)
    for failing in {0, SIZE - 1}:
        with monkeypatch.context() as patch:
            if failing == RANK:
                patch.setattr(module, step, without_memory)
            expected = dist.TransportError if failing == RANK else dist.RemoteError
            with pytest.raises(expected, match="none left"):
                transpose(LARGE)
        transpose(LARGE)


@pytest.mark.skipif(SIZE < 3, reason="needs a node of two ranks, and another one")
def test_between_nodes_any_boxes_go_to_any_boxes(monkeypatch, world_with):
    world_with(ranks_per_node=2)
    monkeypatch.setattr(hierarchical_boxes, "WORTH_IT", 0)
    for seed in range(30):
        given, filled, trades = some_trades(SIZE, seed)
        arrays = [np.random.default_rng(each).random(shape) for each, shape in enumerate(given)]
        recv = np.zeros(filled[RANK])
        trade(arrays[RANK], recv, trades, given)
        expected = traded(arrays, np.zeros(filled[RANK]), RANK, trades)
        np.testing.assert_array_equal(recv, expected)


def test_between_nodes_a_rank_may_take_from_itself_alone(world_with):
    world_with(ranks_per_node=1)
    whole, half = all_of((4, 4)), (slice(0, 2), slice(0, 4))
    trades = [Trade(each, each, half, (slice(2, 4), slice(0, 4))) for each in range(SIZE)]
    recv = np.zeros((4, 4))
    for expected in (0, RANK + 1.0):
        trade(np.full((4, 4), RANK + 1.0), recv, trades if expected else [], [(4, 4)] * SIZE)
        assert (recv[2:] == expected).all()
        assert not recv[:2].any()
    trade(recv, recv, [Trade(0, each, whole, whole) for each in range(SIZE)], [(4, 4)] * SIZE)
    assert recv[3].tolist() == [1.0] * 4


def test_more_than_one_call_of_mpi_counts_goes_from_rank_to_rank(monkeypatch, world_with):
    world_with(ranks_per_node=1)
    monkeypatch.setattr(boxes, "INT_MAX", 100)
    for seed in range(10):
        given, filled, trades = some_trades(SIZE, seed)
        arrays = [np.random.default_rng(each).random(shape) for each, shape in enumerate(given)]
        recv = np.zeros(filled[RANK])
        trade(arrays[RANK], recv, trades, given)
        expected = traded(arrays, np.zeros(filled[RANK]), RANK, trades)
        np.testing.assert_array_equal(recv, expected)


@pytest.mark.parametrize("dtype", ["f4", "f2", "c16"])
def test_sums_have_the_same_bits_by_every_way(world_with, dtype):
    shape = 30, 1000
    arrays = [np.random.default_rng(each).random(shape).astype(dtype) for each in range(SIZE)]
    total = arrays[0].astype("f4" if dtype == "f2" else dtype)
    for each in arrays[1:]:
        total = total + each
    for settings in ({}, {"ranks_per_node": 1}, {"ranks_per_node": 2}):
        if settings:
            world_with(**settings)
        for make in (np.empty, dist.empty):
            send, recv = make(shape, dtype), make(shape, dtype)
            send[...] = arrays[RANK]
            trade(send, recv, whole_to_all(SIZE, shape), [shape] * SIZE, dist.ReduceOp.SUM)
            assert recv.tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", ["S5", "U3", [("id", "i4"), ("x", "f8", (2,))], "longdouble"])
def test_elements_of_any_bytes_are_exchanged(world_with, dtype):
    dtype = np.dtype(dtype)
    arrays = [np.zeros((3, 4), dtype) for _ in range(SIZE)]
    for each, array in enumerate(arrays):
        array.view("u1").reshape(-1)[:] = (np.arange(array.nbytes) + each) % 64
    part = all_of((2, 3))
    for settings in ({}, {"ranks_per_node": 1}):
        if settings:
            world_with(**settings)
        recv = np.zeros((2, 3), dtype)
        source = (RANK + 1) % SIZE
        reads = [Read(source, (3, 4), (slice(1, 3), slice(0, 3)), part)]
        gives = [Give((RANK - 1) % SIZE, (slice(1, 3), slice(0, 3)))]
        exchange(arrays[RANK], recv, reads, gives, rule_op=None, key=1, words="bytes")
        assert recv.tobytes() == arrays[source][1:3, :3].tobytes()


def test_arrays_with_gaps_are_exchanged(world):
    shape, turned, trades = transposing(SIZE, 5)
    whole = np.arange(float((5 * SIZE) ** 2)).reshape(5 * SIZE, -1)
    send = np.repeat(whole[RANK * 5 : (RANK + 1) * 5], 2, axis=1)[:, ::2]
    recv = np.zeros((turned[1], turned[0])).T
    trade(send, recv, trades, [shape] * SIZE, sync_op=False).wait()
    np.testing.assert_array_equal(recv, whole[:, RANK * 5 : (RANK + 1) * 5])


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_an_array_that_cannot_be_filled_is_an_error_on_every_rank():
    recv = np.zeros(3)
    recv.flags.writeable = RANK != SIZE - 1
    expected = dist.UsageError if RANK == SIZE - 1 else dist.RemoteError
    with pytest.raises(expected, match=f"rank {SIZE - 1}: recv is read-only"):
        trade(np.ones(3), recv, [], [(3,)] * SIZE)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_two_dtypes_are_an_error_on_every_rank():
    dtype = "f4" if RANK == SIZE - 1 else "f8"
    expected = dist.UsageError if RANK == SIZE - 1 else dist.RemoteError
    with pytest.raises(expected, match="send is float64 but recv is float32"):
        trade(np.ones(3), np.zeros(3, dtype), [], [(3,)] * SIZE)


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_no_memory_for_a_copy_is_an_error_on_every_rank(monkeypatch, world):
    def full(*_):
        raise MemoryError("nothing is left")

    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(type(world.transport.context.heap), "empty", full)
        expected = dist.TransportError if RANK == SIZE - 1 else dist.RemoteError
        with pytest.raises(expected, match="nothing is left"):
            transpose(LARGE)
    transpose(LARGE)


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_rank_that_fails_while_it_reads_holds_up_nobody(monkeypatch):
    def failing(*_):
        raise MemoryError("nothing is left")

    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(intranode_boxes, "fill", failing)
            with pytest.raises(MemoryError):
                transpose(LARGE, dist.empty)
        else:
            transpose(LARGE, dist.empty)
    transpose(LARGE, dist.empty)


@several
def test_a_rank_that_does_not_come_is_named_with_the_exchange_it_misses(rank):
    group = dist.new_group(timeout=1)
    over = np.zeros(1)
    if rank == SIZE - 1:
        dist.recv(over, 0)
    with pytest.raises(dist.CollectiveTimeout, match=r"exchange\(rows to columns") as caught:
        transpose(SMALL, group=group, words="rows to columns")
    if rank == 0:
        dist.send(over, SIZE - 1)
        assert caught.value.missing == (SIZE - 1,)
    dist.barrier()
    transpose(SMALL, group=group)
