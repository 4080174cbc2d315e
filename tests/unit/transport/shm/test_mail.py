"""Mailboxes: what is put in comes out once, whole and in order, whatever is taken first."""

import threading
from collections import defaultdict
from random import Random

import numpy as np
import pytest

from hpcdist.transport.shm.kernel import MOST, compiled
from hpcdist.transport.shm.mail import box_bytes, mail_bytes, open_mail
from hpcdist.transport.waiting.work import Done

pytestmark = pytest.mark.skipif(compiled is None, reason="the kernel is not compiled here")
ANY = -1


def boxes(size, nbytes=None):
    """Return the mailboxes of each rank, all in this process."""
    nbytes = nbytes or box_bytes(size)
    room = np.zeros(size**2 * nbytes + 64, np.uint8)
    memory = room[-room.ctypes.data % 64 :][: size**2 * nbytes]
    ranks, works = tuple(range(10, 10 + size)), tuple(map(Done, range(size)))
    return [
        compiled.Mailboxes(memory, rank, nbytes, ranks, ranks, works, threading.RLock())
        for rank in range(size)
    ]


def take(mail, source, tag):
    """Return the sender and the content of the first message, None if there is none."""
    found = mail.find(source, tag)
    if found is None:
        return None
    sender, nbytes = found
    parts = [bytearray(nbytes // 2), bytearray(nbytes - nbytes // 2)]
    mail.take(sender, tag, parts)
    return sender, b"".join(parts)


@pytest.mark.parametrize("seed", range(10))
def test_messages_of_one_sender_and_tag_come_out_whole_and_in_order(seed):
    chance, size = Random(seed), 3
    mails, waiting = boxes(size, 4096), defaultdict(list)
    refused = 0
    for _ in range(3000):
        rank, peer, tag = chance.randrange(size), chance.randrange(size), chance.randrange(3)
        if chance.random() < 0.55:
            nbytes = chance.choice([0, 8, 47, 48, 49, 300, mails[0].most, mails[0].most + 1])
            data = chance.randbytes(nbytes)
            if mails[rank].put(peer, tag, data):
                waiting[rank, peer, tag].append(data)
            else:
                refused += 1
        else:
            came = [sender for sender in range(size) if waiting[sender, rank, tag]]
            found = take(mails[rank], chance.choice([peer, ANY]), tag)
            if found is None:
                assert peer not in came or not came
            else:
                assert found[1] == waiting[found[0], rank, tag].pop(0)
    for (sender, rank, tag), left in waiting.items():
        assert [take(mails[rank], sender, tag) for _ in left] == [(sender, data) for data in left]
    assert refused
    assert not any(mail.left() for mail in mails)
    assert all(mail.find(ANY, tag) is None for mail in mails for tag in range(3))


def test_a_full_box_takes_nothing_until_something_of_it_is_taken():
    first, second = boxes(2, 4096)
    count = 0
    while first.put(1, 5, bytes([count % 256])):
        count += 1
    assert count == (4096 - 256) // 64
    assert second.put(0, 5, b"the other way")
    assert take(second, 0, 5) == (0, b"\0")
    assert first.put(1, 5, b"!")
    assert not first.put(1, 5, b"!")
    rest = [take(second, 0, 5)[1] for _ in range(count)]
    assert rest == [bytes([each % 256]) for each in range(1, count)] + [b"!"]


def test_what_waits_in_a_box_holds_up_no_other_tag_as_long_as_there_is_room():
    first, second = boxes(2)
    assert first.put(1, 1, b"waits")
    for turn in range(100):
        assert first.put(1, 2, bytes([turn]))
        assert take(second, 0, 2) == (0, bytes([turn]))
    assert take(second, 0, 1) == (0, b"waits")


def test_nothing_overtakes_a_message_that_goes_by_mpi():
    first, second = boxes(2)
    for _ in range(2):
        first.sent(1)
    assert not first.put(1, 0, b"")
    assert first.put(0, 0, b"to another rank")
    second.received(0)
    assert not first.put(1, 0, b"")
    second.received(0)
    assert first.put(1, 0, b"")


def test_a_message_goes_by_mpi_now_and_then_if_that_is_asked_for():
    first, second = boxes(2)
    for _ in range(2):
        first.pause_ns = 1
        assert not first.put(1, 0, b"")
        assert not first.put(1, 0, b"")
        first.pause_ns = 10**15
        first.sent(1)
        second.received(0)
        assert first.put(1, 0, b"")


def test_receives_from_any_rank_take_of_all_in_turn():
    mails = boxes(3)
    for rank in (0, 1, 2):
        for number in range(2):
            assert mails[rank].put(0, 0, bytes([rank, number]))
    senders = [take(mails[0], ANY, 0)[0] for _ in range(6)]
    assert senders == [0, 1, 2, 0, 1, 2]


def test_all_boxes_of_a_node_take_little_memory():
    assert box_bytes(2) == 64 << 10
    for size in range(1, MOST + 1):
        assert box_bytes(size) % 4096 == 0
        assert mail_bytes(size) <= max(64 << 20, size**2 * 4096)
    assert mail_bytes(64) == 64 << 20
    assert mail_bytes(MOST + 1) == 0


def test_without_memory_or_with_what_is_no_rank_there_are_no_boxes():
    assert open_mail(np.zeros(0, np.uint8), 0, [0, 1], [0, 0], threading.RLock()) is None
    room = np.zeros(64 + mail_bytes(1), np.uint8)
    memory = room[-room.ctypes.data % 64 :][: mail_bytes(1)]
    for wrong in ((memory, 1, [0]), (memory[64:], 0, [0]), (memory[1:], 0, [0])):
        with pytest.raises(ValueError, match="boxes"):
            open_mail(*wrong, [0], threading.RLock())
    mail = open_mail(memory, 0, [0], [0], threading.RLock())
    for call in (mail.sent, mail.received, lambda rank: mail.put(rank, 0, b"")):
        with pytest.raises(ValueError, match="a rank of the group"):
            call(1)
    with pytest.raises(LookupError):
        mail.take(0, 0, [])
