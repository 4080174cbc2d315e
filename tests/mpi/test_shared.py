"""Arrays in memory that the ranks of a node share, and large objects; on any number of ranks."""

import gc
import itertools
import os
import pickle
import resource
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checks import combined, needs_torch
from mpi4py import MPI

import hpcdist as dist
from hpcdist.transport.mpi import share_node
from hpcdist.transport.mpi.hierarchical import parts as hierarchical_parts
from hpcdist.transport.tuning import OPERATIONS, Algorithm, TuningRule, possible_algorithms

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
COUNTS = (1, 5003, 300_001)
"""Elements: on the board, through staging memory, in parts or where the arrays are."""

DTYPES = ["float32", "bfloat16", "float16", "int64", "complex128"]
WHOSE = {
    "all": lambda rank: True,
    "odd": lambda rank: rank % 2 == 1,
    "first": lambda rank: rank == 0,
    "nobody": lambda rank: False,
}
"""Which ranks have their arrays in shared memory."""

several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers(rank, name, count, block=0):
    """Return small whole numbers, whose sums and products are exact in a wide dtype."""
    x = ((np.arange(count) * 7 + 3 * rank + 11 * block) % 5 + 1).astype("f8")
    return (x * (1 + 1j) if name.startswith("complex") else x).astype(dtype_of(name))


def placed(values, shared=True):
    """Return a writable copy, in shared memory or not."""
    array = dist.empty(values.shape, values.dtype) if shared else np.empty_like(values)
    array[...] = values
    return array


def reduced(op, arrays):
    """Return what NumPy says: accumulated wide, rounded once."""
    dtype, stack = arrays[0].dtype, np.stack(arrays)
    if op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        return stack.max(0) if op is dist.ReduceOp.MAX else stack.min(0)
    wide = {"c": np.complex128, "i": np.int64}.get(dtype.kind, np.float64)
    total = stack.astype(wide)
    total = total.prod(0) if op is dist.ReduceOp.PROD else total.sum(0)
    if op is dist.ReduceOp.AVG:
        short = dtype.itemsize == 2
        total = (total.astype("f4") if short else total.astype(dtype)) / np.float32(len(arrays))
    return total.astype(dtype)


def operators(name):
    """Return the operators that have a meaning for a dtype."""
    banned = {"int64": {"AVG"}, "complex128": {"MAX", "MIN"}}.get(name, set())
    return [op for op in list(dist.ReduceOp)[:5] if op.name not in banned]


def assert_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def heap_offset(array):
    """Return where in this rank's shared memory an array lies, or None."""
    return dist.get_group().transport.context.heap.offset_of(array)


def open_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- arrays


@pytest.mark.parametrize("shape", [(), 0, (0, 3), 5, (2, 3), (3, 1, 4), np.int64(7), (1, 0)])
@pytest.mark.parametrize(
    "dtype", ["f4", "?", "c16", ml_dtypes.bfloat16, "S5", "M8[s]", [("a", "i4")]]
)
def test_shared_arrays_are_numpy_arrays_like_any_other(shape, dtype):
    like = np.empty(shape, dtype)
    for x in (dist.empty(shape, dtype), dist.zeros(shape, dtype), dist.empty_like(like)):
        assert type(x) is np.ndarray
        assert (x.shape, x.dtype, x.strides) == (like.shape, like.dtype, like.strides)
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert x.flags.aligned
        x[...] = np.zeros((), dtype)
        assert x.tobytes() == bytes(like.nbytes)
    if like.size:
        assert (heap_offset(x) is not None) == (SIZE > 1)


def test_float64_is_the_default():
    assert dist.empty(3).dtype == dist.zeros(3).dtype == np.float64


def test_zeros_are_zeros_even_in_memory_that_was_used_before():
    for _ in range(5):
        x = dist.zeros(100_000, "u1")
        assert not x.any()
        x.fill(255)
        del x


