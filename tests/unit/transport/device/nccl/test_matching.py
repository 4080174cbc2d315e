"""Which message of a batch meets which, without ranks."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpcdist.arrays.dtypes import code_in_tag, dtype_row
from hpcdist.errors import MismatchError
from hpcdist.transport.call.call import Message
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.device.nccl.matching import (
    Entry,
    Transfer,
    by_peer,
    entry_of,
    plan_pair,
    transfer_of,
)

FLOAT32, INT64 = (dtype_row(np.dtype(name)).code for name in ("f4", "i8"))

messages = st.tuples(st.integers(0, 3), st.sampled_from([FLOAT32, INT64]), st.integers(0, 2))
"""Tag, dtype and bytes."""


def sends(*given):
    return [Entry(True, *each) for each in given]


def receives(*given):
    return [Entry(False, *each) for each in given]


def counterparts(entries):
    return [each._replace(sends=not each.sends) for each in entries]


def keeping_order(entries, order):
    """Bring `entries` into another order, in which those that look alike but for size stay put."""
    kept = {}
    for each in entries:
        kept.setdefault(each[:3], []).append(each)
    return [kept[entries[place][:3]].pop(0) for place in order]


@st.composite
def pairs(draw):
    """Draw what two ranks mean to do with each other, and it fits."""
    mine = [Entry(draw(st.booleans()), *each) for each in draw(st.lists(messages, max_size=8))]
    order = draw(st.permutations(range(len(mine))))
    return mine, keeping_order(counterparts(mine), order)


def put(entries, order):
    """Return what a rank puts on the device: sends and receives, each in its order."""
    chosen = [entries[place] for place in order]
    return [[each[1:] for each in chosen if each.sends is side] for side in (True, False)]


@given(pairs())
def test_both_ranks_come_to_one_order_whatever_the_order_of_their_lists(pair):
    mine, theirs = pair
    my_sends, my_receives = put(mine, plan_pair(mine, theirs, (3, 5)))
    their_sends, their_receives = put(theirs, plan_pair(theirs, mine, (5, 3)))
    assert my_sends == their_receives
    assert my_receives == their_sends
    assert len(my_sends) + len(my_receives) == sum(each.nbytes > 0 for each in mine)


@given(st.lists(st.tuples(st.booleans(), messages)), st.lists(st.tuples(st.booleans(), messages)))
def test_both_ranks_plan_alike_or_complain_in_the_same_words(mine, theirs):
    mine, theirs = ([Entry(side, *each) for side, each in given] for given in (mine, theirs))

    def outcome(own, other, ranks):
        try:
            return put(own, plan_pair(own, other, ranks))
        except MismatchError as error:
            return str(error)

    here, there = outcome(mine, theirs, (0, 1)), outcome(theirs, mine, (1, 0))
    assert here == (there if isinstance(there, str) else there[::-1])


@given(pairs(), st.data())
def test_a_batch_that_lacks_a_message_or_has_another_is_a_complaint(pair, data):
    mine, theirs = pair
    if not theirs:
        return
    place = data.draw(st.integers(0, len(theirs) - 1))
    changed = theirs[place]._replace(nbytes=theirs[place].nbytes + 1)
    for wrong in (
        theirs[:place] + theirs[place + 1 :],
        [*theirs, theirs[place]],
        [*theirs[:place], changed, *theirs[place + 1 :]],
    ):
        with pytest.raises(MismatchError):
            plan_pair(mine, wrong, (0, 1))


def test_messages_of_one_tag_and_dtype_meet_in_the_order_of_their_lists():
    mine = sends((0, FLOAT32, 4), (7, FLOAT32, 8), (0, FLOAT32, 12))
    theirs = receives((7, FLOAT32, 8), (0, FLOAT32, 4), (0, FLOAT32, 12))
    assert plan_pair(mine, theirs, (0, 1)) == [0, 2, 1]
    assert plan_pair(theirs, mine, (1, 0)) == [1, 2, 0]


def test_dtypes_tell_messages_of_one_tag_apart_as_on_the_host():
    mine = sends((0, INT64, 8), (0, FLOAT32, 8))
    theirs = receives((0, FLOAT32, 8), (0, INT64, 8))
    low, high = sorted((FLOAT32, INT64))
    assert [mine[place].code for place in plan_pair(mine, theirs, (0, 1))] == [low, high]
    assert [theirs[place].code for place in plan_pair(theirs, mine, (1, 0))] == [low, high]


def test_messages_without_bytes_are_matched_but_not_put_on_the_device():
    mine = sends((0, FLOAT32, 0), (1, FLOAT32, 4))
    assert plan_pair(mine, counterparts(mine), (0, 1)) == [1]
    with pytest.raises(MismatchError):
        plan_pair(mine[:1], receives(), (0, 1))


def test_a_rank_may_send_to_itself():
    both = [*sends((1, FLOAT32, 4), (0, FLOAT32, 8)), *receives((0, FLOAT32, 8), (1, FLOAT32, 4))]
    assert plan_pair(both, both, (2, 2)) == [1, 0, 2, 3]
    with pytest.raises(MismatchError, match="ranks 2 and 2"):
        plan_pair(both[:3], both[:3], (2, 2))


def test_a_complaint_says_what_each_rank_has():
    with pytest.raises(MismatchError) as caught:
        plan_pair(sends((3, FLOAT32, 16)), [], (4, 6))
    words = str(caught.value)
    assert "rank 4 sends 1 message to rank 6, which receives 0 messages from it" in words
    assert "16 bytes of float32 with tag 3 sent, nothing received" in words


def test_calls_are_described_and_sorted_by_peer():
    x = np.ones(3, "f4")
    send = Message(Kind.SEND, x, dtype_row(x.dtype), x.shape, 2, tag=5)
    receive = Message(Kind.RECV, x, dtype_row(np.dtype("S3")), x.shape, 1)
    assert entry_of(send) == Entry(True, 5, FLOAT32, 12)
    assert entry_of(receive) == Entry(False, 0, code_in_tag(dtype_row(np.dtype("S3"))), 12)
    assert transfer_of(send) == Transfer(True, x, 2)
    assert by_peer([send, receive, send]) == {2: [send, send], 1: [receive]}
