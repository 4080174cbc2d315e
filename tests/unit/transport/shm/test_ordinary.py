"""Ordinary arrays of NumPy in the heap, in one process; some tests start a second one."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import hpcdist as dist
from hpcdist.transport.shm import ordinary
from hpcdist.transport.shm.blocks import compiled
from hpcdist.transport.shm.heap import Heap

pytestmark = pytest.mark.skipif(compiled is None, reason="needs the compiled blocks")

ROOT = Path(__file__).parents[4]
LEAST = ordinary.LEAST or 4096  # without compiled blocks parameters of tests want a number, too
MiB = 1 << 20


@pytest.fixture
def heap():
    heap = Heap(16 * MiB)
    heap.open()
    heap.serve()
    return heap


@pytest.fixture
def shared(heap):
    with dist.shared_memory():
        yield heap


@pytest.fixture
def everywhere(heap):
    dist.share_arrays()
    yield heap
    ordinary.share_all(False)


def is_in(heap, array):
    return heap.offset_of(np.ascontiguousarray(array)) is not None


def a_new_array_is_in(heap):
    return is_in(heap, np.empty(LEAST, "u1"))


# ---- which arrays


def test_arrays_made_in_the_block_are_in_the_heap_those_before_and_after_are_not(heap):
    before = np.ones(LEAST // 8)
    with dist.shared_memory():
        made = before + before
    after = before + before
    assert [is_in(heap, each) for each in (before, made, after)] == [False, True, False]
    assert (made == 2).all()


def test_arrays_of_256_kib_and_more_are_in_the_heap_smaller_ones_are_not(shared):
    sizes = 1, LEAST - 1, LEAST, LEAST + 1, 3 * MiB + 5
    arrays = [np.empty(size, "u1") for size in sizes]
    assert [is_in(shared, each) for each in arrays] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: np.empty(x.shape),
        lambda x: np.zeros(x.shape),
        lambda x: np.full(x.shape, 3.0),
        lambda x: x.copy(),
        lambda x: -x,
        lambda x: np.sin(x) @ np.eye(x.shape[1]),
        lambda x: np.concatenate([x, x]),
        lambda x: np.fromiter(range(x.size), "f8"),
        lambda x: x.astype("f4"),
        lambda x: x.T.copy(),
    ],
)
def test_whatever_makes_an_array_makes_it_in_the_heap(shared, make):
    x = np.arange(400.0 * 300).reshape(400, 300)
    assert is_in(shared, make(x))


def test_they_are_arrays_like_any_other_that_own_their_memory(shared):
    x = np.empty((256, 512), "f4")
    assert type(x) is np.ndarray
    assert x.flags.owndata
    assert x.base is None
    assert x.ctypes.data % 64 == 0


def test_views_and_slices_are_where_the_array_is(shared):
    x = np.zeros((1000, 100))
    assert shared.offset_of(x[7]) == shared.offset_of(x) + 7 * 800
    assert is_in(shared, x.view("i4").reshape(-1)[5:9])


def test_zeros_are_zeros_in_memory_that_was_used_before(shared):
    for size in (LEAST, 2 * MiB, 5 * MiB, MiB):
        dirty = np.full(size, 7, "u1")
        place = shared.offset_of(dirty)
        del dirty
        zeros = np.zeros(size, "u1")
        assert shared.offset_of(zeros) == place
        assert not zeros.any()
        zeros[...] = 9


# ---- when


def test_blocks_may_be_nested(heap):
    with dist.shared_memory():
        with dist.shared_memory():
            assert a_new_array_is_in(heap)
        assert a_new_array_is_in(heap)
    assert not a_new_array_is_in(heap)


def test_the_block_ends_with_an_exception_too(heap):
    with pytest.raises(KeyError), dist.shared_memory():
        raise KeyError
    assert not a_new_array_is_in(heap)


def test_a_function_may_be_decorated(heap):
    @dist.shared_memory()
    def make():
        return a_new_array_is_in(heap)

    assert [make(), make(), a_new_array_is_in(heap)] == [True, True, False]


def test_each_asynchronous_task_has_its_own(heap):
    async def within(entered, left):
        with dist.shared_memory():
            entered.set()
            await left.wait()
            return a_new_array_is_in(heap)

    async def beside(entered, left):
        await entered.wait()
        found = a_new_array_is_in(heap)
        left.set()
        return found

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(within(entered, left), beside(entered, left))

    assert asyncio.run(both()) == [True, False]


def on_another_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(
    getattr(sys.flags, "thread_inherit_context", 0), reason="threads inherit the context here"
)
def test_the_block_is_of_one_thread(shared):
    assert a_new_array_is_in(shared)
    assert not on_another_thread(lambda: a_new_array_is_in(shared))


def test_share_arrays_is_for_all_threads(everywhere):
    assert a_new_array_is_in(everywhere)
    assert on_another_thread(lambda: a_new_array_is_in(everywhere))
    with dist.shared_memory():
        assert a_new_array_is_in(everywhere)
    assert a_new_array_is_in(everywhere)


def test_what_is_to_be_ordinary_is_so_all_the_same(everywhere):
    x = np.ones(MiB, "u1")
    with ordinary.left_to_numpy():
        made = np.ones(MiB, "u1")
        x.resize(2 * MiB, refcheck=False)
        with dist.shared_memory():
            assert a_new_array_is_in(everywhere)
    assert not is_in(everywhere, made)
    made.resize(2 * MiB, refcheck=False)
    assert (x == made).all()
    del x, made
    assert a_new_array_is_in(everywhere)
    assert everywhere.used == 0


def test_share_arrays_twice_is_share_arrays_once(everywhere):
    dist.share_arrays()
    assert a_new_array_is_in(everywhere)
    assert ordinary.share_all(False)
    assert not ordinary.share_all(False)
    assert not a_new_array_is_in(everywhere)


def test_without_a_heap_arrays_are_ordinary_and_with_it_they_are_not():
    with dist.shared_memory():
        early = np.ones(LEAST)
        heap = Heap(16 * MiB)
        heap.open()
        assert not a_new_array_is_in(heap)
        heap.serve()
        assert a_new_array_is_in(heap)
        assert not is_in(heap, early)


def test_a_numpy_that_does_not_let_us_is_told_about(monkeypatch):
    class Another:
        def share_all(self, on):
            raise OSError(14, "Bad address")

    monkeypatch.setattr(ordinary, "compiled", Another())
    with pytest.warns(RuntimeWarning, match="use `with hpcdist.shared_memory") as told:
        dist.share_arrays()
    assert told[0].filename == __file__


def test_without_the_compiled_part_nothing_happens(heap, monkeypatch):
    monkeypatch.setattr(ordinary, "compiled", None)
    dist.share_arrays()
    with dist.shared_memory():
        assert not a_new_array_is_in(heap)


def test_simulated_ranks_are_left_alone(heap):
    def rank():
        dist.share_arrays()
        with dist.shared_memory():
            return a_new_array_is_in(heap)

    assert dist.simulate(2, rank) == [False, False]
    assert not a_new_array_is_in(heap)


# ---- what comes back


def test_memory_is_used_again_when_the_last_view_is_gone(shared):
    x = np.empty(LEAST, "u1")
    view = x.reshape(16, -1)[3]
    place = shared.offset_of(x)
    del x
    other = np.empty(LEAST, "u1")
    assert shared.offset_of(other) != place
    del view
    assert shared.offset_of(np.empty(LEAST, "u1")) == place
    del other
    assert shared.used == 0


def test_arrays_are_freed_by_other_threads_and_whatever_handler_is_current(heap):
    with dist.shared_memory():
        kept = [np.full(LEAST, number, "u1") for number in range(20)]
    small = [np.ones(10) for _ in range(20)]
    on_another_thread(kept.clear)
    assert heap.used == 0
    dist.share_arrays()
    on_another_thread(small.clear)
    kept = [np.full(LEAST, number, "u1") for number in range(20)]
    small = [np.ones(10) for _ in range(20)]
    ordinary.share_all(False)
    assert heap.used == 20 * LEAST
    on_another_thread(kept.clear)
    on_another_thread(small.clear)
    assert heap.used == 0


def test_arrays_of_empty_and_ordinary_ones_lie_side_by_side(shared):
    arrays = []
    for number in range(12):
        size = LEAST + 1000 * number
        arrays.append(shared.empty(size) if number % 2 else np.empty(size, "u1"))
        arrays[-1][...] = number
    assert all(is_in(shared, each) for each in arrays)
    assert all((each == number).all() for number, each in enumerate(arrays))


def test_a_full_heap_gives_ordinary_arrays_without_a_word(shared):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = [np.full(MiB, number, "u1") for number in range(20)]
        assert not is_in(shared, np.zeros(17 * MiB, "u1"))
    assert [is_in(shared, each) for each in arrays] == [True] * 16 + [False] * 4
    assert all((each == number).all() for number, each in enumerate(arrays))
    del arrays
    assert a_new_array_is_in(shared)


def test_no_more_than_a_quarter_of_the_heap_is_kept_for_arrays_to_come(shared):
    def taken():
        return os.fstat(shared.segment.descriptor).st_blocks * 512

    first = np.ones(MiB, "u1")
    large = np.ones(14 * MiB, "u1")
    assert taken() == 15 * MiB
    del large
    assert taken() == 5 * MiB
    assert not np.zeros(14 * MiB, "u1").any()
    assert (first == 1).all()


def test_a_system_without_memory_gives_ordinary_arrays(shared):
    kept = np.full(MiB, 1, "u1")
    nothing = os.open(os.devnull, os.O_RDWR)
    memory = os.dup(shared.segment.descriptor)
    os.dup2(nothing, shared.segment.descriptor)  # which has no memory to give
    x = np.full(MiB, 2, "u1")
    with pytest.warns(RuntimeWarning, match="does not fit into shared memory .*No such device"):
        assert shared.empty(MiB) is None
    os.dup2(memory, shared.segment.descriptor)
    os.close(nothing), os.close(memory)
    assert not is_in(shared, x)
    del kept
    assert shared.offset_of(shared.empty(2 * MiB)) == 0
    assert a_new_array_is_in(shared)
    assert (x == 2).all()


def test_sizes_that_overflow_are_the_errors_that_they_are(shared):
    for shape in (1 << 62, (1 << 31, 1 << 31, 4)):
        for make in (np.empty, np.zeros):
            with pytest.raises((MemoryError, ValueError)):
                make(shape, "f8")
    assert shared.used == 0
    assert a_new_array_is_in(shared)


# ---- arrays that are resized


@pytest.mark.parametrize("before", [1, LEAST - 8, LEAST, LEAST + 4096, 3 * MiB])
@pytest.mark.parametrize("after", [1, LEAST - 8, LEAST, LEAST + 4096, 3 * MiB, 20 * MiB])
@pytest.mark.parametrize("next_to_it", [False, True], ids=["", "next"])
def test_a_resized_array_keeps_what_it_had(shared, before, after, next_to_it):
    x = (np.arange(before) % 251).astype("u1")
    other = np.full(LEAST, 77, "u1") if next_to_it else None
    x.resize(after, refcheck=False)
    assert x.size == after
    assert (x[:before] == np.arange(min(before, after)) % 251).all()
    assert not x[before:].any()
    assert other is None or (other == 77).all()
    del x, other
    assert shared.used == 0


def test_an_array_that_shrinks_gives_its_end_back(shared):
    x = np.full(4 * MiB, 5, "u1")
    x.resize(MiB, refcheck=False)
    assert shared.used == MiB
    second = np.full(MiB, 6, "u1")
    assert shared.offset_of(second) == MiB
    x.resize(LEAST // 2, refcheck=False)
    assert shared.used == LEAST + MiB
    assert (x == 5).all()


# ---- after a failure, and at the end


def test_memory_that_came_back_is_not_used_while_the_heap_is_retired(shared):
    x, kept = np.empty(LEAST, "u1"), np.full(LEAST, 3, "u1")
    place = shared.offset_of(x)
    shared.retire()
    del x
    x = np.ones(LEAST)
    assert not is_in(shared, x)
    kept.resize(2 * LEAST, refcheck=False)
    assert not is_in(shared, kept)
    assert (kept[:LEAST] == 3).all()
    shared.revive()
    assert shared.offset_of(np.empty(LEAST, "u1")) == place


def mapped(name="hpcdist-heap"):
    return Path("/proc/self/maps").read_text().count(name)


def test_arrays_outlive_the_heap_which_is_unmapped_with_the_last_of_them():
    gc.collect()
    before, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
    heap = Heap(16 * MiB)
    heap.open()
    heap.serve()
    with dist.shared_memory():
        x, y = np.full(MiB, 1, "u1"), np.full(MiB, 2, "u1")
        del heap
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        z = np.full(MiB, 3, "u1")
        x.resize(2 * MiB, refcheck=False)
    assert [x[0], x[-1], y[0], z[0]] == [1, 0, 2, 3]
    assert mapped() == before + 1
    del x
    assert (y == 2).all()
    del y
    assert mapped() == before


def test_the_newest_heap_serves_and_arrays_go_back_to_their_own():
    heaps = [Heap(16 * MiB) for _ in range(3)]
    arrays = []
    with dist.shared_memory():
        for heap in heaps:
            heap.open()
            heap.serve()
            arrays.append(np.empty(LEAST, "u1"))
    assert [[is_in(heap, x) for x in arrays] for heap in heaps] == np.eye(3).tolist()
    del arrays[1]
    assert [heap.used for heap in heaps] == [LEAST, 0, LEAST]


END = """
import atexit, os, sys
import numpy as np
import hpcdist as dist
from hpcdist.transport.shm.heap import Heap

