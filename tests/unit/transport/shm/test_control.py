"""Boards: what ranks tell each other through one piece of memory. All ranks are in this process."""

import itertools
import mmap
import os
import subprocess
import sys
from contextlib import suppress
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from interrupted_at import InterruptError, interrupted_at

from hpcdist.arrays.buffer import carried
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.shm import control as control_module, kernel
from hpcdist.transport.shm.control import (
    EAGER_BYTES,
    MOST_EAGER,
    OF_A_DEATH,
    PAYLOAD,
    SPINS,
    STEP_BITS,
    PythonControlBlock,
    control_block_bytes,
    control_block_class,
    payload_places,
)
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.shm.kernel import code_of, compiled, divisor_of
from hpcdist.transport.shm.node import SharedNode, node_bytes

needs_compiled = pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")
CONTROL_BLOCKS = [pytest.param(PythonControlBlock, id="Python")]
CONTROL_BLOCKS.append(
    pytest.param(getattr(compiled, "ControlBlock", None), id="compiled", marks=needs_compiled)
)


def control_blocks_of(control_block_type, size):
    """Return the memory and the boards of `size` ranks."""
    memory = mmap.mmap(-1, control_block_bytes(size))
    return memory, [control_block_type(memory, rank, size, PAYLOAD) for rank in range(size)]


@pytest.fixture(params=CONTROL_BLOCKS)
def control_block_type(request):
    return request.param


def post(control, number, address=0, data=None):
    """Publish six numbers that differ, and do not wait."""
    return control.post(number, -number, number + 1, 0, 7, -7, address, data, 0)


# ---- publishing


def test_a_board_of_one_rank_answers_at_once(control_block_type):
    _, (control,) = control_blocks_of(control_block_type, 1)
    assert post(control, 5) == (5, -5, 6, 0, 7, -7)


def test_nobody_learns_anything_before_all_have_published(control_block_type):
    _, (one, two, three) = control_blocks_of(control_block_type, 3)
    assert post(one, 4) is None
    assert post(two, 2) is None
    assert one.test() is None
    assert post(three, 9) == (2, -9, 3, 0, 7, -7)
    assert one.test() == two.test() == (2, -9, 3, 0, 7, -7)


def test_the_least_of_each_number_is_found_up_to_64_bits(control_block_type):
    _, (one, two) = control_blocks_of(control_block_type, 2)
    low, high = -(1 << 63), (1 << 63) - 1
    one.post(low, high, 0, 1, -1, high, high, None, 0)
    assert two.post(high, high, -1, 2, low, high, low, None, 0) == (low, high, -1, 1, low, high)
    assert one.addresses() == two.addresses() == (high, low)


def test_addresses_are_those_of_the_operation_at_hand(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 3)
    for operation in range(5):
        for rank, control in enumerate(control_blocks):
            post(control, 1, address=100 * operation + rank)
        expected = tuple(100 * operation + rank for rank in range(3))
        assert [control.addresses() for control in control_blocks] == [expected] * 3


def test_operations_take_turns(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 2)
    assert [control.turn for control in control_blocks] == [0, 0]
    for operation in range(1, 6):
        for control in control_blocks:
            post(control, operation)
        assert [control.turn for control in control_blocks] == [operation & 1] * 2


def test_what_was_published_stays_while_another_rank_is_one_operation_ahead(control_block_type):
    memory, (slow, fast) = control_blocks_of(control_block_type, 2)
    post(slow, 1, address=10, data=b"first of slow")
    post(fast, 2, address=20, data=b"first of fast")
    post(fast, 3, address=30, data=b"second of fast")
    assert slow.test() == (1, -2, 2, 0, 7, -7)
    assert slow.addresses() == (10, 20)
    assert payload(memory, slow, 2, 1)[:13] == b"first of fast"
    assert fast.test() is None
    assert post(slow, 4) == (3, -4, 4, 0, 7, -7)


def test_an_interrupt_finds_an_operation_posted_or_not():
    for moment in range(10_000):
        _, (one, two) = control_blocks_of(PythonControlBlock, 2)
        post(two, 9)
        with suppress(InterruptError), interrupted_at(moment, control_module) as raised:
            post(one, 4)
        if one.sequence == 0:
            post(one, 4)
        assert one.test() == two.test() == (4, -9, 5, 0, 7, -7)
        if not raised:
            break
    assert moment > 5


