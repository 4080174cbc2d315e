"""Who waits for whom, computed from recordings that are made up here."""

from __future__ import annotations

import pytest

from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight import layout
from hpcdist.transport.flight.analysis import Subject, explain
from hpcdist.transport.flight.recording import GroupKey, Record, Recording, Waiting

S = 10**9
NOW = 100 * S
WORLD = GroupKey(1, 0, "world", (0, 1, 2, 3))
PAIR = GroupKey(1, 0, "pair", (0, 1))


def op(
    kind, sequence=0, group=WORLD, *, begin=90, end=None, peer=None, line=1, started=False, tag=0
):
    """Return a record; times are seconds, `end` None is under way."""
    return Record(
        number=line,
        name=layout.NAMES[kind],
        group=group,
        sequence=sequence,
        nbytes=8,
        peer=peer,
        site=f"a.py:{line}",
        begin_ns=begin * S,
        end_ns=0 if end is None else end * S,
        failed=False,
        started=started,
        kind=kind,
        dtype=0,
        digest=tag,
    )


def rank(number, *records, wait=None, condition="running", ended=None):
    latest = {}
    for record in records:
        if record.group is not None:
            latest[record.group] = max(latest.get(record.group, 0), record.sequence)
    about = {} if ended is None else {"ended": ended}
    waits = [] if wait is None else [Waiting(*wait, 95 * S)]
    recording = Recording(number + 100, 1, number, 4, about, records, waits, latest, {})
    return Subject(recording, condition)


def explained(*subjects, size=None, here=()):
    size = len(subjects) if size is None else size
    return explain(subjects, size, NOW, here or range(size))


def done(sequence=1, line=1):
    return op(Kind.ALL_REDUCE, sequence, end=91, line=line)


def test_the_rank_that_has_not_come_is_named_with_its_last_line():
    inside = op(Kind.BROADCAST, 2, peer=0, line=11)
    found = explained(
        rank(0, done(), inside),
        rank(1, done(), inside),
        rank(2, done(line=7)),
        rank(3, done(), inside),
    )
    assert found.causes == [2]
    assert found.lines[2] == (
        "rank 2: outside of hpcdist for 9.0 s; its last call was all_reduce #1 (8 B, group 0) "
        "at a.py:7"
    )
    assert found.verdict[0] == (
        "ranks 0-1,3 wait for rank 2, which has not come to broadcast #2 (8 B, root rank 0, "
        "group 0) at a.py:11"
    )
    assert found.verdict[1].startswith("rank 2 is outside of hpcdist for 9.0 s; its last call")


def test_several_ranks_that_have_not_come_are_named_together():
    inside = op(Kind.BARRIER, 2, line=5)
    found = explained(rank(0, done()), rank(1, done(), inside), rank(2, done()), rank(3, done()))
    assert found.causes == [0, 2, 3]
    assert found.verdict[0].startswith(
        "rank 1 waits for ranks 0,2-3, which have not come to barrier"
    )


def test_a_rank_that_went_by_the_operation_is_not_waited_for():
    """Rank 1 is further: of the two that wait, the one behind is the cause."""
    found = explained(
        rank(0, op(Kind.BARRIER, 2, PAIR)),
        rank(1, op(Kind.BARRIER, 3, PAIR)),
    )
    assert found.causes == [0]
    assert "rank 1 waits for rank 0, which has not come to barrier #3" in found.verdict[0]


def test_ranks_that_are_in_other_operations_of_one_number_are_told_apart():
    found = explained(
        rank(0, op(Kind.BARRIER, 2, line=3)), rank(1, op(Kind.SCAN, 2, line=4)), size=2
    )
    assert found.verdict[0] == (
        "the ranks are in different operations of the same number: rank 0 in barrier #2 (8 B, "
        "group 0) at a.py:3; rank 1 in scan #2 (8 B, group 0) at a.py:4"
    )


def test_two_groups_that_are_used_in_another_order_are_a_circle():
    one, two = GroupKey(1, 1, "one", (0, 1)), GroupKey(1, 2, "two", (0, 1))
    found = explained(
        rank(0, op(Kind.ALL_REDUCE, 1, one, line=5)), rank(1, op(Kind.ALL_REDUCE, 1, two, line=8))
    )
    assert found.causes == [0, 1]
    assert "ranks 0-1 wait for each other in a circle: none of them will go on" in found.verdict


def test_three_ranks_that_receive_from_each_other_are_a_circle():
    found = explained(*(rank(each, op(Kind.RECV, peer=(each + 1) % 3)) for each in range(3)))
    assert found.causes == [0, 1, 2]
    assert any("in a circle" in line for line in found.verdict)


