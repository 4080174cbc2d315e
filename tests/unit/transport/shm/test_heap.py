"""The heap: arrays in memory that other processes can map. Some tests start a second process."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpcdist.transport.shm.blocks import PythonBlocks, compiled
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.shm.segment import create_segment, open_segment

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

ROOT = Path(__file__).parents[4]
LINE = 256
MiB = 1 << 20


@pytest.fixture(
    params=[True, False] if compiled is not None else [False], ids=lambda used: "C" * used
)
def make_heap(request):
    """Return what makes an open heap: with the compiled blocks, and without."""

    def made(capacity):
        heap = Heap(capacity, use_compiled=request.param)
        heap.open()
        return heap

    return made


@pytest.fixture
def heap(make_heap):
    return make_heap(MiB)


def offsets(heap, *lengths):
    """Allocate, and return where each array lies, and the arrays."""
    arrays = [heap.empty(length) for length in lengths]
    return [heap.offset_of(array) for array in arrays], arrays


# ---- what is handed out


def test_arrays_are_flat_bytes_that_can_be_written(heap):
    x = heap.empty(1000)
    assert (x.dtype, x.shape, x.flags.writeable) == (np.dtype("u1"), (1000,), True)
    x[...] = 7
    assert x.sum() == 7000


def test_arrays_begin_at_multiples_of_256_bytes_one_after_the_other(heap):
    places, arrays = offsets(heap, 1, 255, 256, 257, 10_000, 1)
    assert places == [0, 256, 512, 768, 1280, 1280 + 10_240]
    assert [array.ctypes.data % LINE for array in arrays] == [0] * 6
    assert heap.used == 1280 + 10_240 + 256


def python_heap():
    heap = Heap(MiB, use_compiled=False)
    heap.open()
    assert type(heap._blocks) is PythonBlocks
    return heap


def test_what_interrupts_an_allocation_gets_ordinary_memory(monkeypatch):
    heap, back, nested = python_heap(), os.posix_fallocate, []

    def interrupted(*args):
        nested.append(heap.empty(256))
        back(*args)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    made = []
    allocates = threading.Thread(target=lambda: made.append(heap.empty(256)), daemon=True)
    allocates.start()
    allocates.join(60)
    assert nested == [None]
    assert heap.offset_of(made[0]) == 0
    assert heap.offset_of(heap.empty(256)) == 256


def test_nothing_is_handed_out_for_no_bytes_or_before_there_is_a_segment(heap):
    assert heap.empty(0) is None
    assert heap.empty(-8) is None
    closed = Heap(MiB)
    assert closed.empty(8) is None
    assert closed.offset_of(np.zeros(1)) is None
    assert heap.used == 0


def test_the_segment_is_made_once(heap):
    assert heap.open() is heap.segment
    assert heap.peer(heap.segment) is heap.peer(heap.segment)


# ---- what comes back


def test_memory_is_used_again_when_the_last_view_is_gone(heap):
    x = heap.empty(1000)
    view = x.view("f4")[5:10].reshape(5, 1)
    del x
    assert offsets(heap, 1000)[0] == [1024]
    del view
    assert offsets(heap, 1000)[0] == [0]


def test_the_first_place_that_is_large_enough_is_taken(heap):
    _, arrays = offsets(heap, 256, 1024, 256, 512, 256)
    del arrays[3], arrays[1]
    assert offsets(heap, 512)[0] == [256]
    _, kept = offsets(heap, 512, 512, 512)
    assert [heap.offset_of(each) for each in kept] == [256, 768, 1536]


def test_neighbours_that_come_back_are_joined_in_any_order(heap):
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        _, arrays = offsets(heap, 300, 300, 300, 300)
        fence = arrays.pop()
        for number in order:
            arrays[number] = None
        (place,), _ = offsets(heap, 3 * 512)
        assert place == 0
        del fence


def test_used_counts_the_bytes_of_arrays_that_are_alive(heap):
    x, y = heap.empty(1), heap.empty(1000)
    assert heap.used == 256 + 1024
    del x
    z = heap.empty(5)
    assert heap.used == 1024 + 256
    del y, z
    assert heap.used == 0


def test_an_array_that_is_gone_in_a_cycle_comes_back_with_the_next_collection(heap):
    cycle = {"x": heap.empty(1000)}
    cycle["self"] = cycle
    del cycle
    gc.collect()
    assert offsets(heap, 1000)[0] == [0]


# ---- how much there is


def test_all_of_the_capacity_can_be_used_and_used_again(heap):
    for _ in range(3):
        x = heap.empty(MiB)
        assert heap.offset_of(x) == 0
        x[::4096] = 1
        del x
    parts = [heap.empty(MiB // 8) for _ in range(8)]
    assert [heap.offset_of(part) for part in parts] == [k * MiB // 8 for k in range(8)]


def test_beyond_the_capacity_there_is_one_warning_and_no_array(heap):
    kept = heap.empty(MiB - 4096)
    with pytest.warns(RuntimeWarning, match="8192 bytes does not fit.*0 of 1 MiB.*HEAP_MB") as told:
        assert heap.empty(8192) is None
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert heap.empty(8192) is None
        assert heap.empty(4 * MiB) is None
        assert heap.empty(4096) is not None
    del kept
    assert heap.empty(MiB // 2) is not None


def test_a_system_without_memory_is_told_and_no_array_is_given(monkeypatch):
    heap = python_heap()

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert heap.empty(8192) is None
    monkeypatch.undo()
    assert heap.offset_of(heap.empty(8192)) == 0


def test_memory_is_taken_from_the_system_as_it_is_needed(make_heap):
    heap = make_heap(1 << 30)
    segment = heap.open()
    assert os.fstat(segment.descriptor).st_blocks == 0
    kept = heap.empty(100_000)
    assert os.fstat(segment.descriptor).st_blocks * 512 == 102_400
    del kept
    kept = [heap.empty(40_000), heap.empty(40_000)]
    assert len(kept) == 2
    assert os.fstat(segment.descriptor).st_blocks * 512 == 102_400


# ---- where an array lies


def test_views_and_slices_have_the_offset_of_their_first_byte(heap):
    heap_first, x = heap.empty(256), heap.empty(8000).view("f8").reshape(10, 100)
    assert heap.offset_of(x) == 256
    assert heap.offset_of(x[3]) == 256 + 3 * 800
    assert heap.offset_of(x[9, 99:]) == 256 + 7992
    assert heap.offset_of(x.view("u1").reshape(-1)[3:17]) == 259
    assert heap.offset_of(heap_first[:0]) == 0


def test_other_memory_has_no_offset(heap, make_heap):
    other = make_heap(MiB)
    x = heap.empty(4096)
    for foreign in (np.zeros(10), x.copy(), other.empty(4096), np.zeros(0), x.astype("f4")):
        assert heap.offset_of(foreign) is None


def test_an_array_that_only_begins_in_the_heap_has_no_offset(heap):
    x = heap.empty(MiB)
    assert heap.offset_of(x[MiB - 8 :]) == MiB - 8
    longer = np.lib.stride_tricks.as_strided(x[MiB - 8 :], (16,))
    assert heap.offset_of(longer) is None


# ---- after a failure


def test_memory_is_never_used_again_once_the_heap_is_retired(heap):
    x, y = heap.empty(1000), heap.empty(1000)
    x[...], y[...] = 3, 4
    del y
    heap.retire()
    with pytest.warns(RuntimeWarning, match="does not fit"):
        assert heap.empty(1000) is None
    assert (x == 3).all()
    assert heap.offset_of(x) == 0
    del x
    assert heap.empty(1000) is None


def test_a_heap_that_is_revived_uses_again_what_came_back_before_and_since(heap):
    kept, returned, late = (heap.empty(1024) for _ in range(3))
    kept[...] = 3
    del returned
    heap.retire()
    del late
    heap.revive()
    again = [heap.empty(1024) for _ in range(2)]
    assert [heap.offset_of(each) for each in (kept, *again)] == [0, 1024, 2048]
    assert (kept == 3).all()
    assert heap.used == 3072


# ---- other processes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_no_arrays_and_its_end_changes_nothing(heap):
    x, y = heap.empty(1000), heap.empty(1000)
    x[...] = 5
    child = os.fork()
    if child == 0:
        given = heap.empty(1000)
        del y
        os._exit(0 if given is None and (x == 5).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heap.offset_of(heap.empty(1000)) == 2048
    assert heap.used == 2048
    assert heap.offset_of(y) == 1024


READER = """
import sys
import numpy as np
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.shm.segment import Segment