def test_an_interrupt_finds_a_step_taken_or_not():
    for moment in range(10_000):
        _, (one, two) = control_blocks_of(PythonControlBlock, 2)
        post(one, 4), post(two, 9)
        two.arrive(0)
        noted = []
        with suppress(InterruptError), interrupted_at(moment, control_module) as raised:
            noted.extend(map(one.arrive, (0,)))
        assert noted in ([], [True])
        noted.extend(() if noted else map(one.arrive, (0,)))
        assert one.inside(2) == [0, 1]
        assert one.arrived()
        assert two.arrived()
        if not raised:
            break
    assert moment > 5


@pytest.mark.parametrize("of_a_death", [False, True])
def test_an_interrupt_finds_an_operation_called_off_on_all_ranks_or_none(of_a_death, monkeypatch):
    monkeypatch.setattr(control_module, "_SEEN_AFTER_S", 0.0)
    for moment in range(10_000):
        _, control_blocks = control_blocks_of(PythonControlBlock, 2)
        for control in control_blocks:
            post(control, 1)
        with suppress(InterruptError), interrupted_at(moment, control_module) as raised:
            control_blocks[1].call_off(of_a_death)
        first, second = (control.enter() for control in control_blocks)
        assert first == second
        if not raised:
            break
    assert moment > 5
    assert first == 1 + of_a_death * OF_A_DEATH


def payload(memory, control, size, rank):
    """Return what a rank published for the operation at hand."""
    start = payload_places(size)[control.turn][rank]
    return memory[start : start + PAYLOAD]


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, PAYLOAD - 1, PAYLOAD])
def test_data_of_all_ranks_are_published_whole(control_block_type, nbytes):
    memory, control_blocks = control_blocks_of(control_block_type, 3)
    for operation in range(3):
        sent = [np.random.default_rng(9 * operation + rank).bytes(nbytes) for rank in range(3)]
        for control, data in zip(control_blocks, sent, strict=True):
            post(control, 1, data=data)
        for control, rank in itertools.product(control_blocks, range(3)):
            assert payload(memory, control, 3, rank)[:nbytes] == sent[rank]


@pytest.mark.parametrize(
    "data", [np.arange(6.0).reshape(2, 3), np.array(3.5), np.ones(3, "c16"), np.zeros((0, 2))]
)
def test_data_may_be_any_contiguous_array(control_block_type, data):
    memory, (control,) = control_blocks_of(control_block_type, 1)
    post(control, 1, data=data)
    assert payload(memory, control, 1, 0)[: data.nbytes] == data.tobytes()


def test_data_beyond_the_payload_are_refused_and_nothing_is_published(control_block_type):
    memory, (one, two) = control_blocks_of(control_block_type, 2)
    with pytest.raises(ValueError, match="payload"):
        post(one, 1, data=bytes(PAYLOAD + 1))
    assert memory[:] == bytes(control_block_bytes(2))
    assert (post(one, 1), post(two, 1)) == (None, (1, -1, 2, 0, 7, -7))


def test_payloads_and_slots_do_not_overlap():
    for size in (1, 2, 5):
        places = sorted(place for turn in payload_places(size) for place in turn)
        eager = MOST_EAGER * (64 + size * (64 + EAGER_BYTES))
        assert places[0] == 3 * 64 * size + eager
        assert {b - a for a, b in itertools.pairwise([*places, control_block_bytes(size)])} == {
            PAYLOAD
        }


# ---- steps


def test_ranks_wait_for_each_other_step_by_step(control_block_type):
    _, (one, two) = control_blocks_of(control_block_type, 2)
    assert not one.arrive(0)
    assert not one.arrived()
    assert two.arrive(0)
    assert one.arrived()
    assert not two.arrive(0)
    assert one.arrived()
    assert one.arrive(0)