def test_empty_like_takes_shape_and_dtype_of_any_layout():
    x = dist.empty_like(np.zeros((3, 4), "f4", order="F")[:, ::2])
    assert (x.shape, x.dtype, x.flags.c_contiguous) == ((3, 2), np.dtype("f4"), True)


@pytest.mark.parametrize("shape", [-1, (2, -3), (-2, -3)])
def test_negative_lengths_are_refused_as_numpy_refuses_them(shape):
    with pytest.raises(ValueError, match=r"negative|unknown|reshape"):
        dist.empty(shape)


def test_objects_have_no_place_in_shared_memory():
    with pytest.raises(dist.UsageError, match="objects"):
        dist.empty(3, object)


def test_shared_arrays_can_be_copied_pickled_and_computed_with():
    x = placed(np.arange(5003.0))
    assert_bits(pickle.loads(pickle.dumps(x, 5)), np.arange(5003.0))
    copy = x.copy()
    x += 1
    assert copy[0] == 0
    assert (x - copy).sum() == 5003
    assert heap_offset(copy) is None


def test_arrays_that_are_alive_never_share_memory():
    alive = [placed(np.full(1 + 37 * k, k, "i4")) for k in range(100)]
    del alive[::3]
    alive += [placed(np.full(1 + 53 * k, k, "i4")) for k in range(100)]
    for x in alive:
        assert (x == x[0]).all()
    starts = sorted((x.ctypes.data, x.nbytes) for x in alive)
    for (start, nbytes), (following, _) in itertools.pairwise(starts):
        assert start + nbytes <= following


# ---- collectives

COLLECTIVES = {}


def collective(function):
    COLLECTIVES[function.__name__] = function
    return function


@collective
def all_reduce(name, count, place):
    for op in operators(name):
        x = place(numbers(RANK, name, count))
        dist.all_reduce(x, op)
        assert_bits(x, reduced(op, [numbers(rank, name, count) for rank in range(SIZE)]))


@collective
def reduce(name, count, place):
    for root, op in enumerate(operators(name)):
        x, root = place(numbers(RANK, name, count)), root % SIZE
        dist.reduce(x, root, op)
        everyones = [numbers(rank, name, count) for rank in range(SIZE)]
        assert_bits(x, reduced(op, everyones) if root == RANK else everyones[RANK])


@collective
def reduce_scatter(name, count, place):
    for op in operators(name):
        out = place(np.zeros(count, dtype_of(name)))
        whole = np.stack([numbers(RANK, name, count, block) for block in range(SIZE)])
        given = place(whole)
        dist.reduce_scatter(out, given, op)
        assert_bits(out, reduced(op, [numbers(rank, name, count, RANK) for rank in range(SIZE)]))
        assert_bits(given, whole)


@collective
def scan(name, count, place):
    for op in operators(name):
        x = place(numbers(RANK, name, count))
        dist.scan(x, op)
        assert_bits(x, reduced(op, [numbers(rank, name, count) for rank in range(RANK + 1)]))


@collective
def exscan(name, count, place):
    for op in operators(name):
        x = place(numbers(RANK, name, count))
        dist.exscan(x, op)
        before = [numbers(rank, name, count) for rank in range(RANK)]
        assert_bits(x, reduced(op, before) if before else numbers(RANK, name, count))


@collective
def broadcast(name, count, place):
    for root in range(SIZE):
        x = place(numbers(RANK, name, count))
        dist.broadcast(x, root)
        assert_bits(x, numbers(root, name, count))


@collective
def all_gather(name, count, place):
    expected = np.stack([numbers(rank, name, count) for rank in range(SIZE)])
    x, out = place(numbers(RANK, name, count)), place(np.zeros_like(expected))
    dist.all_gather(out, x)
    assert_bits(out, expected)
    gathered = []
    dist.all_gather(gathered, x)
    assert_bits(np.stack(gathered), expected)
    assert_bits(x, expected[RANK])


