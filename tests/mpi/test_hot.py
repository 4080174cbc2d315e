"""The hot path: what it takes and leaves, and that it meets whatever the other ranks do."""

import pickle
import threading
import time
from contextlib import ExitStack, nullcontext
from functools import partial

import numpy as np
import pytest
from every_verb import REDUCTIONS, calls, is_compiled, numbers, without_splits

import hpcdist as dist
from hpcdist.comm.hot import OBJECT_VERBS, VERBS, hot, in_place_of_main
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.waiting.work import DONE

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
SHAPES = [(), (0,), (3,), (2, 1, 3), (40,)]
DTYPES = ["?", "i1", "u8", "f2", "f4", "f8", "c16"]


@pytest.fixture(autouse=True)
def _hot_here(size, world, and_the_world_goes_on):
    if size > 1 and (world.transport.hot is None or world.transport.context.node is None):
        pytest.skip("the ranks do not share memory by the compiled kernel")


def run(verb, args, *, is_hot):
    if is_hot and (verb not in REDUCTIONS or is_compiled(args[0].dtype)):
        done = getattr(hot, verb)(*args, None, True)
        assert done is DONE or (verb == "reduce" and done is None)  # its root may have to wait
        if done is DONE:
            return
    with nullcontext() if is_hot else switched_off():
        getattr(dist, verb)(*without_splits(args))


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