heap = Heap(1 << 20)
heap.open()
memory = heap.peer(Segment(*map(int, sys.argv[1].split(","))))
assert heap.peer(Segment(*map(int, sys.argv[1].split(",")))) is memory
x = np.frombuffer(memory, "i4")[64:74]
assert x.tolist() == list(range(10)), x
x += 100
print("seen", flush=True)
sys.stdin.read()
"""


def in_another_process(script, *args, **options):
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([sys.executable, "-c", script, *args], cwd=ROOT, **options)


def test_another_process_sees_what_is_written_and_writes_where_it_is_seen(heap):
    heap_first, x = heap.empty(256), heap.empty(40).view("i4")
    heap_first[...], x[...] = 0, np.arange(10)
    reader = in_another_process(READER, ",".join(map(str, heap.segment)))
    assert reader.stdout.readline() == "seen\n"
    assert x.tolist() == list(range(100, 110))
    reader.communicate()
    assert reader.returncode == 0


HOLDER = """
import sys
from hpcdist.transport.shm.heap import Heap

heap = Heap(1 << 20)
print(*heap.open(), flush=True)
x = heap.empty(4096)
x[...] = 9
print("written", flush=True)
sys.stdin.read()
"""


def test_memory_stays_readable_when_the_process_that_made_it_is_killed():
    names = set(Path("/dev").glob("shm/*hpcdist*"))
    holder = in_another_process(HOLDER)
    numbers = [int(word) for word in holder.stdout.readline().split()]
    assert holder.stdout.readline() == "written\n"
    own = Heap(MiB)
    own.open()
    memory = own.peer(type(own.segment)(*numbers))
    holder.kill()
    holder.communicate()
    assert bytes(memory[:4096]) == b"\x09" * 4096
    assert not set(Path("/dev").glob("shm/*hpcdist*")) - names


def test_a_private_mapping_keeps_what_is_written_to_itself():
    segment, memory = create_segment(8192, "test")
    memory.data[:4] = b"true"
    private = open_segment(segment, private=True)
    private.data[:4] = b"fake"
    assert (bytes(memory[:4]), bytes(private[:4])) == (b"true", b"fake")
    os.close(segment.descriptor)


def test_a_mapping_holds_no_descriptor_and_goes_with_its_last_view():
    def mapped():
        return Path("/proc/self/maps").read_text().count("hpcdist-gone")

    segment, memory = create_segment(8192, "gone")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    views = [open_segment(segment)[5:9] for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert mapped() == 21
    del views, memory
    assert mapped() == 0
    os.close(segment.descriptor)


def test_the_memory_of_a_process_that_is_gone_cannot_be_mapped():
    holder = in_another_process(HOLDER)
    numbers = [int(word) for word in holder.stdout.readline().split()]
    holder.kill()
    holder.communicate()
    own = Heap(MiB)
    with pytest.raises(OSError, match=r"/proc"):
        own.peer(type(own.open())(*numbers))


def test_descriptors_are_given_back(make_heap):
    def come_and_go():
        heap, peer = make_heap(MiB), make_heap(MiB)
        x = heap.empty(100)
        heap.peer(peer.open())
        del x

    come_and_go()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        come_and_go()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- against a model


class Arrays(RuleBasedStateMachine):
    """Arrays come and go; each holds a number of its own, so that an overlap would be seen."""

    use_compiled = True

    def __init__(self):
        super().__init__()
        self.heap = Heap(64 << 10, use_compiled=self.use_compiled)
        self.heap.open()
        self.alive = {}
        self.number = 0

    @rule(nbytes=st.integers(1, 20_000))
    def allocate(self, nbytes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = self.heap.empty(nbytes)
        if array is None:
            assert not self.has_room(nbytes)
            return
        self.number += 1
        array[...] = self.number % 251
        self.alive[self.number] = array

    def has_room(self, nbytes):
        """Say whether there is a gap between the arrays that are alive."""
        end, wanted = 0, rounded(nbytes)
        for array in sorted(self.alive.values(), key=self.heap.offset_of):
            start = self.heap.offset_of(array)
            if start - end >= wanted:
                return True
            end = start + rounded(array.nbytes)
        return self.heap.capacity - end >= wanted

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data):
        del self.alive[data.draw(st.sampled_from(sorted(self.alive)))]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def keep_a_slice(self, data):
        number = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive[number] = self.alive[number][:]

    @invariant()
    def nobody_writes_to_the_arrays_of_others(self):
        for number, array in self.alive.items():
            assert (array == number % 251).all()

    def teardown(self):
        self.alive.clear()
        whole = self.heap.empty(self.heap.capacity)
        assert self.heap.offset_of(whole) == 0
        assert self.heap.used == self.heap.capacity


def rounded(nbytes):
    return -(-nbytes // LINE) * LINE


class ArraysInPython(Arrays):
    use_compiled = False


TestArrays = Arrays.TestCase
TestArraysInPython = ArraysInPython.TestCase
TestArrays.settings = TestArraysInPython.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.randoms(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_everything_is_one_free_run_again_at_the_end(lengths, random, use_compiled):
    heap = Heap(64 << 10, use_compiled=use_compiled)
    heap.open()
    arrays = [heap.empty(length) for length in lengths]
    random.shuffle(arrays)
    while arrays:
        arrays.pop()
    assert heap.offset_of(heap.empty(heap.capacity)) == 0