@needs_compiled
def test_a_rank_soon_gives_away_a_core_that_others_need_and_keeps_one_that_nobody_needs():
    _, (waiting, _) = control_blocks_of(compiled.ControlBlock, 2)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                assert any(looks_after_waiting(waiting) == 5 for _ in range(10_000))
            finally:
                busy.kill()
        assert any(looks_after_waiting(waiting) > 5 for _ in range(10_000))
    finally:
        os.sched_setaffinity(0, cores)


def looks_after_waiting(control):
    assert not control.arrive(SPINS)
    return control.looks


def test_a_rank_may_be_several_steps_ahead(control_block_type):
    _, (one, two) = control_blocks_of(control_block_type, 2)
    for _ in range(3):
        assert not one.arrive(0)
    assert [two.arrive(0), two.arrive(0)] == [True, True]
    assert not one.arrived()
    assert two.arrive(0)
    assert one.arrived()


def test_steps_and_operations_are_independent(control_block_type):
    _, (one, two) = control_blocks_of(control_block_type, 2)
    one.arrive(0)
    assert (post(one, 1), post(two, 1)) == (None, (1, -1, 2, 0, 7, -7))
    assert two.arrived()
    assert not one.arrived()


def test_those_behind_are_named(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 4)
    assert control_blocks[0].behind() == []
    post(control_blocks[0], 1)
    assert control_blocks[0].behind() == [1, 2, 3]
    post(control_blocks[2], 1)
    assert control_blocks[0].behind() == [1, 3]
    for control in (control_blocks[1], control_blocks[3]):
        post(control, 1)
    assert control_blocks[0].behind() == []
    control_blocks[0].arrive(0)
    control_blocks[3].arrive(0)
    assert control_blocks[0].behind() == [1, 2]
    assert control_blocks[1].behind() == []


# ---- leaving


def posted_by(control_blocks, ranks):
    for rank in ranks:
        post(control_blocks[rank], rank)


def test_an_operation_that_not_all_have_come_to_is_called_off_for_all(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 3)
    for _ in range(3):  # both turns, and one of them again
        posted_by(control_blocks, [0, 1])
        assert control_blocks[1].called_off_by() == -1
        assert control_blocks[0].call_off(False)
        assert control_blocks[1].called_off_by() == 0
        posted_by(control_blocks, [2])
        assert [each.enter() for each in control_blocks] == [0, 0, 0]
        assert control_blocks[2].call_off(False)  # it is


def test_one_that_a_rank_is_in_is_not(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 3)
    for _ in range(3):
        posted_by(control_blocks, range(3))
        assert control_blocks[2].enter() == -1
        assert not control_blocks[0].call_off(False)
        if control_block_type is not PythonControlBlock:  # where the others would not know
            assert [each.enter() for each in control_blocks] == [-1, -1, -1]


def test_a_death_is_told_with_it(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 3)
    posted_by(control_blocks, [0, 1])
    assert control_blocks[1].call_off(True)
    assert control_blocks[0].called_off_by() == 1 + OF_A_DEATH


def test_what_is_called_off_says_nothing_of_the_next(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 2)
    posted_by(control_blocks, [0])
    assert control_blocks[0].call_off(False)
    posted_by(control_blocks, [1])
    posted_by(control_blocks, range(2))
    assert [each.called_off_by() for each in control_blocks] == [-1, -1]
    assert [each.enter() for each in control_blocks] == [-1, -1]


def test_a_broken_operation_is_one_for_all_and_the_next_is_not(control_block_type):
    _, control_blocks = control_blocks_of(control_block_type, 3)
    posted_by(control_blocks, range(3))
    assert [each.broken_by() for each in control_blocks] == [-1, -1, -1]
    assert control_blocks[0].inside(1) == [0, 1, 2]
    control_blocks[1].arrive(0)
    control_blocks[2].break_off()
    assert control_blocks[0].inside(1) == [0]
    assert control_blocks[0].arrive(0)
    assert [each.broken_by() for each in control_blocks] == [2, 2, 2]
    assert control_blocks[0].inside(2) == [0, 1]
    posted_by(control_blocks, range(3))
    assert [each.broken_by() for each in control_blocks] == [-1, -1, -1]
    assert [each.arrive(0) for each in control_blocks] == [False, False, True]