heap = Heap(64 << 20)
heap.open()
heap.serve()
dist.share_arrays()
kept = [np.ones(100_000) for _ in range(5)]
kept.append(kept)
sys.kept = np.ones(100_000)
atexit.register(lambda x: print(x.sum(), flush=True), np.ones(100_000))
class Late:
    def __del__(self, x=np.ones(100_000), empty=np.empty, write=os.write):
        made = empty(100_000)
        made[:] = x
        write(1, b"%d" % made[7])
late = Late()
"""


def test_a_program_ends_as_usual_with_arrays_alive():
    done = subprocess.run(
        [sys.executable, "-c", END], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["100000.0", "1"]


# ---- forked children


@contextmanager
def forked():
    """Run the block in a child, whose failure fails the test; what is after it in the parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ready, told = os.pipe()
        child = os.fork()
    yield child, ready, told
    os.close(ready), os.close(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_the_child(function):
    """End the child with what `function` says."""
    try:
        os._exit(0 if function() else 1)
    finally:
        os._exit(2)


def test_a_child_has_arrays_of_its_own_as_a_fork_has_it(everywhere):
    x, gone = np.full(MiB, 1, "u1"), [np.full(LEAST, 5, "u1")]
    with forked() as (child, ready, told):
        if child == 0:
            os.read(ready, 1)  # the parent has written

            def is_own():
                was = (x == 1).all() and (gone[0] == 5).all()
                x[...] = 9
                return was and (x == 9).all()

            in_the_child(is_own)
        x[...] = 2
        gone.clear()
        again = np.full(LEAST, 6, "u1")
        os.write(told, b"!")
    assert (x == 2).all()
    assert (again == 6).all()


def test_a_child_takes_its_arrays_from_elsewhere_and_gives_nothing_back(everywhere):
    x, y = np.full(MiB, 1, "u1"), np.full(LEAST, 2, "u1")
    with forked() as (child, *_):
        if child == 0:

            def goes_its_way():
                nonlocal x, y
                made = [np.full(LEAST, 3, "u1") for _ in range(30)]
                elsewhere = not any(is_in(everywhere, each) for each in made)
                y.resize(MiB, refcheck=False)
                kept = (y[:LEAST] == 2).all() and not is_in(everywhere, y)
                del x
                grandchild = os.fork()
                if grandchild == 0:
                    in_the_child(lambda: (y[:LEAST] == 2).all() and (made[7] == 3).all())
                ended = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
                return elsewhere and kept and ended == 0

            in_the_child(goes_its_way)
    assert everywhere.used == MiB + LEAST
    assert (x == 1).all()
    assert (y == 2).all()
    assert a_new_array_is_in(everywhere)


def test_a_child_of_a_process_whose_heap_is_closed_has_arrays_of_its_own():
    heap = Heap(16 * MiB)
    heap.open()
    heap.serve()
    with dist.shared_memory():
        x = np.full(MiB, 1, "u1")
    del heap
    gc.collect()
    with forked() as (child, ready, told):
        if child == 0:
            os.read(ready, 1)
            in_the_child(lambda: (x == 1).all())
        x[...] = 2
        os.write(told, b"!")


def test_children_come_and_go_while_other_threads_make_arrays(everywhere):
    stop, errors = threading.Event(), []

    def work(number):
        while not stop.is_set():
            x = np.full(LEAST + number, number, "u1")
            if not (x == number).all():
                errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with forked() as (child, *_):
                if child == 0:
                    in_the_child(lambda: np.ones(LEAST).sum() == LEAST)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert everywhere.used == 0


# ---- much at a time


def test_threads_make_resize_and_drop_arrays_and_all_comes_back(everywhere):
    errors = []

    def work(seed):
        chance, kept = random.Random(seed), []
        for number in range(300):
            x = np.full(chance.randrange(1, 6 * LEAST), number % 251, "u1")
            kept.append((number % 251, x))
            if len(kept) > 4:
                value, gone = kept.pop(chance.randrange(len(kept)))
                if not (gone == value).all():
                    errors.append(seed)
            if chance.random() < 0.2:
                last = kept[-1][1]
                last.resize(chance.randrange(1, last.size + 1), refcheck=False)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert everywhere.used == 0
    assert everywhere.offset_of(everywhere.empty(16 * MiB)) == 0


class Arrays(RuleBasedStateMachine):
    """Arrays come, change their size and go; each holds a number of its own."""

    def __init__(self):
        super().__init__()
        self.heap = Heap(4 * MiB)
        self.heap.open()
        self.heap.serve()
        self.alive = {}
        self.number = 0

    def keep(self, array, *, filled=True):
        self.number += 1
        if filled:
            array[...] = self.number % 251
        self.alive[self.number] = array

    @rule(nbytes=st.integers(1, 6 * LEAST))
    def make(self, nbytes):
        with dist.shared_memory():
            self.keep(np.empty(nbytes, "u1"))

    @rule(nbytes=st.integers(1, 6 * LEAST))
    def make_zeros(self, nbytes):
        with dist.shared_memory():
            zeros = np.zeros(nbytes, "u1")
        assert not zeros.any()
        self.keep(zeros)

    @rule(nbytes=st.integers(1, 3 * LEAST))
    def make_by_empty(self, nbytes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = self.heap.empty(nbytes)
        if array is not None:
            self.keep(array)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), nbytes=st.integers(1, 6 * LEAST))
    def resize(self, data, nbytes):
        number = data.draw(st.sampled_from(sorted(self.alive)))
        array = self.alive[number]
        if array.flags.owndata:
            with dist.shared_memory():
                array.resize(nbytes, refcheck=False)
            array[...] = number % 251

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data):
        del self.alive[data.draw(st.sampled_from(sorted(self.alive)))]

    @invariant()
    def nobody_writes_to_the_arrays_of_others(self):
        for number, array in self.alive.items():
            assert (array == number % 251).all()

    def teardown(self):
        self.alive.clear()
        assert self.heap.used == 0
        assert self.heap.offset_of(self.heap.empty(self.heap.capacity)) == 0


TestArrays = Arrays.TestCase
TestArrays.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