def test_who_waits_for_a_circle_is_no_part_of_it():
    found = explained(
        rank(0, op(Kind.RECV, peer=1)),
        rank(1, op(Kind.RECV, peer=0)),
        rank(2, op(Kind.RECV, peer=0)),
    )
    assert found.causes == [0, 1]


def test_a_receive_waits_for_its_sender():
    found = explained(rank(0, done(line=4)), rank(1, op(Kind.RECV, peer=0, line=9)))
    assert found.causes == [0]
    assert found.verdict[0] == (
        "rank 1 waits for rank 0, whose message recv (8 B, from rank 0, tag 0, group 0) at a.py:9 "
        "is to take"
    )


def dead(number, *records, at=None, why="", of=()):
    ended = None if at is None else {"at": at, "why": why, "dead": list(of)}
    return rank(number, *records, condition="dead", ended=ended)


def test_of_several_dead_ranks_the_first_is_named_as_far_as_anything_tells():
    group = GroupKey(1, 0, "three", (0, 1, 2))
    inside, outside = op(Kind.BARRIER, 2, group, line=5), op(Kind.BARRIER, 1, group, end=91)

    def first(*subjects):
        found = explained(*subjects)
        return found.verdict[0] if "first" in found.verdict[0] else None, found.causes

    heard = {"at": 7.0, "why": "RankFailure: rank 1 died", "of": [1]}
    assert first(dead(0, outside, inside), dead(1, outside), dead(2, outside, **heard)) == (
        "rank 1 died first: rank 2 heard of it",
        [1],
    )
    raised = dead(1, outside, at=8.0, why="KeyError: 'x'")
    assert first(dead(0, outside, inside), raised, dead(2, outside, **heard)) == (
        "rank 1 died first, of KeyError: 'x'",
        [1],
    )
    later = dead(2, outside, at=8.5, why="OSError")
    assert first(dead(0, outside), raised, later) == ("rank 1 died first, of KeyError: 'x'", [1])
    assert first(dead(0, outside, inside), dead(1, outside), dead(2, outside, inside)) == (
        "rank 1 died first, most likely: others were waiting for it",
        [1],
    )
    assert first(dead(0, outside, inside), dead(1, outside), dead(2, outside)) == (None, [1, 2])
    assert first(dead(0, outside, inside), dead(1, outside)) == (None, [1, 2])
    assert first(rank(0, outside, inside), dead(1, outside), rank(2, outside, inside)) == (
        None,
        [1],
    )


def test_a_dead_rank_tells_the_exception_that_ended_it():
    found = explained(dead(0, done(line=3), at=1.0, why="KeyError: 'x'"), size=1)
    assert found.lines[0].startswith("rank 0: dead, of KeyError: 'x', outside of hpcdist")


def test_what_a_sender_has_sent_instead_is_told():
    def sent(tag, line, kind=Kind.SEND, to=1):
        return op(kind, peer=to, end=91, line=line, tag=tag)

    def taken(tag, line, source=0):
        return op(Kind.RECV, peer=source, end=92, line=line, tag=tag)

    waits = op(Kind.RECV, peer=0, line=9, tag=7)

    def told(sender, *receiver):
        return explained(rank(0, *sender), rank(1, *receiver, waits), size=2).verdict[0]

    others = [sent(7, 3, to=2), sent(7, 4, Kind.SEND_OBJECT_LIST), sent(5, 5)]
    assert told(others).endswith(
        "recv (8 B, from rank 0, tag 7, group 0) at a.py:9 is to take; it has sent, and rank 1 not "
        "taken, send_object_list (8 B, to rank 1, tag 7, group 0) at a.py:4, "
        "send (8 B, to rank 1, tag 5, group 0) at a.py:5"
    )
    assert told(others[2:], taken(5, 1)).endswith("is to take")
    assert told(others[2:], taken(5, 1, source=None)).endswith("is to take")
    assert told([*others[2:]] * 6, taken(5, 1)).endswith("at a.py:5 and 2 more")
    assert told(others[2:], taken(5, 1)._replace(end_ns=0)).endswith("at a.py:5")
    assert told([], taken(5, 1)).endswith("is to take")
    later = taken(4, 2)._replace(begin_ns=91 * S)  # the receives before are no longer recorded
    assert told(others[2:], later).endswith("is to take")


def test_a_receive_from_any_rank_accuses_nobody():
    found = explained(rank(0, done()), rank(1, op(Kind.RECV, peer=None)), size=2)
    assert found.causes == []
    assert found.lines[1].startswith("rank 1: in recv")


