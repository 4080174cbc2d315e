"""Reductions of ordinary arrays where they lie, by copies that the kernel makes."""

import ctypes
import gc
import mmap
import weakref
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist.comm import describe
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.hot import hot
from hpcdist.parallel.averager import Averager
from hpcdist.transport.mpi import intranode_large, share_node
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.tuning import Algorithm, TuningRule, TuningTable
from hpcdist.transport.waiting.work import DONE

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
REDUCED = "all_reduce", "reduce", "reduce_scatter"
DTYPES = {"f4": [SUM, AVG, MAX], "f8": [AVG], "i1": [SUM], "i8": [MAX], "c16": [SUM], "?": [SUM]}
SHORT = {"f2": [SUM, AVG, MAX], "bfloat16": [SUM, AVG]}


@pytest.fixture
def group(and_the_world_goes_on):
    made = dist.new_group(timeout=30)
    if not attaches(made):
        pytest.skip("the ranks do not read each other's memory")
    yield made
    dist.destroy_process_group(made)


def attaches(group):
    return group.nranks > 1 and getattr(group.transport.context.node, "attaches", False)


def go(group, algorithm):
    """Have all reductions of ordinary arrays go one way from now on."""
    rules = [
        TuningRule(operation, "ordinary", each)
        for operation in REDUCED
        for each in (algorithm, Algorithm.PIPELINED)  # the second: of what is not fit for it
    ]
    group.transport.use_rules(TuningTable(rules, group.nranks, several_nodes=False))


def numbers(rank, dtype, shape):
    """Return what a rank contributes; sums of them round."""
    drawn = np.random.default_rng(rank).integers(0, 100, shape) / 7
    return drawn.astype(getattr(ml_dtypes, dtype, dtype))


def results(group, dtype, op, count):
    """Return what every reduction gives this rank."""
    rank, size = group.rank, group.nranks
    mine, root = numbers(rank, dtype, count), size - 1
    everywhere, at_root, out, parts = (mine.copy() for _ in range(4))
    blocks = numbers(rank, dtype, (size, count))
    in_place, lists, given = blocks.copy(), list(blocks.copy()), blocks.copy()
    dist.all_reduce(everywhere, op, group)
    dist.reduce(at_root, root, op, group)
    dist.reduce_scatter(out, given, op, group)
    dist.reduce_scatter(parts, lists, op, group)
    dist.reduce_scatter(in_place[rank], in_place, op, group)
    return everywhere, at_root, out, parts, in_place, given, np.stack(lists)


def assert_same(*arrays):
    assert len({array.tobytes() for array in arrays}) == 1


@pytest.mark.parametrize("dtype", [*first_of(DTYPES), *first_of(SHORT)])
def test_results_have_the_bits_of_the_pipe_on_both_paths_and_what_is_given_stays(group, dtype):
    rank, size, count = group.rank, group.nranks, 70_003
    mine, blocks = numbers(rank, dtype, count), numbers(rank, dtype, (size, count))
    others = np.arange(size) != rank
    for op in (DTYPES | SHORT)[dtype]:
        found = []
        for algorithm, is_hot in [
            (Algorithm.PIPELINED, True),
            (Algorithm.ATTACHED, rank % 2 == 0),
            (Algorithm.ATTACHED, rank % 2 == 1),
        ]:
            go(group, algorithm)
            with nullcontext() if is_hot else switched_off():
                found.append(results(group, dtype, op, count))
        for everywhere, at_root, out, parts, in_place, given, lists in found:
            assert_same(everywhere, found[0][0])
            assert_same(at_root, everywhere if rank == size - 1 else mine)
            assert_same(out, found[0][2], parts, in_place[rank])
            assert_same(in_place[others], blocks[others])
            assert_same(given, lists, blocks)


