"""The hot path: what it takes and leaves, and that it meets whatever the other ranks do."""

import threading
import time
from contextlib import ExitStack, nullcontext

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.comm.hot import VERBS, hot
from hpcdist.transport.base import DONE
from hpcdist.transport.hot import switched_off
from hpcdist.transport.shm.control import PAYLOAD

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
SHAPES = [(), (0,), (3,), (2, 1, 3), (40,)]
DTYPES = ["?", "i1", "u8", "f2", "f4", "f8", "c16"]


@pytest.fixture(autouse=True)
def _hot_here(size, world, and_the_world_goes_on):
    if size > 1 and world.transport.hot is None:
        pytest.skip("the ranks do not share memory by the compiled kernel")


def numbers(rank, shape, dtype):
    """Return what a rank contributes; sums of them round in 16 bits."""
    drawn = np.random.default_rng(rank).integers(0, 100, shape) / 7
    return np.asarray(drawn).astype(dtype)


def calls(rank, size, shape, dtype, root):
    """Return for each verb its arguments on this rank, and the array that gets its result."""
    op = SUM if dtype in "?i1u8c16" else AVG
    mine, out = numbers(rank, shape, dtype), np.zeros(shape, dtype)
    blocks = [numbers(rank + r, shape, dtype) for r in range(size)]
    whole, parts = np.zeros((size, *shape), dtype), [np.zeros(shape, dtype) for _ in range(size)]
    at_root = rank == root
    return {
        "barrier": ((), out),
        "all_reduce": ((mine, op), mine),
        "reduce": ((mine, root, op), mine if at_root else out),
        "reduce_scatter": ((out, blocks, op), out),
        "broadcast": ((mine, root), mine),
        "all_gather": ((whole, mine), whole),
        "gather": ((mine, parts if at_root else None, root), parts),
        "scatter": ((out, np.stack(blocks) if at_root else None, root), out),
        "alltoall": ((parts, blocks), parts),
    }


def run(verb, args, *, is_hot):
    if is_hot:
        assert getattr(hot, verb)(*args, None, True) is DONE
        return
    with switched_off():
        getattr(dist, verb)(*args)


@pytest.mark.parametrize("verb", VERBS)
def test_ranks_on_the_hot_path_meet_those_on_the_other_and_get_the_same_bits(verb, rank, size):
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    for turn, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            found = []
            for is_hot in (False, True, (rank + turn) % 2 == 0):
                args, result = calls(rank, size, shape, dtype, turn % size)[verb]
                run(verb, args, is_hot=is_hot)
                found.append(np.array(result).tobytes())
            assert found[0] == found[1] == found[2]


class Special(np.ndarray):
    """A subclass, which may mean anything."""