LARGE = [(PAYLOAD // 4 + 1,), (3, 16 << 10), (300_001,)]


@pytest.mark.parametrize("verb", VERBS)
def test_large_arrays_are_moved_and_reduced_alike_on_both_paths(verb, rank, size):
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    for turn, shape in enumerate(LARGE):
        found = []
        for is_hot in (False, True, (rank + turn) % 2 == 0):
            args, result = calls(rank, size, shape, "f8", turn % size)[verb]
            with nullcontext() if is_hot else switched_off():
                getattr(dist, verb)(*without_splits(args))
            found.append(np.array(result).tobytes())
        assert found[0] == found[1] == found[2]


class Amid:
    """Arrays that lie in the memory that all ranks map, amid others."""

    def __init__(self):
        self.around = []

    def __call__(self, values):
        x = dist.empty(values.size + 2, values.dtype)
        x[0], x[1:-1], x[-1] = 7, values.reshape(-1), 7
        self.around.append(x)
        return x[1:-1].reshape(values.shape)

    def are_left_alone(self):
        return all(x[0] == x[-1] == 7 for x in self.around)


WHOSE = {
    "all": lambda rank: True,
    "odd": lambda rank: rank % 2 == 1,
    "first": lambda rank: rank == 0,
}
"""Which ranks have their arrays in shared memory."""


@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("verb", VERBS)
def test_large_arrays_in_shared_memory_give_the_same_bits_on_both_paths(verb, whose, rank, size):
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    for turn, shape in enumerate([(3, 1 << 10), (150_001,)]):
        amid = Amid()
        args, result = calls(rank, size, shape, "f8", turn % size)[verb]
        run(verb, args, is_hot=False)
        expected = np.array(result).tobytes()
        for is_hot in (False, True, (rank + turn) % 2 == 0):
            place = amid if WHOSE[whose](rank) else np.asarray
            args, result = calls(rank, size, shape, "f8", turn % size, place)[verb]
            with nullcontext() if is_hot else switched_off():
                getattr(dist, verb)(*without_splits(args))
            assert np.array(result).tobytes() == expected
        assert amid.are_left_alone()


@pytest.mark.parametrize("verb", VERBS)
def test_large_arrays_in_shared_memory_take_the_hot_path(verb, rank, size):
    if size == 1:
        pytest.skip("a rank alone shares nothing")
    for root in range(size):
        for shape in [(PAYLOAD // 8 + 1,), (PAYLOAD,)]:
            args, _ = calls(rank, size, shape, "f8", root, Amid())[verb]
            assert getattr(hot, verb)(*args, None, True) is DONE


@pytest.mark.parametrize("make", [np.zeros, dist.zeros])
def test_what_is_written_where_others_still_read_is_left_to_python(make, rank, size):
    x = make(size * PAYLOAD)
    part = x[rank * PAYLOAD : (rank + 1) * PAYLOAD]
    other = x[1 : PAYLOAD + 1]
    assert hot.alltoall(x, x, None, True) is None
    assert hot.all_gather(x, other, None, True) is None
    assert hot.reduce_scatter(other, x, SUM, None, True) is None
    if size > 1:
        x[:] = rank + 1
        assert hot.reduce_scatter(part, x, SUM, None, True) is DONE  # nobody else reads it
        assert (part == size * (size + 1) / 2).all()
        assert (np.delete(x.reshape(size, -1), rank, 0) == rank + 1).all()
        part[:] = rank
        assert hot.all_gather(x, part, None, True) is DONE
        assert (x.reshape(size, -1) == np.arange(size)[:, None]).all()


def test_tensors_of_torch_take_the_hot_path_and_give_the_same_bits(rank, size):
    torch = pytest.importorskip("torch")
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    for shape in [(), (3,), (2, 5), (3, PAYLOAD)]:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16):
            x = torch.from_numpy(numbers(rank, shape, "f8")).to(dtype)
            first, second = x.clone(), x.clone()
            hot.all_reduce(first, SUM, None, True)  # which gets to know the type
            first = x.clone()
            if rank % 2 and is_compiled(dtype):
                assert hot.all_reduce(first, SUM, None, True) is DONE
            else:
                with switched_off():
                    dist.all_reduce(first)
            dist.all_reduce(second.numpy())
            assert torch.equal(first, second)


def test_tensors_that_are_not_plain_memory_are_left_to_python(size):
    torch = pytest.importorskip("torch")
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    hot.barrier(None, True)
    dist.all_reduce(torch.zeros(1))
    turned = torch.zeros(2, dtype=torch.complex64).conj().imag
    emptied = torch.zeros(3)
    emptied.untyped_storage().resize_(0)
    odd = [
        torch.zeros(2, 3).T,
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.nn.Parameter(torch.zeros(3)),
        turned,
        turned[0],
        emptied,
    ]
    for tensor in odd:
        assert hot.all_reduce(tensor, SUM, None, True) is None


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
    "many axes": np.zeros((1,) * 9),
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
    [(0, None, True), (SUM, None, 1), (SUM, "world", True), (None, None, True)],
    ids=["operator as a number", "flag as a number", "no group", "no operator"],
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


@pytest.mark.parametrize("verb", VERBS)
def test_an_operation_that_is_not_waited_for_is_begun_at_once_and_ends_by_itself(verb, rank, size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    for late in range(size):
        args, result = calls(rank, size, (3,), "f8", 0)[verb]
        expected, same = calls(rank, size, (3,), "f8", 0)[verb]
        with switched_off():
            getattr(dist, verb)(*without_splits(expected))
        if rank == late:
            time.sleep(5e-3)
        work = getattr(hot, verb)(*args, None, False)
        if verb == "reduce" and work is None:  # the root has to wait for who gives later
            work = dist.reduce(*args, sync_op=False)
        deadline = time.monotonic() + 60
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(1e-4)
        assert work.wait() is True
        assert np.array(result).tobytes() == np.array(same).tobytes()
        works = [dist.barrier(sync_op=False) for _ in range(3)]
        for work in works:
            work.wait()


def test_streams_take_the_hot_path_too(size):
    x = np.ones(2)
    for use_calc_stream in (False, True):
        assert dist.stream.all_reduce(x, use_calc_stream=use_calc_stream) is DONE
    assert (x == size**2).all()
    with pytest.raises(RuntimeError, match="only be true in sync op"):
        dist.stream.all_reduce(x, sync_op=False, use_calc_stream=True)


# ---- objects


class Loud:
    """Unpickling it calls an operation of the same group."""

    def __reduce__(self):
        return dist.barrier, ()


def objects(rank, size, thing, root):
    """Return for each verb its arguments on this rank, and the list that it changes."""
    at_root, filled = rank == root, [None] * size
    each = [(rank, to, thing) for to in range(size)]
    mine = [thing if at_root else None, root if at_root else None]
    return {
        "broadcast_object_list": ((mine, root), mine),
        "all_gather_object": ((filled, (rank, thing)), filled),
        "gather_object": (((rank, thing), filled if at_root else None, root), filled),
        "scatter_object_list": ((filled, each if at_root else None, root), filled),
        "all_to_all_object": ((filled, each), filled),
    }


def expected_objects(verb, rank, size, thing, root):
    return {
        "broadcast_object_list": [thing, root],
        "all_gather_object": [(r, thing) for r in range(size)],
        "gather_object": [(r, thing) for r in range(size)] if rank == root else [None] * size,
        "scatter_object_list": [(root, rank, thing)],
        "all_to_all_object": [(r, rank, thing) for r in range(size)],
    }[verb]


THINGS = [None, {"step": 3}, "x" * 2000, "x" * 5000, bytes(300_000)]


@pytest.mark.parametrize("verb", OBJECT_VERBS)
def test_objects_meet_on_both_paths_whatever_their_size(verb, rank, size):
    for turn, thing in enumerate(THINGS):
        for is_hot in (True, False, (rank + turn) % 2 == 0):
            root = turn % size
            args, result = objects(rank, size, thing, root)[verb]
            with nullcontext() if is_hot else switched_off():
                getattr(dist, verb)(*args)
            assert result == expected_objects(verb, rank, size, thing, root)


def test_ranks_send_objects_of_any_sizes_together(rank, size):
    for thing in THINGS:
        found = []
        dist.all_gather_object(found, thing if rank == size - 1 else rank)
        assert found == [*range(size - 1), thing]
        given = [thing if to == rank else to for to in range(size)]
        dist.all_to_all_object(found, given)
        assert found == [thing if r == rank else rank for r in range(size)]


def test_small_objects_take_the_hot_path_and_large_arrays_in_them_lie_beside_the_pickle(rank, size):
    if size == 1:
        pytest.skip("a rank alone agrees with nobody")
    found = [{"a": 1}] if rank == 0 else [None]
    assert hot.broadcast_object_list(found, 0, None, True) is DONE
    assert found == [{"a": 1}]
    large = np.arange(20_000.0)
    found = [large if rank == 0 else None]
    dist.broadcast_object_list(found, 0)
    assert (found[0] == large).all()
    found[0][0] = 3.0  # writable, and its own


class Lent:
    """When unpickled, the name of the type of the buffer that it lends to its pickle."""

    def __reduce_ex__(self, protocol):
        return kind, (pickle.PickleBuffer(bytes(20_000)),)


def kind(buffer):
    return type(buffer).__name__


def nested(thing, depth):
    return [nested(thing, depth - 1)] if depth else [thing]


@pytest.mark.parametrize(
    "around",
    [
        lambda thing: [*range(100), thing],
        lambda thing: (*range(100), thing),
        lambda thing: dict.fromkeys(range(100)) | {"last": thing},
        lambda thing: {thing: 1},
        lambda thing: {(1, thing): 1},
        lambda thing: {thing},
        lambda thing: nested(thing, 6),
    ],
)
def test_a_large_buffer_lies_beside_the_pickle_wherever_it_is(rank, size, around):
    if size == 1:
        pytest.skip("a rank alone sends nothing")
    found = [around(Lent()) if rank == 0 else None]
    dist.broadcast_object_list(found, 0)
    assert rank == 0 or found == [around("memoryview")]


def test_what_cannot_be_pickled_is_an_error_on_all_ranks(size):
    with pytest.raises((dist.UsageError, dist.RemoteError), match="cannot be pickled"):
        dist.all_gather_object([], threading.Lock())


def test_what_calls_an_operation_while_it_is_unpickled_is_refused(rank, size):
    if size == 1:
        pytest.skip("a rank alone waits for nobody")
    with pytest.raises(dist.UsageError, match="in the middle of another one"):
        dist.all_gather_object([], Loud())


@pytest.mark.parametrize("args", [([], 0), ((1, 2), 0), ([1], -1), ([1], "0")])
def test_a_list_or_a_root_that_is_unusual_is_left_to_python(args):
    assert hot.broadcast_object_list(*args, None, True) is None


# ---- whatever the others do


class Mix:
    """Steps that all ranks draw alike; how each rank goes about them, it draws alone."""

    def __init__(self, rank, size, seed):
        self.rank, self.size = rank, size
        self.alike, self.own = np.random.default_rng(seed), np.random.default_rng([seed, rank + 1])
        self.steps = [self.small, self.small, self.small, self.late, self.behind, self.at_odds]
        self.steps += [self.refused, self.other, self.objects, self.large]

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
        self.call(verb, (n,), root)

    def large(self):
        """It does not fit into the control block, and some ranks come later than others."""
        verb, root = self.alike.choice([*VERBS]), self.root()
        if self.own.integers(3) == 0:
            time.sleep(1e-3)
        self.call(verb, (PAYLOAD // 8 + int(self.alike.integers(1, 5000)),), root)

    def call(self, verb, shape, root):
        place = Amid() if self.own.integers(2) else np.asarray
        args, result = calls(self.rank, self.size, shape, "f8", root, place)[verb]
        waits = bool(self.own.integers(2))
        work = getattr(dist, verb)(*without_splits(args), sync_op=waits)
        if not waits:
            work.wait()
        all_of_them = [calls(r, self.size, shape, "f8", root)[verb] for r in range(self.size)]
        assert np.allclose(result, self.expected(verb, all_of_them, root))
        assert place is np.asarray or place.are_left_alone()

    def objects(self):
        verb, root = self.alike.choice([*OBJECT_VERBS]), self.root()
        thing = "x" * int(self.alike.choice([10, 3000, 6000]))
        args, result = objects(self.rank, self.size, thing, root)[verb]
        getattr(dist, verb)(*args)
        assert result == expected_objects(verb, self.rank, self.size, thing, root)

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
            "alltoall_single": lambda: [x[self.rank] for _, x, *_ in args],
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


@pytest.mark.parametrize("steps", [150, pytest.param(5_000, marks=pytest.mark.slow)])
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
    x, word = np.ones(1), np.zeros(1)
    for late in range(size):
        dist.barrier()
        others = [each for each in range(size) if each != late]
        for other in others if rank == late else ():
            dist.recv(word, other)
        with pytest.raises(dist.CollectiveTimeout):
            dist.all_reduce(x, group=group)
        if rank != late:
            dist.send(word, late)
        dist.barrier()
    assert x[0] == 1
    dist.destroy_process_group(group)


def test_a_thread_that_the_main_one_waits_for_stands_for_it(size):
    if size == 1:
        pytest.skip("a rank alone has no hot path")
    x, found = np.ones(3), []

    def operate():
        found.append(hot.all_reduce(x, SUM, None, True))

    for run in (operate, in_place_of_main(operate)):
        dist.barrier()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    operate()
    assert found == [None, DONE, DONE]
    assert (x == size**2).all()


WAYS = {
    "by place": lambda out, x, splits: dist.alltoall_single(out, x, None, True),
    "by name": lambda out, x, splits: dist.alltoall_single(
        in_split_sizes=splits, out_split_sizes=splits, sync_op=True, in_tensor=x, out_tensor=out
    ),
    "partly by name": lambda out, x, splits: dist.alltoall_single(out, group=None, in_tensor=x),
    "by another text of the name": lambda out, x, splits: dist.alltoall_single(
        out, **{"".join(["in_", "tensor"]): x}
    ),
    "in a partial": lambda out, x, splits: partial(dist.alltoall_single, out)(in_tensor=x),
    "by map": lambda out, x, splits: next(map(dist.alltoall_single, [out], [x])),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_are_given_in_any_way(way, rank, size):
    x, out = numbers(rank, 2 * size, "f8"), np.zeros(2 * size)
    assert WAYS[way](out, x, [2] * size).is_completed()
    expected = [numbers(other, 2 * size, "f8")[2 * rank : 2 * rank + 2] for other in range(size)]
    np.testing.assert_array_equal(out, np.concatenate(expected))


@pytest.mark.parametrize("count", [10, 1000, 3000, 8000, 70_000])
def test_arrays_of_a_list_that_nobody_else_keeps_are_there_until_the_work_has_ended(
    count, rank, size
):
    def parts():
        return [np.full(count, 10.0 * rank + to) for to in range(size)]

    out, reduced, own = [np.zeros(count) for _ in range(size)], np.zeros(count), np.zeros(count)
    verbs = {
        "alltoall": lambda: dist.alltoall(out, parts(), sync_op=False),
        "reduce_scatter": lambda: dist.reduce_scatter(reduced, parts(), sync_op=False),
        "scatter": lambda: dist.scatter(own, None if rank else parts(), 0, sync_op=False),
    }
    for begin in verbs.values():
        for late in range(size):
            dist.barrier()
            if rank == late:
                time.sleep(0.02)
            work = begin()
            junk = [np.full(count, -7.0) for _ in range(2 * size)]
            work.wait()
            del junk
    assert [set(each) for each in out] == [{10.0 * source + rank} for source in range(size)]
    assert set(reduced) == {sum(10.0 * source + rank for source in range(size))}
    assert set(own) == {float(rank)}