@needs_compiled
@pytest.mark.parametrize("leaves", [False, True])
def test_who_reduces_in_place_does_not_take_it_for_done_where_another_has_left(leaves):
    _, (here, there) = control_blocks_of(compiled.ControlBlock, 2)
    arrays = np.ones((2, 1000))
    bases, row = tuple(each.ctypes.data for each in arrays), dtype_row(arrays.dtype)
    rule = rule_for(ReduceOp.SUM, row)
    call = Reduction(Kind.ALL_REDUCE, None, arrays[0], row, (1000,), 0, ReduceOp.SUM, rule)

    def reduce(control):
        number = code_of(call).number
        return control.reduce_shared(7, 10**9, 1, bases, number, 1000, 1.0, 0)

    assert reduce(there) == 0  # it is the first to come
    if leaves:
        there.break_off()
    else:
        there.arrive(0)
    assert reduce(here) == (2 if leaves else 3)


# ---- random interleavings


class Model:
    """What boards must answer: all that each rank has published, and its steps."""

    def __init__(self, size):
        self.posted = [[] for _ in range(size)]
        self.steps = [0] * size

    def step(self, rank):
        """Steps are counted from where the operation at hand begins."""
        self.steps[rank] = max(self.steps[rank], len(self.posted[rank]) << STEP_BITS) + 1

    def behind(self, rank):
        count, steps = len(self.posted[rank]), self.steps[rank]
        least = steps if steps > count << STEP_BITS else 0
        ranks = range(len(self.steps))
        return [r for r in ranks if len(self.posted[r]) < count or self.steps[r] < least]

    def may_post(self, rank):
        """A rank goes on only when its last operation is complete."""
        return all(len(others) >= len(self.posted[rank]) for others in self.posted)

    def least(self, rank):
        count = len(self.posted[rank])
        if any(len(others) < count for others in self.posted):
            return None
        rows = [others[count - 1] for others in self.posted]
        return tuple(min(column) for column in zip(*[row[:6] for row in rows], strict=True))


@pytest.mark.parametrize("control_block_type", CONTROL_BLOCKS)
@given(data=st.data(), size=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_interleaving_gives_what_a_list_of_messages_gives(control_block_type, size, data):
    memory, control_blocks = control_blocks_of(control_block_type, size)
    model = Model(size)
    numbers = st.integers(-(1 << 63), (1 << 63) - 1)
    for _ in range(data.draw(st.integers(1, 25))):
        rank = data.draw(st.integers(0, size - 1))
        control = control_blocks[rank]
        if data.draw(st.booleans()):
            model.step(rank)
            assert control.arrive(0) == (min(model.steps) >= model.steps[rank])
        elif model.may_post(rank):
            row = tuple(data.draw(st.tuples(*[numbers] * 7)))
            content = data.draw(st.none() | st.binary(max_size=80))
            model.posted[rank].append((*row, content))
            assert control.post(*row, content, 0) == model.least(rank)
        count = len(model.posted[rank])
        assert control.arrived() == (min(model.steps) >= model.steps[rank])
        if count == 0:
            continue
        assert control.test() == model.least(rank)
        complete = model.least(rank) is not None
        if complete:
            rows = [posted[count - 1] for posted in model.posted]
            assert control.addresses() == tuple(row[6] for row in rows)
            for peer, row in enumerate(rows):
                got = payload(memory, control, size, peer)
                assert row[7] is None or got[: len(row[7])] == row[7]
        assert control.behind() == model.behind(rank)


# ---- which class


def test_the_compiled_board_is_used_where_it_may_be():
    assert control_block_class(use_compiled=True) is (
        PythonControlBlock if compiled is None else compiled.ControlBlock
    )
    assert control_block_class(use_compiled=False) is PythonControlBlock


def test_elsewhere_than_on_x86_python_has_no_board(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert control_block_class(use_compiled=False) is None


@needs_compiled
def test_operations_are_eager_where_ranks_share_cores():
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    for size, most in [(1, 0), (cores, 0), (cores + 1, MOST_EAGER)]:
        memory = bytearray(control_block_bytes(size))
        assert compiled.ControlBlock(memory, 0, size, PAYLOAD).most_eager == most


# ---- the compiled board: wrong arguments


@needs_compiled
@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((bytearray(10), 0, 1, PAYLOAD), ValueError),
        ((bytes(control_block_bytes(1)), 0, 1, PAYLOAD), (BufferError, TypeError)),
        ((bytearray(control_block_bytes(1)), 1, 1, PAYLOAD), ValueError),
        ((bytearray(control_block_bytes(1)), -1, 1, PAYLOAD), ValueError),
        ((bytearray(control_block_bytes(1)), 0, 0, PAYLOAD), ValueError),
        ((bytearray(control_block_bytes(1)), 0, 1, -1), ValueError),
        ((None, 0, 1, PAYLOAD), TypeError),
        ((bytearray(control_block_bytes(1)), 0, 1), TypeError),
    ],
)
def test_boards_that_cannot_be_are_refused(args, error):
    with pytest.raises(error):
        compiled.ControlBlock(*args)