UNUSUAL = {
    "a list": [1.0, 2.0],
    "a view with gaps": np.zeros(8)[::2],
    "another order": np.zeros((2, 3)).T,
    "a subclass": np.zeros(3).view(Special),
    "other bytes first": np.zeros(3, ">f8"),
    "a dtype of ours": np.zeros(3, "S3"),
    "a great precision": np.zeros(3, "g"),
    "many axes": np.zeros((1,) * 5),
    "too large": np.zeros(PAYLOAD // 8 + 1),
    "not aligned": np.zeros(17, "i1")[1:].view("f8"),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_an_unusual_array_is_left_to_python(what):
    assert hot.all_reduce(UNUSUAL[what], SUM, None, True) is None
    assert hot.broadcast(UNUSUAL[what], 0, None, True) is None


def test_what_cannot_be_written_is_left_to_python():
    x = np.zeros(3)
    x.flags.writeable = False
    assert hot.all_reduce(x, SUM, None, True) is None


@pytest.mark.parametrize(
    "args",
    [(0, None, True), (SUM, None, False), (SUM, None, 1), (SUM, "world", True), (None, None, True)],
    ids=["operator as a number", "asynchronous", "flag as a number", "no group", "no operator"],
)
def test_unusual_arguments_are_left_to_python(args):
    assert hot.all_reduce(np.zeros(1), *args) is None


@pytest.mark.parametrize("root", [-1, 1 << 70, 0.0, "0", True, None, np.int64(0)])
def test_a_root_that_is_no_plain_rank_is_left_to_python(root):
    assert hot.broadcast(np.zeros(1), root, None, True) is None


def test_a_list_that_does_not_fit_is_left_to_python(size):
    part, blocks = np.zeros(2), [np.zeros(2) for _ in range(size)]
    for wrong in ([], blocks[1:], [*blocks, part], [*blocks[1:], np.zeros(3)], None, np.zeros(1)):
        assert hot.reduce_scatter(part, wrong, SUM, None, True) is None
        assert hot.all_gather(wrong, part, None, True) is None
        assert hot.alltoall(blocks, wrong, None, True) is None


def test_a_thread_and_a_listener_are_left_to_python():
    found, end = [], dist.subscribe(lambda event: None)
    found.append(hot.barrier(None, True))
    end()
    thread = threading.Thread(target=lambda: found.append(hot.barrier(None, True)))
    thread.start()
    thread.join()
    assert found == [None, None]


# ---- whatever the others do


class Mix:
    """Steps that all ranks draw alike; how each rank goes about them, it draws alone."""

    def __init__(self, rank, size, seed):
        self.rank, self.size = rank, size
        self.alike, self.own = np.random.default_rng(seed), np.random.default_rng([seed, rank + 1])
        self.steps = [self.small, self.small, self.small, self.late, self.behind, self.at_odds]
        self.steps += [self.refused, self.other]

    def step(self):
        with ExitStack() as way:
            chance = self.own.integers(6)
            if chance == 0:
                way.callback(dist.subscribe(lambda event: None))
            way.enter_context(switched_off() if chance == 1 else nullcontext())
            self.steps[self.alike.integers(len(self.steps))]()

    def root(self):
        return int(self.alike.integers(self.size))

    def small(self):
        verb, root = self.alike.choice([*VERBS]), self.root()
        n = int(self.alike.integers(1, 9))
        args, result = calls(self.rank, self.size, (n,), "f8", root)[verb]
        getattr(dist, verb)(*args)
        all_of_them = [calls(r, self.size, (n,), "f8", root)[verb] for r in range(self.size)]
        assert np.allclose(result, self.expected(verb, all_of_them, root))

    def expected(self, verb, found, root):
        args = [args for args, _ in found]
        unchanged = found[self.rank][1]
        if verb in ("gather", "reduce") and self.rank != root:
            return unchanged
        return {
            "barrier": lambda: unchanged,
            "all_reduce": lambda: np.mean([x for x, _ in args], axis=0),
            "reduce": lambda: np.mean([x for x, *_ in args], axis=0),
            "reduce_scatter": lambda: np.mean([x[self.rank] for _, x, _ in args], axis=0),
            "broadcast": lambda: args[root][0],
            "all_gather": lambda: [x for _, x in args],
            "gather": lambda: [x for x, *_ in args],
            "scatter": lambda: args[root][1][self.rank],
            "alltoall": lambda: [x[self.rank] for _, x in args],
        }[verb]()

    def late(self):
        """One rank comes after the others have ceased to spin."""
        if self.rank == self.root():
            time.sleep(2e-3)
        self.small()

    def behind(self):
        """An operation is under way, of which some ranks wait for the end first."""
        x = np.full(3, self.rank + 1.0)
        work = dist.all_reduce(x, sync_op=False)
        if self.own.integers(2):
            work.wait()
        self.small()
        work.wait()
        assert x[0] == self.size * (self.size + 1) / 2

    def at_odds(self):
        """One rank means something else."""
        odd, x = self.root(), np.zeros(2)
        other = int(self.alike.integers(3))
        if self.size == 1:
            return
        means = [
            lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
            lambda: dist.all_reduce(np.zeros(3)),
            dist.barrier,
        ][other]
        with pytest.raises(dist.MismatchError):
            means() if self.rank == odd else dist.all_reduce(x)
        assert not x.any()

    def refused(self):
        """One rank has given what cannot be used, which is an error on all."""
        odd, parts = self.root(), [np.zeros(2) for _ in range(self.size)]
        with pytest.raises((dist.UsageError, dist.RemoteError), match=f"rank {odd}"):
            dist.all_gather([*parts, parts[0]] if self.rank == odd else parts, np.ones(2))

    def other(self):
        """Operations that have no hot path."""
        found = []
        dist.all_gather_object(found, self.rank)
        assert found == [*range(self.size)]
        large = np.full(PAYLOAD, 1.0)
        dist.all_reduce(large)
        assert (large == self.size).all()


@pytest.mark.parametrize("steps", [150, pytest.param(40_000, marks=pytest.mark.slow)])
def test_in_any_mix_with_others_it_gives_what_numpy_does(steps, rank, size):
    mix = Mix(rank, size, steps)
    for _ in range(steps):
        mix.step()


def test_a_rank_that_comes_after_the_time_limit_is_an_error_on_all_and_then_all_are_in_step(
    rank, size
):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    group = dist.new_group(timeout=0.05)
    x = np.ones(1)
    for late in range(size):
        dist.barrier()
        time.sleep(0.2 * (rank == late))
        with pytest.raises(dist.CollectiveTimeout):
            dist.all_reduce(x, group=group)
        dist.barrier()
    assert x[0] == 1
    dist.destroy_process_group(group)