@collective
def gather(name, count, place):
    expected = np.stack([numbers(rank, name, count) for rank in range(SIZE)])
    x, out = place(expected[RANK]), place(np.zeros_like(expected))
    dist.gather(x, out if RANK == SIZE - 1 else None, SIZE - 1)
    assert_bits(out, expected if RANK == SIZE - 1 else np.zeros_like(expected))
    assert_bits(x, expected[RANK])


@collective
def scatter(name, count, place):
    blocks = np.stack([numbers(SIZE - 1, name, count, block) for block in range(SIZE)])
    given, out = place(blocks), place(np.zeros(count, dtype_of(name)))
    dist.scatter(out, given if RANK == SIZE - 1 else None, SIZE - 1)
    assert_bits(out, blocks[RANK])
    assert_bits(given, blocks)


@collective
def alltoall(name, count, place):
    given = [place(numbers(RANK, name, count, to)) for to in range(SIZE)]
    out = [place(np.zeros(count, dtype_of(name))) for _ in range(SIZE)]
    dist.alltoall(out, given)
    for source in range(SIZE):
        assert_bits(out[source], numbers(source, name, count, RANK))
        assert_bits(given[source], numbers(RANK, name, count, source))


@collective
def alltoall_single(name, count, place):
    whole = np.stack([numbers(RANK, name, count, to) for to in range(SIZE)])
    given, out = place(whole), place(np.zeros_like(whole))
    dist.alltoall_single(out, given)
    assert_bits(out, np.stack([numbers(source, name, count, RANK) for source in range(SIZE)]))
    assert_bits(given, whole)


@pytest.mark.parametrize(("operation", "name", "whose"), combined(COLLECTIVES, DTYPES, WHOSE))
def test_collectives_on_shared_arrays_give_what_numpy_gives(operation, name, whose):
    for count in COUNTS if whose == "all" else (1, 5003, 70_001):
        COLLECTIVES[operation](name, count, lambda x: placed(x, WHOSE[whose](RANK)))


@pytest.mark.parametrize("whose", WHOSE)
def test_large_arrays_are_broadcast_to_memory_of_every_kind(whose):
    broadcast("float64", 150_001, lambda x: placed(x, WHOSE[whose](RANK)))


@pytest.mark.thorough
def test_larger_arrays_than_caches_hold_are_moved():
    for operation in (broadcast, all_gather):
        operation("float64", 2_100_003, placed)


def test_what_lies_beside_a_large_array_stays():
    x = placed(np.full(200_003, -1.0))
    x[1:-2] = RANK
    dist.broadcast(x[1:-2], SIZE - 1)
    assert (x[1:-2] == SIZE - 1).all()
    assert x[0] == x[-1] == x[-2] == -1


def test_a_result_may_be_used_at_once_and_again_and_again():
    x = placed(np.full(40_000, float(RANK + 1)))
    total = SIZE * (SIZE + 1) / 2
    for turn in range(60):
        x.fill((RANK + 1) * (turn + 1))
        dist.all_reduce(x)
        assert (x == total * (turn + 1)).all()
        x.fill(RANK + turn)
        dist.broadcast(x, turn % SIZE)
        assert (x == turn % SIZE + turn).all()


# ---- views


def test_slices_and_views_of_shared_arrays_travel_and_their_neighbours_stay():
    total = SIZE * (SIZE + 1) // 2
    for view in [
        lambda x: x[1],
        lambda x: x[1:3],
        lambda x: x[2, 17:],
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: x[::-1],
        lambda x: x.reshape(-1)[1:-1],
        lambda x: x[0, :1],
    ]:
        x = placed(np.full((4, 5003), RANK + 1))
        dist.all_reduce(view(x))
        expected = np.full((4, 5003), RANK + 1)
        view(expected)[...] = total
        assert_bits(x, expected)