def test_a_chain_leads_to_the_rank_at_its_end():
    found = explained(
        rank(0, op(Kind.RECV, peer=1)),
        rank(1, op(Kind.SEND, peer=2)),
        rank(2, op(Kind.BARRIER, 5)),
        rank(3, op(Kind.ALL_REDUCE, 4, end=92)),
    )
    assert found.causes == [3]


def test_a_call_of_a_function_waits_for_the_rank_that_runs_it():
    call = op(layout.RPC, peer=1, line=6, started=True)
    found = explained(rank(0, call, wait=("f on rank 1", "a.py:7")), rank(1, done()), size=2)
    assert found.causes == [1]
    assert (
        found.lines[0]
        == "rank 0: in rpc (8 B, on rank 1) at a.py:6 for 10.0 s, waited for at a.py:7"
    )


def test_a_rank_in_another_operation_that_waits_for_a_function_is_not_the_cause():
    call = op(layout.RPC, peer=2, started=True)
    found = explained(
        rank(0, op(Kind.BARRIER, 2)),
        rank(1, op(Kind.BARRIER, 2)),
        rank(2, done()),
        rank(3, done(), call, wait=("f on rank 2", "a.py:7")),
    )
    assert found.causes == [2]


@pytest.mark.parametrize(
    ("condition", "words"),
    [("dead", "rank 1 is dead"), ("stopped", "rank 1 is stopped by a signal")],
)
def test_a_rank_whose_process_cannot_go_on_is_the_cause_wherever_it_is(condition, words):
    found = explained(
        rank(0, op(Kind.BARRIER, 2, PAIR)),
        rank(1, op(Kind.RECV, group=PAIR, peer=0), condition=condition),
        size=2,
    )
    assert found.causes == [1]
    assert any(line.startswith(words) for line in found.verdict)


def test_a_rank_without_a_recording_has_ended_where_its_node_was_looked_at():
    inside = op(Kind.BARRIER, 2, GroupKey(1, 0, "world", (0, 1)))
    for here, words in (([0, 1], "rank 1 has ended"), ([0], "rank 1 is on a node")):
        found = explained(rank(0, inside), size=2, here=here)
        assert found.causes == [1]
        assert found.verdict[-1].startswith(words)


def test_an_operation_beside_a_computation_leaves_its_rank_outside():
    beside = op(Kind.ALL_REDUCE, 2, line=3, started=True)
    found = explained(rank(0, done(), beside), rank(1, done(line=8)), size=2)
    assert "outside of hpcdist" in found.lines[0]
    assert "under way: all_reduce #2" in found.lines[0]
    assert 1 in found.causes


def test_the_wait_for_an_asynchronous_operation_has_its_own_line():
    beside = op(Kind.ALL_REDUCE, 2, PAIR, line=3, started=True)
    wait = "all_reduce(shape (1,), float64, SUM)", "a.py:20"
    found = explained(rank(0, done(), beside, wait=wait), rank(1, done()), size=2)
    assert found.lines[0].endswith("at a.py:3 for 10.0 s, waited for at a.py:20")
    assert found.causes == [1]


def test_a_group_that_not_all_members_make_is_waited_for():
    key = GroupKey(1, -1, "new_group", (0, 2))
    found = explained(
        rank(0, op(layout.NEW_GROUP, 1, key, line=4)), rank(1, done()), rank(2, done()), size=3
    )
    assert found.causes == [2]
    assert (
        "rank 2, which has not come to new_group #1 (8 B, ranks 0,2) at a.py:4" in found.verdict[0]
    )


def test_ranks_that_are_all_in_one_operation_blame_nobody():
    wait = "barrier()", "a.py:1"
    found = explained(*(rank(each, op(Kind.BARRIER, 2, PAIR), wait=wait) for each in range(2)))
    assert found.causes == []
    assert "to which all have come" in found.verdict[0]


def test_ranks_that_go_on_have_no_verdict():
    assert explained(rank(0, done()), rank(1, done())).verdict == []


def test_a_rank_that_has_not_called_anything_says_so():
    assert explained(rank(0), size=1).lines == [
        "rank 0: outside of hpcdist, and has called nothing yet"
    ]


def test_a_world_that_is_not_whole_is_waited_for():
    key = GroupKey(0, -1, "init_parallel_env", (0, 1))
    found = explained(rank(0, op(layout.INIT, 1, key, line=2)), size=2)
    assert found.verdict[0].startswith("rank 0 waits for rank 1, which has not come to init")