@needs_compiled
def test_wrong_calls_of_a_board_are_errors_and_leave_it_as_it_was():
    memory, (one, two) = control_blocks_of(compiled.ControlBlock, 2)
    four = np.ones(4, "f4")
    for method, args, error in [
        (one.post, (1, 2, 3), TypeError),
        (one.post, (*[1 << 70] * 6, 0, None, 0), OverflowError),
        (one.post, (*[1] * 6, 0, "text", 0), TypeError),
        (one.post, (*[1] * 6, 0, np.ones((4, 4))[:, 1], 0), (BufferError, ValueError)),
        (one.arrive, ("x",), TypeError),
        (one.go_on, (1,), RuntimeError),
        (one.go_on, ("x",), TypeError),
        (one.reduce, (1, 1), TypeError),
        (one.reduce, (1, 10**9, four, four, 0, 10_000, 4, 1.0, 0), ValueError),
        (one.reduce, (1, 10**9, four, four, 0, 0, 5, 1.0, 0), ValueError),
        (one.reduce, (1, 10**9, four, four, 1, 0, 4, 1.0, 0), ValueError),
        (one.reduce, (1, 10**9, four, four, 0, 0, 3, 1.0, 0), ValueError),
        (one.reduce, (1, 10**9, None, four, 0, 0, 4, 1.0, 0), ValueError),
        (one.reduce, (1, 10**9, four, bytes(16), 0, 0, 4, 1.0, 0), (BufferError, TypeError)),
        (one.move, (1, 1), TypeError),
        (one.move, (1, 1, 10**9, None, four, -1, 0, 16, 0), ValueError),
        (one.move, (1, 1, 10**9, None, four, 2, 0, 16, 0), ValueError),
        (one.move, (1, 1, 10**9, None, None, -1, PAYLOAD, 1, 0), ValueError),
        (one.move, (1, 1, 10**9, bytes(PAYLOAD + 1), None, -1, 0, 0, 0), ValueError),
        (one.move, (1, 1, 10**9, None, bytes(16), 0, 0, 16, 0), (BufferError, TypeError)),
        (one.begin, (0, 0, 0, 0, (1,), 64, 1, 0, 1.0), ValueError),
        (one.begin, (0, 0, 0, 0, (1, 1), 63, 1, 0, 1.0), ValueError),
        (one.begin, (0, 0, 0, 0, (1, 1), 64, -1, 0, 1.0), ValueError),
        (one.begin, (-1, 0, 0, 0, (1, 1), 64, 1, 0, 1.0), ValueError),
        (one.begin, (0, 0, 0, 0, [1, 1], 64, 1, 0, 1.0), ValueError),
        (one.begin, (0, 0, 0), TypeError),
        (one.go_on, (1,), RuntimeError),
    ]:
        with pytest.raises(error):
            method(*args)
    assert memory[:] == bytes(control_block_bytes(2))
    assert (post(one, 1), post(two, 1)) == (None, (1, -1, 2, 0, 7, -7))


# ---- the compiled board: small operations in one call

LIMIT_NS = 60 * 10**9


def reduce_small(control, number, data, limit_ns=LIMIT_NS):
    code = compiled.CODES["add_float32"]
    return control.reduce(number, limit_ns, data, data, 0, code, data.size, 1.0, 0)