def test_a_view_of_another_dtype_is_reduced_as_that_dtype():
    x = dist.zeros(5003, "u4")
    x.view("f4")[...] = RANK + 0.5
    dist.all_reduce(x.view("f4"), dist.ReduceOp.MAX)
    assert (x.view("f4") == SIZE - 0.5).all()


def test_a_view_that_begins_between_two_numbers_is_reduced():
    raw = dist.empty(8 * 5003 + 3, "u1")
    x = raw[3:].view("f8")
    x[...] = RANK
    dist.all_reduce(x)
    assert (x == SIZE * (SIZE - 1) / 2).all()


def test_views_keep_the_memory_of_an_array_that_is_gone():
    view = placed(np.arange(5003))[100:200]
    others = [placed(np.zeros(5003, "i8")) for _ in range(10)]
    dist.all_reduce(view, dist.ReduceOp.MAX)
    assert view.tolist() == list(range(100, 200))
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("count", COUNTS)
def test_blocks_are_gathered_in_their_own_place(count, whose):
    expected = np.stack([numbers(rank, "float32", count) for rank in range(SIZE)])
    out = placed(np.zeros_like(expected), WHOSE[whose](RANK))
    out[RANK] = expected[RANK]
    dist.all_gather(out, out[RANK])
    assert_bits(out, expected)
    out = placed(np.zeros_like(expected), WHOSE[whose](RANK))
    out[RANK] = expected[RANK]
    dist.gather(out[RANK], out if RANK == 0 else None, 0)
    if RANK == 0:
        assert_bits(out, expected)


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("count", COUNTS)
def test_blocks_are_scattered_in_place(count, whose):
    blocks = np.stack([numbers(0, "float32", count, block) for block in range(SIZE)])
    given = placed(blocks, WHOSE[whose](RANK))
    out = given[0] if RANK == 0 else placed(np.zeros_like(blocks[0]), WHOSE[whose](RANK))
    dist.scatter(out, given if RANK == 0 else None, 0)
    assert_bits(out, blocks[RANK])


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("count", COUNTS)
def test_a_share_is_reduced_into_its_own_place(count, whose):
    given = np.stack([numbers(RANK, "float32", count, block) for block in range(SIZE)])
    x = placed(given, WHOSE[whose](RANK))
    dist.reduce_scatter(x[RANK], x)
    everyones = [numbers(rank, "float32", count, RANK) for rank in range(SIZE)]
    assert_bits(x[RANK], reduced(dist.ReduceOp.SUM, everyones))


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("count", COUNTS)
def test_a_block_is_gathered_from_the_place_of_another(count, whose):
    expected = np.stack([numbers(rank, "float32", count) for rank in range(SIZE)])
    for _ in range(5):
        out = placed(np.zeros_like(expected), WHOSE[whose](RANK))
        other = (RANK + 1) % SIZE
        out[other] = expected[RANK]
        dist.all_gather(out, out[other])
        assert_bits(out, expected)


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("count", COUNTS)
def test_blocks_change_places_in_overlapping_memory(count, whose):
    given = np.concatenate([numbers(RANK, "float32", count, to) for to in range(SIZE)])
    x = placed(np.concatenate([given, np.zeros(count, "f4")]), WHOSE[whose](RANK))
    dist.alltoall_single(x[count:], x[:-count])
    expected = [numbers(source, "float32", count, RANK) for source in range(SIZE)]
    assert_bits(x[count:], np.concatenate(expected))


# ---- groups


def groups_of_the_world():
    """Return overlapping groups, some of one rank; every rank makes those it is in."""
    everyone = tuple(range(SIZE))
    members = {everyone, everyone[1:], everyone[:-1], everyone[::2], everyone[1::2], (0,)}
    chosen = sorted(ranks for ranks in members if RANK in ranks)
    return [(ranks, dist.new_group(ranks)) for ranks in chosen]