def test_a_result_that_lies_across_what_others_read_is_right(group, rank, size):
    go(group, Algorithm.ATTACHED)
    blocks = numbers(rank, "f8", (size, PAYLOAD))
    everyones = [numbers(r, "f8", (size, PAYLOAD))[rank] for r in range(size)]
    expected = sum(everyones[1:], everyones[0])
    for shift in (0, 1, PAYLOAD // 2):
        x = np.concatenate([blocks.reshape(-1), np.zeros(PAYLOAD)])
        out = x[rank * PAYLOAD + shift :][:PAYLOAD]
        dist.reduce_scatter(out, x[: size * PAYLOAD], SUM, group)
        assert out.tobytes() == expected.tobytes()
        x = np.concatenate([blocks.reshape(-1), np.zeros(PAYLOAD)])
        out = x[rank * PAYLOAD + shift :][:PAYLOAD]
        lists = list(x[: size * PAYLOAD].reshape(size, -1))
        dist.reduce_scatter(out, lists, SUM, group)
        assert out.tobytes() == expected.tobytes()


def test_the_hot_path_reduces_into_the_part_that_nobody_else_reads(group, rank, size):
    go(group, Algorithm.ATTACHED)
    x = np.ones(size * PAYLOAD)
    assert hot.reduce_scatter(x[1 : PAYLOAD + 1], x, SUM, group, True) is None
    part = x[rank * PAYLOAD : (rank + 1) * PAYLOAD]
    assert hot.reduce_scatter(part, x, SUM, group, True) is DONE
    expected = np.ones((size, PAYLOAD))
    expected[rank] = size
    assert_same(x, expected)


def test_some_ranks_may_bring_arrays_of_the_heap(group, rank, size):
    go(group, Algorithm.ATTACHED)
    for odd in range(2):
        x, out = (
            dist.empty((size, PAYLOAD)) if rank % 2 == odd else np.empty((size, PAYLOAD))
            for _ in range(2)
        )
        x[:] = rank + 1
        dist.reduce_scatter(out[0], x, SUM, group)
        dist.all_reduce(x, SUM, group)
        assert (x == size * (size + 1) / 2).all()
        assert (out[0] == x[0]).all()


def test_ranks_that_give_different_shapes_disagree_and_nothing_changes(group, rank, size):
    go(group, Algorithm.ATTACHED)
    x = np.full(PAYLOAD + (rank == size - 1), rank + 1.0)
    with pytest.raises(dist.MismatchError):
        dist.all_reduce(x, SUM, group)
    assert (x == rank + 1).all()


@pytest.mark.parametrize(
    ("of_the_first", "copies"),
    [((0.5, 0.5), "early"), ((0.5, 1e3), "fast"), ((1e3, 0.5), "any")],
    ids=str,
)
def test_ranks_choose_together_how_fast_the_kernel_copies(
    group, rank, of_the_first, copies, monkeypatch
):
    found = (0.9, 1.2) if rank else of_the_first
    monkeypatch.setattr(share_node, "copying_takes", lambda _: found)
    made = dist.new_group()
    assert made.transport.context.node.copies == copies
    for kib in (20, 100, 300, 2000):
        x = np.full(kib * 128, rank + 1.0)
        dist.broadcast(x, 0, group=made)
        assert (x == 1).all()
    dist.destroy_process_group(made)


# ---- memory that cannot be reached any more


def with_a_hole(count):
    """Return an array of ones and zeros of which one page in the first third is not there."""
    memory = mmap.mmap(-1, 8 * count)
    x = np.frombuffer(memory)
    x[:] = 1.0
    page = mmap.PAGESIZE
    middle = (x.ctypes.data + 8 * count // 6) // page * page
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(middle), ctypes.c_size_t(page), 0) == 0
    return x


@pytest.mark.parametrize("is_hot", [True, False], ids=["compiled", "in Python"])
def test_a_reduction_that_stops_on_its_way_is_an_error_on_all_ranks(rank, size, is_hot):
    if size > 3:
        pytest.skip("the hole is in the share of rank 0, of at most three")
    group = dist.new_group(timeout=30)
    if not attaches(group):
        pytest.skip("the ranks do not read each other's memory")
    go(group, Algorithm.ATTACHED)
    x = with_a_hole(100_000) if rank == size - 1 else np.ones(100_000)
    alive = weakref.ref(x)
    error, words = (
        (dist.TransportError, "cannot be copied")
        if rank == 0
        else (dist.RemoteError, "rank 0 has left")
    )
    with pytest.raises(error, match=words), nullcontext() if is_hot else switched_off():
        dist.all_reduce(x, SUM, group)
    del x
    gc.collect()
    assert alive() is None  # nobody uses it any more
    again = np.ones(100_000)
    dist.all_reduce(again, SUM, group)
    assert (again == size).all()
    dist.destroy_process_group(group)


# ---- beside a program that computes


@pytest.fixture
def ways(monkeypatch):
    """Note by which way Python ends large reductions."""
    found = []
    for name in ("attached_reduced", "pipelined"):
        end = getattr(intranode_large, name)

        def noted(*args, end=end, name=name):
            found.append(name)
            return end(*args)

        monkeypatch.setattr(intranode_large, name, noted)
    return found


@pytest.mark.parametrize("who", ["nobody", "the first", "all"])
def test_one_rank_that_computes_beside_a_sum_keeps_all_from_attaching(group, rank, size, ways, who):
    go(group, Algorithm.ATTACHED)
    beside = who == "all" or (who == "the first" and rank == 0)
    x = np.full(300_000, rank + 1.0)
    dispatch(group, True, lambda at: describe.all_reduce(at, x, SUM)._replace(beside=beside))
    assert (x == size * (size + 1) / 2).all()
    assert ways == ["attached_reduced" if who == "nobody" else "pipelined"]


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_buckets_beside_a_backward_pass_are_not_attached(group, ways, overlap, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    go(group, Algorithm.ATTACHED)
    averager = Averager(group)
    averager.begin()
    x = np.full(300_000, group.rank + 1.0)
    averager.average(x).wait()
    averager.computed()
    assert (x == (group.nranks + 1) / 2).all()
    if overlap == "always":
        assert ways == ["pipelined"]
    else:
        assert "pipelined" not in ways  # a compiled call, or Python's if a rank had to wait


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_gradients_that_travel_beside_a_backward_pass_are_in_private_memory(
    group, overlap, monkeypatch
):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    layers = Layers()
    model = dist.DataParallel(layers, group=group)
    layers.weight.grad = np.full(layers.weight.shape, group.rank + 1.0)
    gradient = layers.weight.grad
    assert (gradient == (group.nranks + 1) / 2).all()
    is_private = group.transport.context.heap.offset_of(gradient) is None
    assert is_private == (overlap == "always")
    del model


@pytest.mark.parametrize("is_held", [False, True])
def test_gradients_move_when_buckets_turn_out_to_travel_beside_unless_somebody_has_one(
    group, is_held
):
    layers = Layers()
    model = dist.DataParallel(layers, group=group)
    mean = (group.nranks + 1) / 2
    layers.weight.grad = np.full(layers.weight.shape, group.rank + 1.0)
    held = layers.weight.grad[:10] if is_held else layers.weight.grad.sum()
    model._gradients._averager._overlap.inline = False  # as is decided after some passes
    for _ in range(2):
        model()
        assert (layers.weight.grad == mean).all()
        is_private = group.transport.context.heap.offset_of(layers.weight.grad) is None
        assert is_private != is_held
        model.zero_grad()
        layers.weight.grad = np.full(layers.weight.shape, group.rank + 1.0)
    assert np.sum(held) == mean * (10_000 if is_held else 300_000)


class Layers:
    """A model of one weight."""

    def __init__(self):
        self.weight = dist.Parameter(np.zeros((300, 1000)))

    def named_parameters(self):
        return [("weight", self.weight)]

    def __call__(self):
        pass
