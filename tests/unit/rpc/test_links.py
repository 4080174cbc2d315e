"""`Link`: what is written by whom, and in which order."""

import socket
import threading
import time

import pytest

from hpcdist.rpc import links
from hpcdist.rpc.frames import CALL, Parcel
from hpcdist.rpc.links import Link, LinkError

PATIENCE_S = 60


@pytest.fixture
def pair():
    """Two ends of a connection."""
    ends = [Link(sock, peer) for peer, sock in enumerate(socket.socketpair())]
    yield ends
    for each in ends:
        each.break_off("the test has ended")
        each.close()


def numbers(link, count):
    return [link.read().call for _ in range(count)]


def test_what_was_queued_while_another_writes_is_written_by_that_one(pair, monkeypatch):
    here, there = pair
    writing, go_on, written = threading.Event(), threading.Event(), []
    write = Link._write

    def slow(link, left, *args):
        written.append(len(left))
        writing.set()
        assert go_on.wait(PATIENCE_S)
        return write(link, left, *args)

    monkeypatch.setattr(Link, "_write", slow)
    first = threading.Thread(target=here.send, args=(CALL, 0, Parcel(b"first")))
    first.start()
    assert writing.wait(PATIENCE_S)
    for number in range(1, 100):
        assert here.send(CALL, number, Parcel(b"x"))  # waits for nobody
    go_on.set()
    first.join(PATIENCE_S)
    assert numbers(there, 100) == [*range(100)]
    assert written == [1, 1]  # two calls of the system


def test_many_small_frames_are_one_task_and_large_ones_come_after_them(pair):
    here, there = pair
    tasks = []
    for number in range(50):
        assert here.send(CALL, number, Parcel(b"x"), None, tasks.append, batched=True)
    assert len(tasks) == 1
    assert here.send(CALL, 50, Parcel(bytes(links._SMALL + 1)))
    assert here.send(CALL, 51, Parcel(b"x"), None, tasks.append, batched=True)
    assert numbers(there, 51) == [*range(51)]
    for task in tasks:
        task()
    assert numbers(there, 1) == [51]
    assert here.send(CALL, 52, Parcel(b"x"), None, tasks.append, batched=True)
    assert len(tasks) == 2
    tasks[1]()
    assert numbers(there, 1) == [52]


def test_a_task_that_cannot_begin_is_asked_for_again(pair):
    here, there = pair

    def full(_):
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        here.send(CALL, 0, Parcel(b"x"), None, full, batched=True)
    tasks = []
    assert here.send(CALL, 1, Parcel(b"x"), None, tasks.append, batched=True)
    tasks[0]()
    assert numbers(there, 2) == [0, 1]


def test_who_does_not_read_is_sent_a_bounded_number_of_frames(pair):
    here, there = pair
    frame, sent = Parcel(bytes(links._SMALL)), 0
    rests = []
    while here.send(CALL, sent, frame, time.monotonic(), rests.append):
        sent += 1
        assert sent < 10_000
    assert len(rests) == 1  # what the first one that did not fit has left
    thread = threading.Thread(target=rests[0])
    thread.start()
    assert numbers(there, sent) == [*range(sent)]
    thread.join(PATIENCE_S)
    assert here.send(CALL, sent, frame, time.monotonic() + PATIENCE_S, rests.append)
    assert numbers(there, 1) == [sent]


def test_threads_that_send_at_once_lose_nothing_and_keep_their_order(pair):
    here, there = pair
    sizes = (1, 1, 1, links._SMALL, links._SMALL + 1)

    def run(task):
        threading.Thread(target=task).start()

    def send(thread):
        for number in range(500):
            parcel = Parcel(bytes(sizes[number % len(sizes)]))
            call = 1000 * thread + number
            here.send(CALL, call, parcel, None, run, batched=number % 3 == 0)

    threads = [threading.Thread(target=send, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    found = numbers(there, 2000)
    for thread in threads:
        thread.join(PATIENCE_S)
    for thread in range(4):
        assert [each for each in found if each // 1000 == thread] == [
            *range(1000 * thread, 1000 * thread + 500)
        ]


def test_what_is_sent_when_the_other_side_has_gone_is_an_error(pair):
    here, there = pair
    there.break_off("it goes")
    with pytest.raises(LinkError, match="does not take what is sent"):
        here.send(CALL, 0, Parcel(b"x"))
    for batched in (False, True):
        with pytest.raises(LinkError, match="does not take what is sent"):
            here.send(CALL, 1, Parcel(b"x"), None, lambda task: task(), batched=batched)
