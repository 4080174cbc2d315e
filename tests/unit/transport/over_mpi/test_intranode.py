"""Which way a collective takes between the ranks of a node: before and after they agree."""

import ml_dtypes
import numpy as np
import pytest

import hpcdist as dist
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.call import (
    UNEVEN,
    Barrier,
    Distribution,
    Exchange,
    Gathering,
    Objects,
    Reduction,
    Refusal,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import rule_for
from hpcdist.transport.mpi import intranode as ways, intranode_large as large
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.shm.node import IN_PAYLOAD, IN_STAGE, NOTHING
from hpcdist.transport.tuning import DEFAULT, TuningTable

SIZE = 4
SMALL, LARGE = 1, 1 << 20
REDUCED = Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER
SCANS = Kind.SCAN, Kind.EXSCAN
MOVED = Kind.BROADCAST, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL
FIELDS = {Barrier: 0, Refusal: 3, Objects: 2, Exchange: 11}
"""Those without a default, by family."""

IN_HEAP, ORDINARY, UNFIT = 65, -4096, 0
"""What a rank may publish."""

needs_loops = pytest.mark.skipif(compiled is None, reason="there is no compiled loop")


def reduction(kind, count, dtype="f4", op=dist.ReduceOp.SUM):
    data = np.zeros(count * SIZE, dtype)
    row = dtype_row(data.dtype)
    send = data if kind is Kind.REDUCE_SCATTER else None
    recv = data[:count] if kind is Kind.REDUCE_SCATTER else data
    return Reduction(kind, send, recv, row, recv.shape, 0, op, rule_for(op, row))


def moved(kind, count, detail=0):
    data = np.zeros(count * SIZE, "f4")
    family = Distribution if kind in (Kind.BROADCAST, Kind.SCATTER) else Gathering
    send = None if kind is Kind.BROADCAST else data
    recv = data if kind in (Kind.BROADCAST, Kind.ALLTOALL) else data[:count]
    if family is Gathering and kind is not Kind.ALLTOALL:
        send, recv = data[:count], data.copy()
    return family(kind, send, recv, dtype_row(data.dtype), (count,), 0, detail)


def choose(call, compiled=True):
    return ways.choose(call, SIZE, compiled)


def table(**facts):
    return TuningTable(DEFAULT, SIZE, several_nodes=False, **facts)


# ---- before anybody is asked


def test_what_has_no_arrays_has_a_way_of_its_own():
    found = {family: choose(family(*[None] * n)) for family, n in FIELDS.items()}
    assert found == {
        Barrier: ways.agree_only,
        Refusal: ways.agree_only,
        Objects: ways.exchange_objects,
        Exchange: ways.exchange_boxes,
    }


@needs_loops
@pytest.mark.parametrize("kind", REDUCED)
@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16, "c16"])
def test_a_small_reduction_is_agreed_on_and_done_in_one_compiled_call(kind, dtype):
    assert choose(reduction(kind, SMALL, dtype)) is ways.combine_small


@needs_loops
def test_the_largest_that_is_small_fills_the_control_block():
    most = PAYLOAD // 4 // SIZE
    assert choose(reduction(Kind.ALL_REDUCE, most)) is ways.combine_small
    assert choose(reduction(Kind.ALL_REDUCE, most + 1)) is ways.all_reduce_large
    assert choose(reduction(Kind.REDUCE_SCATTER, most + 1)) is ways.run_large


@pytest.mark.parametrize("kind", [*REDUCED, *SCANS])
def test_a_small_reduction_without_a_compiled_loop_is_taken_from_the_control_block(kind):
    assert choose(reduction(kind, SMALL), compiled=False) is ways.take_small
    if kind not in SCANS:
        without = reduction(kind, SMALL, "c16", dist.ReduceOp.AVG)
        assert choose(without) is ways.take_small


@pytest.mark.parametrize("kind", MOVED)
def test_small_data_are_moved_by_the_call_that_agrees_unless_blocks_differ(kind):
    assert choose(moved(kind, SMALL)) is ways.move_small
    assert choose(moved(kind, SMALL, UNEVEN)) is ways.take_small
    assert choose(moved(kind, SMALL), compiled=False) is ways.take_small