@needs_compiled
def test_the_last_rank_reduces_at_once_and_the_others_find_all_data():
    memory, (one, two) = control_blocks_of(compiled.ControlBlock, 2)
    for operation in range(1, 4):
        x, y = np.full(3, 1, "f4"), np.full(3, operation, "f4")
        assert not reduce_small(one, 77, x)
        assert x.tolist() == [1] * 3
        assert reduce_small(two, 77, y)
        assert y.tolist() == [1 + operation] * 3
        assert one.test()[:4] == (77, -77, 0, 0)
        assert payload(memory, one, 2, 1)[:12] == np.full(3, operation, "f4").tobytes()


@needs_compiled
def test_ranks_that_mean_different_operations_leave_their_data_alone():
    _, (one, two) = control_blocks_of(compiled.ControlBlock, 2)
    x, y = np.full(3, 1, "f4"), np.full(3, 2, "f4")
    assert not reduce_small(one, 77, x)
    assert not reduce_small(two, 78, y)
    assert y.tolist() == [2] * 3
    number, opposite, *_ = one.test()
    assert number != -opposite


@needs_compiled
def test_a_rank_that_comes_after_the_time_limit_leaves_its_data_alone():
    _, (one, two) = control_blocks_of(compiled.ControlBlock, 2)
    x, y = np.full(3, 1, "f4"), np.full(3, 2, "f4")
    assert not reduce_small(one, 77, x, limit_ns=-1)
    assert not reduce_small(two, 77, y)
    assert y.tolist() == [2] * 3
    *_, deadline, arrival = two.test()
    assert -arrival > deadline


@needs_compiled
def test_small_data_are_moved_in_one_step_once_all_have_posted_theirs():
    _, control_blocks = control_blocks_of(compiled.ControlBlock, 3)
    given = [np.arange(6, dtype="u1") + 10 * rank for rank in range(3)]
    gathered, chosen = np.zeros(6, "u1"), np.zeros(2, "u1")
    assert not control_blocks[0].move(7, LIMIT_NS, 1, given[0], None, -1, 0, 2, 0)
    assert not control_blocks[1].move(7, LIMIT_NS, 1, given[1], None, -1, 0, 2, 0)
    assert control_blocks[2].move(7, LIMIT_NS, 1, given[2], gathered, -1, 4, 2, 0)
    assert gathered.tolist() == [4, 5, 14, 15, 24, 25]
    for control in control_blocks[:2]:
        control.move(8, LIMIT_NS, 1, given[0], None, 0, 0, 0, 0)
    assert control_blocks[2].move(8, LIMIT_NS, 1, None, chosen, 1, 3, 2, 0)
    assert chosen.tolist() == [3, 4]


@needs_compiled
@pytest.mark.parametrize(("number", "detail"), [(8, 1), (7, 2)])
def test_nothing_is_moved_where_ranks_mean_different_operations(number, detail):
    _, (one, two) = control_blocks_of(compiled.ControlBlock, 2)
    out = np.zeros(2, "u1")
    one.move(7, LIMIT_NS, 1, np.ones(1, "u1"), None, -1, 0, 1, 0)
    assert not two.move(number, LIMIT_NS, detail, np.ones(1, "u1"), out, -1, 0, 1, 0)
    assert out.tolist() == [0, 0]
    assert two.test()[:4] == (7, -number, 1, -detail)


@needs_compiled
def test_nothing_is_moved_once_a_deadline_is_over():
    _, (late, patient) = control_blocks_of(compiled.ControlBlock, 2)
    late.move(7, -1, 1, np.ones(1, "u1"), None, -1, 0, 1, 0)
    out = np.zeros(2, "u1")
    assert not patient.move(7, LIMIT_NS, 1, np.ones(1, "u1"), out, -1, 0, 1, 0)
    assert out.tolist() == [0, 0]


