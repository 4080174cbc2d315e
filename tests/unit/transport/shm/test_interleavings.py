"""The protocols of shared memory in every order that their steps can have: as models of the C.

Each model is the protocol as `native/` has it, step by step, with as few ranks and operations as
show everything; beside it stands what goes wrong without the step that the protocol is about.
"""

import pytest
from interleavings import Stuck, add, either, explore, load, release, store, swap, until

# ---- the explorer itself


def test_it_finds_that_a_message_without_a_release_is_read_too_early():
    def writer(publish):
        yield store("data", 1)
        yield publish("flag", 1)

    def reader():
        yield until("flag", bool)
        return (yield load("data"))

    memory = {"data": 0, "flag": 0}
    assert explore([lambda: writer(release), reader], memory) == {(None, 1)}
    assert explore([lambda: writer(store), reader], memory) == {(None, 0), (None, 1)}
    assert explore([lambda: writer(store), reader], memory, in_order=True) == {(None, 1)}


def test_it_finds_that_two_wait_for_each_other():
    def one(mine, other):
        yield until(other, bool)
        yield release(mine, 1)

    with pytest.raises(Stuck):
        explore([lambda: one("a", "b"), lambda: one("b", "a")], {"a": 0, "b": 0})


# ---- the slots of a control block: `publish` and `agree` in agree.c


def operations(rank, turns, size, count):
    """Agree `count` times; return what was read of all ranks each time."""
    read = []
    for sequence in range(1, count + 1):
        turn = sequence % turns
        yield store(f"number {turn} {rank}", 10 * sequence + rank)
        yield release(f"sequence {turn} {rank}", sequence)
        for other in range(size):
            yield until(f"sequence {turn} {other}", lambda found, own=sequence: found == own)
        found = []
        for other in range(size):
            found.append((yield load(f"number {turn} {other}")))
        read.append(tuple(found))
    return tuple(read)


def slots(turns, size):
    pairs = [f"{turn} {rank}" for turn in range(turns) for rank in range(size)]
    return {f"{what} {pair}": 0 for what in ("number", "sequence") for pair in pairs}


@pytest.mark.parametrize(("size", "count"), [(2, 3), (3, 2)])
def test_ranks_read_what_all_have_posted_to_this_operation(size, count):
    ranks = [lambda rank=rank: operations(rank, 2, size, count) for rank in range(size)]
    expected = tuple(
        tuple(10 * sequence + rank for rank in range(size)) for sequence in range(1, count + 1)
    )
    assert explore(ranks, slots(2, size)) == {(expected,) * size}


def test_with_one_slot_a_rank_would_write_over_what_others_still_read():
    ranks = [lambda rank=rank: operations(rank, 1, 2, 2) for rank in range(2)]
    with pytest.raises(Stuck):
        explore(ranks, slots(1, 2))


# ---- leaving: `decide` in control.c


def leaves(rank, word):
    """Enter the operation, or call it off after a while; return who has called it off."""
    impatient = yield either()
    mine = rank + 1 if impatient else 0
    yield swap(word, None, mine)
    return (yield load(word))


def test_all_ranks_are_in_an_operation_or_none_is():
    ranks = [lambda rank=rank: leaves(rank, "word") for rank in range(3)]
    results = explore(ranks, {"word": None})
    assert all(len(set(found)) == 1 for found in results)
    assert {found[0] for found in results} == {0, 1, 2, 3}


# ---- letters: `begin_letter`, `end_letter`, `find_letter` and `discard_letter` in mail.c


def sends(count, room):
    for number in range(count):
        yield until("tail", lambda tail, head=number: head - tail < room)
        yield store(f"letter {number % room}", number)
        yield release("head", number + 1)


def receives(count, room, give_back):
    read = []
    for number in range(count):
        yield until("head", lambda head, own=number: head > own)
        if give_back == "before":
            yield release("tail", number + 1)
        read.append((yield load(f"letter {number % room}")))
        if give_back == "after":
            yield release("tail", number + 1)
    return tuple(read)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_letters_arrive_once_and_in_their_order(room):
    memory = {"head": 0, "tail": 0} | {f"letter {at}": None for at in range(room)}
    both = [lambda: sends(4, room), lambda: receives(4, room, "after")]
    assert explore(both, memory) == {(None, (0, 1, 2, 3))}
    early = [lambda: sends(4, room), lambda: receives(4, room, "before")]
    assert len(explore(early, memory)) > 1


# ---- large messages: `offer` and `take_offer` in mail.c