@pytest.mark.parametrize("kind", [*MOVED, *SCANS])
def test_large_data_are_published(kind):
    call = reduction(kind, LARGE) if kind in SCANS else moved(kind, LARGE)
    assert choose(call) is choose(call, compiled=False) is ways.run_large


# ---- what a rank publishes


@pytest.mark.parametrize("kind", REDUCED)
def test_an_array_is_offered_where_it_lies_in_the_heap_or_else_in_ordinary_memory(kind):
    call = reduction(kind, LARGE)
    offers = large.choose_offers(call, call.nbytes, table(), gives=True)
    assert offers == (large.in_heap, large.attached)
    cannot = large.choose_offers(call, call.nbytes, table(attaches=False), gives=True)
    assert cannot == (large.in_heap,)


def test_a_scan_offers_copies_as_it_would_overwrite_what_others_read():
    call = reduction(Kind.SCAN, 5000)
    assert large.choose_offers(call, call.nbytes, table(), gives=True) == (large.staged,)


def test_who_only_receives_offers_an_array_to_be_filled_and_copies_nothing():
    call, cannot = moved(Kind.BROADCAST, 5000), table(attaches=False)
    offers = large.choose_offers(call, call.nbytes, cannot, gives=True)
    assert offers == (large.in_heap, large.staged)
    assert large.choose_offers(call, call.nbytes, cannot, gives=False) == (large.in_heap,)


# ---- what is done once all have agreed


def end(call, *addresses, can_pipeline=True, detail=(0, 0), **facts):
    given = {"can_pipeline": can_pipeline}
    return large.choose_end(call, detail, addresses, table(**facts), **given)


@needs_loops
@pytest.mark.parametrize("kind", REDUCED)
def test_a_reduction_goes_through_the_pipe_where_some_array_is_nowhere_or_arrays_are_mixed(kind):
    call = reduction(kind, 5000)
    assert end(call, *[ORDINARY] * SIZE) is large.attached_reduced
    for addresses in ([UNFIT, *[ORDINARY] * 3], [IN_HEAP, *[ORDINARY] * 3], [UNFIT] * SIZE):
        assert end(call, *addresses) is large.pipelined
        assert end(call, *addresses, can_pipeline=False) is None


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Kind.ALL_REDUCE, large.all_in_place),
        (Kind.REDUCE, large.all_in_place),
        (Kind.REDUCE_SCATTER, large.some_in_place),
    ],
)
def test_arrays_of_the_heap_are_reduced_where_they_are(kind, way):
    for can_pipeline in (True, False):
        assert end(reduction(kind, LARGE), *[IN_HEAP] * SIZE, can_pipeline=can_pipeline) is way


@needs_loops
def test_a_reduction_without_a_compiled_loop_is_left_to_mpi_where_some_array_is_ordinary():
    call = reduction(Kind.ALL_REDUCE, LARGE, "c16", dist.ReduceOp.AVG)
    assert end(call, IN_HEAP, UNFIT, IN_HEAP, IN_HEAP) is None
    assert end(call, *[IN_HEAP] * SIZE) is large.all_in_place


def test_a_scan_takes_copies_alone():
    call = reduction(Kind.SCAN, 5000)
    assert end(call, *[IN_STAGE] * SIZE) is large.copies
    assert end(call, IN_STAGE, IN_HEAP, IN_STAGE, IN_STAGE) is None


@pytest.mark.parametrize("fill", [IN_HEAP, ORDINARY])
def test_a_broadcast_fills_all_arrays_if_all_may_be_filled_else_each_rank_reads(fill):
    call = moved(Kind.BROADCAST, LARGE)
    assert end(call, *[fill] * SIZE) is large.all_in_place
    assert end(call, ORDINARY, NOTHING, fill, fill) is large.some_in_place
    assert end(call, IN_STAGE, *[NOTHING] * 3) is large.copies
    assert end(call, UNFIT, *[NOTHING] * 3) is None


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.GATHER, Kind.ALLTOALL])
def test_blocks_are_read_from_wherever_they_lie_if_they_are_alike(kind):
    call = moved(kind, LARGE)
    assert end(call, IN_HEAP, ORDINARY, IN_STAGE, IN_PAYLOAD) is large.some_in_place
    assert end(call, IN_HEAP, ORDINARY, IN_HEAP, UNFIT) is None
    assert end(call, *[IN_HEAP] * SIZE, detail=(UNEVEN, 8)) is None
