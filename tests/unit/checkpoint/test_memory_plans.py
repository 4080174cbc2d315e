"""Checkpoints in memory, planned: who keeps what, which step is whole, and what travels."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import hpcdist as dist
from hpcdist.checkpoint.boxes import Box, run, whole
from hpcdist.checkpoint.memory.buddies import plan_buddies
from hpcdist.checkpoint.memory.choice import Choice, Nothing, choose
from hpcdist.checkpoint.memory.keeping import plan_keeping
from hpcdist.checkpoint.memory.moves import Wish, plan_moves
from hpcdist.checkpoint.memory.random_state import plan_streams
from hpcdist.checkpoint.memory.vault import Catalog, Header
from hpcdist.checkpoint.plan import Array, Held

F8 = "float64"

# ---- buddies


@pytest.mark.parametrize(
    ("nodes", "copies", "buddies"),
    [
        ([0], 1, [()]),
        ([0, 0, 0], 0, [(), (), ()]),
        ([0, 0, 0], 1, [(1,), (2,), (0,)]),
        ([0, 0, 1, 1], 1, [(2,), (3,), (0,), (1,)]),
        ([0, 1, 0, 1], 1, [(1,), (0,), (3,), (2,)]),
        ([0, 0, 1, 1, 2, 2], 2, [(2, 4), (3, 5), (4, 0), (5, 1), (0, 2), (1, 3)]),
        ([0, 0], 5, [(1,), (0,)]),
    ],
)
def test_a_buddy_is_on_another_node_where_there_is_one(nodes, copies, buddies):
    assert plan_buddies(nodes, copies) == buddies


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 3))
def test_no_rank_keeps_two_copies_of_one_part_and_no_node_while_there_are_others(nodes, copies):
    for rank, chosen in enumerate(plan_buddies(nodes, copies)):
        places = [rank, *chosen]
        assert len({*places}) == len(places) == min(copies, len(nodes) - 1) + 1
        spread = len({nodes[each] for each in places})
        assert spread == min(len({*nodes}), len(places))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_on_equal_nodes_all_ranks_keep_as_many_copies(nodes, ranks, copies):
    chosen = plan_buddies([node for node in range(nodes) for _ in range(ranks)], copies)
    loads = [sum(each.count(rank) for each in chosen) for rank in range(nodes * ranks)]
    assert len({*loads}) == 1


# ---- who keeps what


def held(name, start, stop, size=100):
    return Held(name, F8, (size,), run(start, stop))


def elements(kept):
    return sorted(
        each for part in kept for each in range(part.share.box.offsets[0], part.share.box.ends[0])
    )


def test_of_what_all_ranks_have_nothing_is_sent():
    plans = plan_keeping([[held("w", 0, 100)]] * 3, range(3), plan_buddies([0] * 3, 1))
    assert all(not copied.sent for plan in plans for copied in plan.copies)
    kept = [part for plan in plans for part in plan.own]
    copies = [part for plan in plans for copied in plan.copies for part in copied.here]
    assert elements(kept) == elements(copies) == [*range(100)]


def test_what_one_rank_alone_has_is_sent_to_its_buddy():
    everyone = [[held("w", 0, 50)], [held("w", 50, 100)]]
    first, second = plan_keeping(everyone, range(2), plan_buddies([0, 1], 1))
    assert [each.nbytes for each in first.sendings] == [50 * 8]
    assert elements(second.copies[0].sent) == [*range(50)]
    assert elements(first.own) == [*range(50)]


def test_what_a_buddy_lacks_stands_first():
    everyone = [
        [held("a", 0, 100), held("b", 0, 50)],
        [held("a", 0, 100), held("b", 50, 100)],
    ]
    for plan in plan_keeping(everyone, range(2), plan_buddies([0, 0], 1)):
        (sending,) = plan.sendings
        assert sending.nbytes == 50 * 8
        assert plan.own[0].share.name == "b"


def test_on_unequal_nodes_a_rank_may_keep_copies_of_several():
    everyone = [[held("w", 0, 30)], [held("w", 30, 60)], [held("w", 60, 100)]]
    plans = plan_keeping(everyone, range(3), plan_buddies([0, 0, 1], 1))
    assert [[copied.owner for copied in plan.copies] for plan in plans] == [[2], [], [0, 1]]
    assert [len(plan.sendings) for plan in plans] == [1, 1, 1]


def test_ranks_that_differ_about_an_array_are_refused():
    everyone = [[held("a", 0, 100)], [held("a", 0, 90, 90)]]
    with pytest.raises(dist.MismatchError, match="different arrays 'a'"):
        plan_keeping(everyone, range(2), plan_buddies([0, 0], 1))


# ---- which step is whole

NODE = {"dict": [["w", {"array": "w"}]]}


def header():
    return Header(NODE, {"dict": []})


def catalog(serial, rank, owners, *boxes, size=2, run=0):
    return Catalog(run, serial, 10 * serial, size, rank, {each: header() for each in owners}, boxes)


def both(serial, rank):
    """Return what rank `rank` of two keeps: its own half and the other's."""
    return catalog(serial, rank, (0, 1), held("w", 0, 50), held("w", 50, 100))


def test_all_go_back_to_the_latest_step_that_is_whole():
    found = choose([[both(1, 0), both(2, 0)], [both(1, 1), both(2, 1)]])
    assert isinstance(found, Choice)
    assert (found.step, found.is_full) == (20, True)
    assert found.stored["w"][run(0, 50)] == (0, 1)


def test_one_rank_with_its_buddys_copies_is_enough():
    found = choose([[both(3, 1)]])
    assert (found.step, found.is_full) == (30, False)