NONE, OFFERED, CLAIMED, TAKEN, REFUSED = range(5)


def offers(messages):
    """Offer messages, each for any time; return which have been taken, and not left to MPI."""
    taken = []
    for tag, content in messages:
        yield store("tag", tag)
        yield store("content", content)
        yield release("offer", OFFERED)
        if (yield swap("offer", OFFERED, NONE)):
            continue
        state = yield until("offer", lambda state: state != CLAIMED)
        if state == TAKEN:
            taken.append(tag)
    return tuple(taken)


def takes(tag, looks_again):
    """Look for a message a few times; return its content, or None."""
    for _ in range(3):
        if (yield load("offer")) != OFFERED or (yield load("tag")) != tag:
            continue
        if not (yield swap("offer", OFFERED, CLAIMED)):
            continue
        fits = not looks_again or (yield load("tag")) == tag
        content = (yield load("content")) if fits else None
        yield release("offer", TAKEN if fits else REFUSED)
        if fits:
            return content
    return None


def outcomes(looks_again):
    messages = [(1, "one"), (2, "two")]
    memory = {"offer": NONE, "tag": 0, "content": None}
    return explore([lambda: offers(messages), lambda: takes(1, looks_again)], memory)


def test_a_message_is_taken_by_the_receiver_it_is_for_or_left_to_mpi():
    found = outcomes(True)
    assert found == {((1,), "one"), ((), None)}


def test_without_a_second_look_a_message_of_another_tag_would_be_taken():
    assert ((2,), "two") in outcomes(False)


# ---- very large ones, which both copy: `copy_pieces` in mail.c


def copies(pieces, who):
    """Copy pieces that the other one has not begun; return which."""
    mine = []
    while (piece := (yield add("begun", 1))) < pieces:
        yield store(f"target {piece}", f"copied {who}")
        yield add("ended", 1)
        mine.append(piece)
    return mine


def writes(pieces):
    """Help once the reader has said where, if it is still of use."""
    if (yield load("target")):
        yield from copies(pieces, "by the writer")
    return (yield until("offer", lambda state: state != CLAIMED))


def reads_with_help(pieces, waits):
    yield store("target", 1)
    mine = yield from copies(pieces, "by the reader")
    if waits:
        yield until("ended", lambda ended: ended == pieces)
    found = []
    for piece in range(pieces):
        found.append((yield load(f"target {piece}")))
    yield release("offer", TAKEN)
    return len(mine), tuple(found)


def copied_together(waits):
    pieces = 2
    memory = {"offer": CLAIMED, "target": 0, "begun": 0, "ended": 0}
    memory |= {f"target {piece}": None for piece in range(pieces)}
    both = [lambda: writes(pieces), lambda: reads_with_help(pieces, waits)]
    return {read for _, read in explore(both, memory)}


def test_what_both_copy_is_whole_whoever_copies_which_part():
    found = copied_together(waits=True)
    assert {mine for mine, _ in found} == {0, 1, 2}
    assert all(None not in pieces for _, pieces in found)


def test_without_a_wait_for_the_other_a_part_would_be_missing():
    assert any(None in pieces for _, pieces in copied_together(waits=False))


# ---- rows read past their owners: `read_rows` in ps/native/reading.c, `Owned` in ps/shared.py


def changes(row, times):
    for number in range(1, times + 1):
        yield store("changes", 2 * number - 1)
        for half in row:
            yield store(half, number)
        yield store("changes", 2 * number)


def reads(row, looks_again):
    before = yield load("changes")
    if before % 2:
        return None
    read = []
    for half in row:
        read.append((yield load(half)))
    if looks_again and (yield load("changes")) != before:
        return None
    return tuple(read)


def rows_read(*, looks_again, in_order):
    row = ("left", "right")
    both = [lambda: changes(row, 2), lambda: reads(row, looks_again)]
    memory = {"changes": 0, "left": 0, "right": 0}
    return {read for _, read in explore(both, memory, in_order=in_order)}


def test_a_row_is_read_whole_or_not_at_all():
    assert rows_read(looks_again=True, in_order=True) == {None, (0, 0), (1, 1), (2, 2)}


@pytest.mark.parametrize("way", [{"looks_again": False, "in_order": True},
                                 {"looks_again": True, "in_order": False}])  # fmt: skip
def test_without_a_second_look_or_on_other_processors_a_row_would_be_torn(way):
    assert any(read is not None and read[0] != read[1] for read in rows_read(**way))