@pytest.mark.parametrize("whose", WHOSE)
def test_overlapping_groups_reduce_what_is_theirs(whose):
    for ranks, group in groups_of_the_world():
        for count in COUNTS:
            x = placed(numbers(RANK, "float32", count), WHOSE[whose](RANK))
            dist.all_reduce(x, group=group)
            everyones = [numbers(rank, "float32", count) for rank in ranks]
            assert_bits(x, reduced(dist.ReduceOp.SUM, everyones))
        dist.destroy_process_group(group)


@pytest.mark.parametrize("whose", WHOSE)
def test_operations_of_several_groups_are_under_way_at_once(whose):
    groups, started = groups_of_the_world(), []
    for turn in range(3):
        for ranks, group in groups:
            for count in COUNTS:
                x = placed(numbers(RANK, "int64", count, turn), WHOSE[whose](RANK))
                started.append((ranks, turn, x, dist.all_reduce(x, group=group, sync_op=False)))
    for ranks, turn, x, work in reversed(started):
        work.wait()
        everyones = [numbers(rank, "int64", x.size, turn) for rank in ranks]
        assert_bits(x, reduced(dist.ReduceOp.SUM, everyones))
    for _, group in groups:
        dist.destroy_process_group(group)


@pytest.mark.thorough
def test_groups_and_worlds_leave_no_descriptors(world_with):
    def come_and_go():
        for _ in range(5):
            group = dist.new_group()
            dist.all_reduce(dist.zeros(5003, group=group), group=group)
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        dist.init_parallel_env()
        dist.all_reduce(dist.zeros(5003))
        dist.barrier()

    world_with()
    come_and_go()
    before = open_descriptors()
    for _ in range(4):
        come_and_go()
    assert open_descriptors() <= before


# ---- torch


@needs_torch
def test_torch_tensors_over_shared_arrays_are_reduced_where_they_are():
    import torch

    for count in COUNTS:
        x = dist.empty(count, "f4")
        tensor = torch.from_numpy(x)
        tensor.fill_(RANK + 1)
        dist.all_reduce(tensor)
        assert (x == SIZE * (SIZE + 1) / 2).all()
        assert tensor.data_ptr() == x.ctypes.data
        like = dist.empty_like(tensor)
        assert (like.shape, like.dtype) == ((count,), np.dtype("f4"))


# ---- how much there is


def test_memory_is_used_again():
    heap = dist.get_group().transport.context.heap
    before = heap.used
    for turn in range(400):
        x, y = dist.empty(4 << 20, "u1"), dist.empty((1 + turn % 7) << 20, "u1")
        x[::4096] = turn % 250
        dist.all_reduce(x[:4096], dist.ReduceOp.MAX)
        assert x[0] == turn % 250
        del x, y
    dist.empty(1)
    assert heap.used <= before + 256