@needs_compiled
def test_a_rank_takes_its_slice_of_a_small_reduction_or_nothing():
    _, control_blocks = control_blocks_of(compiled.ControlBlock, 3)
    code = compiled.CODES["add_float64"]
    given = [np.arange(6.0) + rank for rank in range(3)]
    control_blocks[0].reduce(1, LIMIT_NS, given[0], None, 0, code, 6, 1.0, 0)
    control_blocks[1].reduce(1, LIMIT_NS, given[1], None, 0, code, 6, 1.0, 0)
    out = np.zeros(2)
    assert control_blocks[2].reduce(1, LIMIT_NS, given[2], out, 4, code, 2, 1.0, 0)
    assert out.tolist() == [15, 18]


# ---- the compiled board: reductions in parts


class Pipe(NamedTuple):
    """A reduction of arrays of some ranks; `slice_items` are a rank's share of a part."""

    kind: Kind
    op: ReduceOp
    dtype: str
    inputs: list
    slice_items: int = 64
    root: int = 0

    @property
    def call(self):
        row = dtype_row(self.inputs[0].dtype)
        data, rule = self.inputs[0], rule_for(self.op, row)
        return Reduction(self.kind, None, data, row, data.shape, 0, self.op, rule)


def inputs_of(name, size, length, seed=0):
    """Return an array per rank of any numbers."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return [random.integers(limits.min, limits.max, length, dtype) for _ in range(size)]
    numbers = random.normal(size=(2, size, length)) * 100
    if dtype.kind == "c":
        return list((numbers[0] + 1j * numbers[1]).astype(dtype))
    return list(numbers[0].astype(dtype))


def memory_of(array):
    return carried(array, dtype_row(array.dtype)).reshape(-1)


def begin_all(pipe, control_blocks, stages):
    """Begin on all ranks and return, per rank, what it contributes and what it gets."""
    code, size = code_of(pipe.call), len(control_blocks)
    scatters = pipe.kind is Kind.REDUCE_SCATTER
    addresses = tuple(stage.ctypes.data for stage in stages)
    started = []
    for rank, control in enumerate(control_blocks):
        send = memory_of(pipe.inputs[rank].copy())
        length = send.size // size if scatters else send.size
        if scatters:
            out = np.zeros(length, send.dtype)
        else:
            out = send if pipe.kind is Kind.ALL_REDUCE or rank == pipe.root else 0
        control.begin(
            code.number,
            send,
            out,
            0 if scatters else out,
            addresses,
            pipe.slice_items,
            length * code.per_item,
            length * code.per_item if scatters else 0,
            divisor_of(pipe.call, size),
        )
        started.append((send, out))
    return started


def expected_of(pipe):
    """Return what NumPy says of the whole arrays."""
    sources = [memory_of(each) for each in pipe.inputs]
    out = np.empty_like(sources[0])
    kernel.combine(pipe.call.rule, sources, [out], len(sources))
    return out


def drive(control_blocks, order):
    """Let ranks go on in this order again and again, until all have ended; return the turns."""
    left, turns = set(range(len(control_blocks))), 0
    for rank in itertools.cycle(order):
        if rank in left and control_blocks[rank].go_on(1):
            left.remove(rank)
        turns += 1
        if not left:
            return turns
        assert turns < 100_000
    return turns


def run_pipes(pipes, size, order=None):
    """Run reductions one after the other on the same boards and staging memory, and check."""
    _, control_blocks = control_blocks_of(compiled.ControlBlock, size)
    slice_bytes = max(pipe.slice_items * pipe.inputs[0].itemsize for pipe in pipes)
    room = np.full((size, 2 * (size + 1) * slice_bytes + 64), 0xA5, np.uint8)
    stages = [row[-row.ctypes.data % 64 :] for row in room]
    for pipe in pipes:
        started = begin_all(pipe, control_blocks, stages)
        drive(control_blocks, order or range(size))
        check_pipe(pipe, started)


def check_pipe(pipe, started):
    expected, size = expected_of(pipe), len(started)
    for rank, (send, out) in enumerate(started):
        untouched = memory_of(pipe.inputs[rank]).tobytes()
        if pipe.kind is Kind.REDUCE_SCATTER:
            share = expected.size // size
            assert out.tobytes() == expected[rank * share : (rank + 1) * share].tobytes()
            assert send.tobytes() == untouched
        elif pipe.kind is Kind.ALL_REDUCE or rank == pipe.root:
            assert send.tobytes() == expected.tobytes()
        else:
            assert send.tobytes() == untouched


PIPED = [
    (ReduceOp.SUM, "float32"),
    (ReduceOp.MAX, "float32"),
    (ReduceOp.SUM, "float16"),
    (ReduceOp.AVG, "float16"),
    (ReduceOp.AVG, "bfloat16"),
    (ReduceOp.PROD, "bfloat16"),
    (ReduceOp.MIN, "float64"),
    (ReduceOp.SUM, "complex64"),
    (ReduceOp.SUM, "int8"),
    (ReduceOp.PROD, "uint64"),
]
KINDS = [Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER]


@needs_compiled
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "name"), PIPED)
def test_arrays_are_reduced_in_parts_as_numpy_reduces_them_whole(op, name, kind, size):
    unit = size if kind is Kind.REDUCE_SCATTER else 1
    pipes = [
        Pipe(kind, op, name, inputs_of(name, size, unit * length, length), root=length % size)
        for length in (1, 63, 64, 65, 64 * size, 64 * size + 1, 1000, 2048, 3333)
    ]
    if code_of(pipes[0].call) is None:
        pytest.skip(f"{op.name} of {name} is not compiled")
    run_pipes(pipes, size)


@needs_compiled
@given(data=st.data(), size=st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_ranks_may_go_on_in_any_order(size, data):
    pipes = []
    for seed in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(KINDS))
        op, name = data.draw(st.sampled_from([pair for pair in PIPED if pair[1] != "float16"]))
        unit = size if kind is Kind.REDUCE_SCATTER else 1
        length = unit * data.draw(st.integers(0, 2500))
        slice_items = data.draw(st.sampled_from([64, 100, 128, 640]))
        root = data.draw(st.integers(0, size - 1))
        pipes.append(Pipe(kind, op, name, inputs_of(name, size, length, seed), slice_items, root))
    order = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    run_pipes(pipes, size, [*order, *range(size)])


@needs_compiled
def test_no_rank_ends_while_another_has_not_begun_to_go_on():
    pipe = Pipe(Kind.ALL_REDUCE, ReduceOp.SUM, "float32", inputs_of("float32", 3, 1000))
    _, control_blocks = control_blocks_of(compiled.ControlBlock, 3)
    stages = [aligned(2 * 4 * 64 * 4) for _ in range(3)]
    started = begin_all(pipe, control_blocks, stages)
    for _ in range(20):
        assert not control_blocks[0].go_on(1)
        assert not control_blocks[1].go_on(1)
    assert control_blocks[0].behind() == [2]
    drive(control_blocks, range(3))
    check_pipe(pipe, started)
    assert len(stages) == 3  # alive until here: boards know their addresses only


def aligned(nbytes):
    room = np.zeros(nbytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:nbytes]


@needs_compiled
def test_steps_before_and_after_a_reduction_are_counted_on():
    _, control_blocks = control_blocks_of(compiled.ControlBlock, 2)
    stages = [aligned(2 * 3 * 64 * 4) for _ in range(2)]
    for length in (300, 1, 129):
        assert [control.arrive(0) for control in control_blocks] == [False, True]
        pipe = Pipe(Kind.ALL_REDUCE, ReduceOp.SUM, "float32", inputs_of("float32", 2, length))
        started = begin_all(pipe, control_blocks, stages)
        drive(control_blocks, [1, 0])
        check_pipe(pipe, started)
        assert [control.arrive(0) for control in control_blocks] == [False, True]
        assert [control.behind() for control in control_blocks] == [[], []]


# ---- many ranks


@needs_compiled
@pytest.mark.parametrize(("size", "loops"), [(256, True), (257, False)])
def test_a_node_with_more_ranks_than_the_loops_take_is_reduced_by_numpy(size, loops):
    memory = mmap.mmap(-1, node_bytes(size))
    node = SharedNode(
        memory,
        compiled.ControlBlock,
        [],
        Heap(1 << 20),
        [0] * size,
        0,
        range(size),
        1.0,
        lambda: None,
        Deaths(),
    )
    assert node.can_pipeline == loops