def test_a_step_that_only_some_have_committed_counts_if_all_of_it_is_there():
    assert choose([[both(1, 0), both(2, 0)], [both(1, 1)]]).step == 20
    half = catalog(2, 0, (0,), held("w", 0, 50))
    assert choose([[both(1, 0), half], [both(1, 1)]]).step == 10


def test_what_was_committed_for_an_earlier_training_does_not_count():
    old = both(7, 0)._replace(run=0)
    assert choose([[old], [both(2, 1)._replace(run=1)]]).step == 20


def test_a_part_that_died_with_its_copies_is_told():
    found = choose([[catalog(1, 0, (0,), held("w", 0, 50))]])
    assert found == Nothing(
        "step 10 is not complete: what rank(s) 1 of 2 kept is gone, and so are the copies", True
    )
    found = choose([[catalog(1, 0, (0, 1), held("w", 0, 50))]])
    assert found == Nothing(
        "step 10 is not complete: parts of 'w' are gone, and their copies", True
    )


def test_before_the_first_commit_there_is_nothing():
    assert choose([[], []]) == Nothing("nothing has been committed", was_there=False)


@pytest.mark.parametrize(
    ("before", "size", "streams"),
    [
        ([0, 1, 2], 3, [0, 1, 2]),
        ([0, 2], 3, [0, 2]),
        ([0, -1, 2], 3, [0, 1, 2]),
        ([1, -1, -1], 2, [1, 0, None]),
    ],
)
def test_who_is_new_takes_the_random_numbers_of_a_rank_that_is_gone(before, size, streams):
    assert plan_streams(before, size) == streams


# ---- what travels

SHAPE = (6, 7)


@st.composite
def divisions(draw):
    """Return boxes that are all of an array of `SHAPE`: runs, rows or columns."""
    kind = draw(st.sampled_from(["runs", "rows", "columns"]))
    extent = {"runs": 42, "rows": 6, "columns": 7}[kind]
    cuts = sorted({0, extent, *draw(st.lists(st.integers(1, extent - 1), max_size=4))})
    pairs = [*pairwise(cuts)]
    if kind == "runs":
        return [run(start, stop) for start, stop in pairs]
    if kind == "rows":
        return [Box((start, 0), (stop - start, 7)) for start, stop in pairs]
    return [Box((0, start), (6, stop - start)) for start, stop in pairs]


def indices(box):
    """Return the elements of a box in its own order."""
    numbers = np.arange(42).reshape(SHAPE)
    if box.is_run:
        return numbers.reshape(-1)[box.offsets[0] : box.ends[0]].tolist()
    return numbers[box.offsets[0] : box.ends[0], box.offsets[1] : box.ends[1]].reshape(-1).tolist()


def addresses(lengths, start, strides):
    """Return which elements of a memory a copy touches, in order."""
    grid = np.indices(lengths).reshape(len(lengths), -1)
    return (start + np.tensordot(strides, grid, 1)).tolist()


@settings(max_examples=60)
@given(divisions(), st.lists(divisions(), min_size=1, max_size=4), st.data())
def test_every_rank_gets_each_element_that_it_wants_once(parts, wanted, data):
    size = len(wanted)
    holders = st.lists(st.integers(0, size - 1), min_size=1, max_size=2, unique=True)
    stored = {"w": {box: tuple(data.draw(holders)) for box in parts}}
    wishes = [[Wish("w", box) for box in boxes] for boxes in wanted]
    plans = plan_moves(stored, wishes, {"w": Array(F8, SHAPE)}, [0] * size, limit=64)
    for rank, plan in enumerate(plans):
        got = [[None] * box.size for _, box in wishes[rank]]
        for move in (*plan.here, *plan.received):
            assert rank == move.target
            assert move.source in stored["w"][move.box]
            copy, kept = move.copy, indices(move.box)
            sources = addresses(copy.lengths, copy.source, copy.source_strides)
            targets = addresses(copy.lengths, copy.target, copy.target_strides)
            for source, target in zip(sources, targets, strict=True):
                assert got[move.wish][target] is None
                got[move.wish][target] = kept[source]
        assert got == [indices(box) for _, box in wishes[rank]]
    sent = [move for plan in plans for move in plan.sent]
    assert sorted(sent) == sorted(move for plan in plans for move in plan.received)


def test_no_rank_sends_or_gets_more_in_a_round_than_there_is_room_for():
    stored = {f"w{number}": {whole((10,)): (number % 2,)} for number in range(20)}
    arrays = {name: Array(F8, (10,)) for name in stored}
    wishes = [[Wish(name, whole((10,))) for name in stored]] * 3
    plans = plan_moves(stored, wishes, arrays, [0] * 3, limit=200)
    for plan in plans:
        for moves in (plan.sent, plan.received):
            for number in range(plan.rounds):
                assert sum(each.nbytes for each in moves if each.round == number) <= 200


def test_a_part_comes_from_the_same_node_and_from_who_has_sent_least():
    stored = {"a": {run(0, 10): (0, 1, 2)}, "b": {run(0, 10): (0, 1)}}
    arrays = {name: Array(F8, (10,)) for name in stored}
    wishes = [[], [], [], [Wish("a", run(0, 10)), Wish("b", run(0, 10))]]
    plans = plan_moves(stored, wishes, arrays, [0, 0, 1, 1])
    assert [(move.name, move.source) for move in plans[3].received] == [("a", 2), ("b", 0)]
    plans = plan_moves(stored, wishes, arrays, [0] * 4)
    assert [move.source for move in plans[3].received] == [0, 1]