def test_where_shared_memory_is_used_up_arrays_are_ordinary_ones(world_with):
    world_with(shared_heap_mb=1)
    kept = [dist.empty(1 << 18, "u1") for _ in range(3)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for count in (100_000, 300_001):
            x = placed(numbers(RANK, "float32", count))
            y = placed(numbers(RANK, "float32", count))
            dist.all_reduce(x)
            dist.all_reduce(y)
            expected = reduced(
                dist.ReduceOp.SUM, [numbers(rank, "float32", count) for rank in range(SIZE)]
            )
            assert_bits(x, expected)
            assert_bits(y, expected)
            assert heap_offset(y) is None
    about = [each for each in told if "HPCDIST_SHARED_HEAP_MB" in str(each.message)]
    assert len(about) == (1 if SIZE > 1 else 0)
    assert all(each.category is RuntimeWarning for each in about)
    del kept


def test_the_warning_names_the_line_that_asked_for_the_array(world_with):
    world_with(shared_heap_mb=1)
    for make in (
        lambda: dist.empty(300_001),
        lambda: dist.zeros(300_001),
        lambda: dist.empty_like(np.zeros(300_001)),
    ):
        dist.get_group().transport.context.heap._warned = False
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make()
        assert [each.filename for each in told] == [__file__] * (SIZE > 1)


# ---- large objects


def large(rank, block=0):
    """Return an object of 3 MB, and what it holds as text."""
    array = np.arange(375_000) + 1000 * rank + 7 * block
    return {"from": rank, "block": block, "x": array, "more": [np.full(30_000, rank, "i2"), "text"]}


def assert_large(found, rank, block=0):
    wanted = large(rank, block)
    assert (found["from"], found["block"], found["more"][1]) == (rank, block, "text")
    assert_bits(found["x"], wanted["x"])
    assert_bits(found["more"][0], wanted["more"][0])


def exchange_objects(kind):
    """Return the objects that an operation gave this rank, with the rank and block of each."""
    if kind == "broadcast":
        objects = [large(0), large(0, 1)] if RANK == 0 else [None, None]
        dist.broadcast_object_list(objects, 0)
        return [(objects[block], 0, block) for block in range(2)]
    if kind == "all_gather":
        objects = []
        dist.all_gather_object(objects, large(RANK))
        return [(each, rank, 0) for rank, each in enumerate(objects)]
    if kind == "gather":
        objects = [] if RANK == SIZE - 1 else None
        dist.gather_object(large(RANK), objects, SIZE - 1)
        return [(each, rank, 0) for rank, each in enumerate(objects or [])]
    blocks = [large(RANK, block) for block in range(SIZE)]
    objects = []
    if kind == "scatter":
        dist.scatter_object_list(objects, blocks if RANK == 0 else None, 0)
        return [(objects[0], 0, RANK)]
    dist.all_to_all_object(objects, blocks)
    return [(each, rank, RANK) for rank, each in enumerate(objects)]


OBJECTS = ["broadcast", "all_gather", "gather", "scatter", "all_to_all"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OBJECTS)
def test_large_objects_arrive_whole_and_belong_to_the_receiver(kind):
    descriptors = open_descriptors()
    receive_and_write(kind)
    for found, rank, block in exchange_objects(kind):
        assert_large(found, rank, block)
    found = None
    assert open_descriptors() <= descriptors


def receive_and_write(kind):
    received = exchange_objects(kind)
    for found, rank, block in received:
        assert_large(found, rank, block)
        assert found["x"].flags.writeable
    mine = [found for found, rank, _ in received if rank != RANK]
    for position in range(MPI.COMM_WORLD.allreduce(len(mine), MPI.MAX)):
        if position < len(mine):
            mine[position]["x"].fill(-1 - RANK)
            mine[position]["more"][0][::2] = 77
        dist.barrier()
        if position < len(mine):
            assert (mine[position]["x"] == -1 - RANK).all()
            assert (mine[position]["more"][0][::2] == 77).all()
        dist.barrier()


def test_what_a_receiver_writes_is_not_seen_by_the_sender():
    source = large(0)
    objects = [source if RANK == 0 else None]
    dist.broadcast_object_list(objects, 0)
    if RANK != 0:
        objects[0]["x"].fill(-5)
    dist.barrier()
    if RANK == 0:
        assert_large(source, 0)
    gathered = []
    dist.all_gather_object(gathered, source)
    gathered[0]["x"].fill(-6)
    dist.barrier()
    if RANK == 0:
        assert_large(source, 0)


def test_a_sender_may_write_as_soon_as_it_has_sent():
    for turn in range(5):
        x = np.full(200_000, float(turn))
        objects = [x if RANK == 0 else None]
        dist.broadcast_object_list(objects, 0)
        if RANK == 0:
            x.fill(-1)
        dist.barrier()
        if RANK != 0:
            assert (objects[0] == turn).all()


def test_some_large_and_some_small_objects():
    gathered = []
    dist.all_gather_object(gathered, large(RANK) if RANK % 2 == 0 else ("small", RANK))
    for rank, found in enumerate(gathered):
        if rank % 2 == 0:
            assert_large(found, rank)
        else:
            assert found == ("small", rank)
    received = []
    given = [large(RANK, to) if (RANK + to) % 2 else ("small", RANK, to) for to in range(SIZE)]
    dist.all_to_all_object(received, given)
    for source, found in enumerate(received):
        if (RANK + source) % 2:
            assert_large(found, source, RANK)
        else:
            assert found == ("small", source, RANK)


def test_more_received_objects_may_be_kept_than_there_are_descriptors(few_descriptors):
    kept = []
    for turn in range(60):
        objects = [np.full(40_000, float(turn)) if RANK == 0 else None]
        dist.broadcast_object_list(objects, 0)
        kept.append(objects[0])
    for turn, x in enumerate(kept):
        assert (x == turn).all()


@pytest.fixture
def few_descriptors():
    """Let this process open fifty files more than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 50, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@several
def test_ranks_that_disagree_leave_no_descriptors(and_the_world_goes_on):
    descriptors = open_descriptors()
    for _ in range(3):
        for one, other in [
            (
                lambda: dist.broadcast_object_list([large(0)], 0),
                lambda: dist.all_reduce(dist.zeros(300_001)),
            ),
            (
                lambda: dist.all_gather_object([], large(0)),
                lambda: dist.all_to_all_object([], [large(RANK)] * SIZE),
            ),
        ]:
            with pytest.raises(dist.MismatchError):
                (one if RANK == 0 else other)()
    assert open_descriptors() <= descriptors
    objects = [large(0) if RANK == 0 else None]
    dist.broadcast_object_list(objects, 0)
    assert_large(objects[0], 0)


@several
def test_ranks_that_disagree_about_shared_arrays_leave_them_alone(and_the_world_goes_on):
    for count in (5003, 300_001):
        x = placed(numbers(RANK, "float32", count + (RANK == 0)))
        before = x.copy()
        with pytest.raises(dist.MismatchError, match="shape"):
            dist.all_reduce(x)
        assert_bits(x, before)
        dist.barrier()
        assert_bits(x, before)


# ---- beside messages, and what is left


@several
@pytest.mark.parametrize("shared", [True, False])
def test_a_message_under_way_proceeds_while_its_sender_is_in_a_barrier(shared):
    count = 8 << 20
    if RANK == 0:
        work = dist.isend(placed(np.full(count, 7, "u1"), shared), 1)
        dist.barrier()
        work.wait()
    elif RANK == 1:
        x = placed(np.zeros(count, "u1"), shared)
        dist.recv(x, 0)
        assert (x == 7).all()
        dist.barrier()
    else:
        dist.barrier()


def test_shared_arrays_are_sent_and_received():
    to, source = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for count in COUNTS:
        x, y = placed(numbers(RANK, "float32", count)), dist.zeros(count, "f4")
        work = dist.isend(x, to)
        dist.recv(y, source)
        work.wait()
        assert_bits(y, numbers(source, "float32", count))


def test_shared_memory_has_no_name():
    dist.all_reduce(dist.zeros(300_001))
    with open("/proc/self/maps") as lines:
        segments = {line.split()[5] for line in lines if "hpcdist-" in line}
    expected = {"/memfd:hpcdist-heap", "/memfd:hpcdist-control"} if SIZE > 1 else set()
    assert segments - {"/memfd:hpcdist-rpc"} == expected  # an array of another test may be alive
    assert not list(Path("/dev").glob("shm/*hpcdist*"))


# ---- every way


def rules_for(arrays, algorithm):
    """Return rules that send every operation this way, where it can take it."""
    return [
        TuningRule(operation, arrays, algorithm)
        for operation in OPERATIONS
        if algorithm in possible_algorithms(operation, arrays, several_nodes=False)
    ]


BY_NODES = [
    TuningRule(operation, "ordinary", Algorithm.HIERARCHICAL, nodes="several")
    for operation in OPERATIONS
]
"""Send every operation by the nodes of a group that spans several."""


@several
@pytest.mark.parametrize("whose", ["odd", "first", "nobody"])
@pytest.mark.parametrize(
    ("ordinary", "shared"),
    [
        (Algorithm.STAGED, Algorithm.DIRECT),
        (Algorithm.PIPELINED, Algorithm.DIRECT),
        (Algorithm.MPI, Algorithm.DIRECT),
        (Algorithm.STAGED, Algorithm.STAGED),
        (Algorithm.PIPELINED, Algorithm.MPI),
        (Algorithm.ATTACHED, Algorithm.DIRECT),
        (Algorithm.ATTACHED, Algorithm.STAGED),
    ],
)
def test_operations_give_the_same_whichever_way_they_take(tuned, ordinary, shared, whose):
    tuned([*rules_for("ordinary", ordinary), *rules_for("shared", shared)])
    for check in COLLECTIVES.values():
        check("float32", 20_003, lambda x: placed(x, WHOSE[whose](RANK)))


@pytest.mark.thorough
@several
@pytest.mark.parametrize("whose", ["odd", "nobody"])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_lanes_give_what_numpy_gives(tuned, ranks_per_node, whose):
    tuned(BY_NODES, ranks_per_node=ranks_per_node)
    for check in COLLECTIVES.values():
        for name in ("float32", "bfloat16", "complex128"):
            for count in (1, 64 * SIZE + 1):
                check(name, count, lambda x: placed(x, WHOSE[whose](RANK)))


@several
@pytest.mark.parametrize("whose", ["odd", "nobody"])
def test_what_takes_many_parts_between_nodes_is_whole(tuned, whose, monkeypatch):
    monkeypatch.setattr(hierarchical_parts, "_STAGED", 128 << 10)
    monkeypatch.setattr(hierarchical_parts, "_TOLD_FROM", 1 << 10)
    tuned(BY_NODES, ranks_per_node=max(1, SIZE // 2))
    for check in COLLECTIVES.values():
        check("float32", 20_003, lambda x: placed(x, WHOSE[whose](RANK)))


@several
def test_without_the_compiled_kernel_collectives_give_the_same(world_with):
    world_with(kernel="never")
    for name in DTYPES:
        for count in (1, 5003, 70_001):
            for check in COLLECTIVES.values():
                check(name, count, placed)


def _full(*_):
    raise OSError(28, "No space left on device")


@several
def test_a_group_that_has_no_room_for_its_memory_goes_by_mpi(monkeypatch, rank, size):
    if rank == 0:
        monkeypatch.setattr(share_node, "create_segment", _full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = dist.new_group(range(size))
    x = np.ones(300_001)
    dist.all_reduce(x, group=group)
    dist.barrier(group)
    assert (x == size).all()
    assert [each for each in caught if "No space left" in str(each.message)] or rank
    dist.destroy_process_group(group)


@several
@pytest.mark.parametrize("name", DTYPES[:1])
def test_a_group_of_some_ranks_shares_the_memory_of_these_alone(name, rank, size):
    world = dist.get_group()
    group = world.split(0 if rank or size == 2 else None, key=-rank)  # the other way round
    order = group.ranks
    if rank in order:
        arrays = [numbers(each, name, 300_001) for each in order]
        x = placed(arrays[order.index(rank)])
        dist.all_reduce(x, group=group)
        assert (x == reduced(dist.ReduceOp.SUM, arrays)).all()
        parts = [placed(np.zeros_like(x)) for _ in order]
        dist.alltoall(
            parts, [placed(numbers(rank, name, 300_001, block)) for block in order], group
        )
        for each, part in zip(order, parts, strict=True):
            assert (part == numbers(each, name, 300_001, rank)).all()
    dist.destroy_process_group(group)
