"""Messages reach the receives that they belong to: in any order of events."""

import os
import subprocess
from contextlib import suppress
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from fake_mpi import results
from interrupted_at import InterruptError, interrupted_at

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.errors import CollectiveTimeout, MismatchError, RankFailure, RemoteError
from hpcdist.transport.call.call import ANY_SOURCE, Message
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi import early, matching, messages, requests
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.messages import Messages
from hpcdist.transport.mpi.news import Blocker, Circles, Count, News, Step
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.shm.mail import mail_bytes
from hpcdist.transport.waiting import polling
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import poll

SEEDS = range(8)
LIMIT_S = 2.0
LARGE = 100_000
"""Elements of a message that moves only while both of its ranks are in MPI."""


def _receive(data, source, tag):
    return Message(Kind.RECV, data, dtype_row(data.dtype), data.shape, source, tag=tag)


class Rank:
    """Sends and receives of one rank, as a transport makes them."""

    def __init__(self, comm, limit_bytes=1 << 20, mail=None):
        ranks = tuple(10 * (rank + 1) for rank in range(comm.size))
        allowance, circles = Allowance(limit_bytes), Circles()
        self.world = comm.world
        self.messages = Messages(comm.Dup(), ranks, LIMIT_S, allowance, circles, Deaths())
        matching = self.messages.matching
        self.news = News(
            comm, ranks, allowance, circles, Count(int, int, matching.sent_to), Deaths()
        )
        matching.news = self.news
        if mail is not None:
            pids = [os.getpid()] * comm.size
            node = SimpleNamespace(mail_memory=mail, rank=comm.rank, pids=pids, attaches=False)
            self.messages.open_mail(node)
        matching.start_taking_in()

    def isend(self, value, to, tag=0, dtype=np.float64, items=1):
        data = np.full(items, value, dtype)
        call = Message(Kind.SEND, data, dtype_row(data.dtype), data.shape, to, tag=tag)
        return self.messages.start(call)

    def irecv(self, source, tag=0, dtype=np.float64, items=1):
        """Return the work and the array."""
        data = np.zeros(items, dtype)
        return self.messages.start(_receive(data, source, tag)), data

    def recv(self, source, tag=0, dtype=np.float64, items=1):
        """Return the first number."""
        data = np.zeros(items, dtype)
        self.messages.run(_receive(data, source, tag))
        return data[0].item()


def no_mail(size):
    """Return no memory: MPI carries all messages."""


def shared_mail(size):
    """Return memory for mailboxes that ranks on one node share."""
    if compiled is None:
        pytest.skip("the kernel is not compiled here")
    room = np.zeros(mail_bytes(size) + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][: mail_bytes(size)]


MODULES = early, matching, messages, requests, polling
MOMENTS = pytest.mark.parametrize("first", range(4))
SIZES = pytest.mark.parametrize("items", [1, 5000, LARGE])
MAILS = pytest.mark.parametrize("mail_of", [no_mail, shared_mail])


def at_each_moment(program, first, *args):
    """Give what the ranks return where the first is interrupted at one moment after the other."""
    for moment in range(first, 10_000, 4):
        found = results(2, partial(program, *args, moment), seed=moment)
        yield found
        if not found[0][-1]:
            break
    assert moment > 20


@MOMENTS
@SIZES
@MAILS
def test_an_interrupted_recv_has_taken_nothing_or_all(mail_of, items, first):
    def program(moment, comm):
        rank = Rank(comm, mail=mail)
        if comm.rank == 1:
            for work in [rank.isend(value, 0, items=items) for value in (1.0, 2.0)]:
                work.wait()
            return None
        data = np.zeros(items)
        with suppress(InterruptError), interrupted_at(moment, *MODULES) as is_interrupted:
            rank.messages.run(_receive(data, 1, 0))
        if not data.any():
            rank.messages.run(_receive(data, 1, 0))
        return {*data}, rank.recv(1, items=items), bool(is_interrupted)

    mail = mail_of(2)
    for (received, following, _), _ in at_each_moment(program, first):
        assert (received, following) == ({1.0}, 2.0)
        if mail is not None:
            mail[:] = 0


@MOMENTS
@SIZES
@MAILS
def test_an_interrupted_send_has_left_as_a_whole_or_not_at_all(mail_of, items, first):
    def program(moment, comm):
        rank, received = Rank(comm, mail=mail), []
        if comm.rank == 1:
            while received[-1:] != [2.0]:
                received.append(rank.recv(0, items=items))
            return received
        data = np.full(items, 1.0)
        call = Message(Kind.SEND, data, dtype_row(data.dtype), data.shape, 1, tag=0)
        with suppress(InterruptError), interrupted_at(moment, *MODULES) as is_interrupted:
            rank.messages.run(call)
        rank.isend(2.0, 1, items=items).wait()
        return (bool(is_interrupted),)

    mail = mail_of(2)
    for (is_interrupted,), received in at_each_moment(program, first):
        assert received in ([1.0, 2.0], [2.0][:is_interrupted])
        if mail is not None:
            mail[:] = 0


@pytest.mark.parametrize("mail_of", [no_mail, shared_mail])
@pytest.mark.parametrize("seed", range(20))
def test_messages_of_one_sender_tag_and_dtype_arrive_in_order(seed, mail_of):
    """Whatever the order in which receives are posted, and in which they are waited for."""
    size, kinds = 3, [(tag, dtype) for tag in (0, 7) for dtype in (np.float32, np.int64)]
    mail = mail_of(size)

    def program(comm):
        rank, chance = Rank(comm, mail=mail), Random(1000 * seed + comm.rank)
        others = [each for each in range(size) if each != comm.rank]
        plan = [(peer, *kind) for peer in others for kind in kinds]
        sends = chance.sample(4 * plan, 4 * len(plan))
        posts = chance.sample(3 * plan, 3 * len(plan))
        counts, works, posted = {}, [], {}
        while sends or posts:
            if sends and (not posts or chance.random() < 0.5):
                peer, tag, dtype = line = sends.pop()
                counts[line] = counts.get(line, 0) + 1
                works.append(rank.isend(counts[line], peer, tag, dtype))
            else:
                peer, tag, dtype = line = posts.pop()
                posted.setdefault(line, []).append(rank.irecv(peer, tag, dtype))
        poll(
            lambda: False, chance.choice([0, 0.1])
        )  # in another operation, which takes messages in
        last = {line: rank.recv(*line) for line in chance.sample(list(posted), len(posted))}
        received = [each for line in posted.values() for each in line]
        for work in [*works, *(work for work, _ in chance.sample(received, len(received)))]:
            work.wait()
        return {
            line: [*(data[0].item() for _, data in each), last[line]]
            for line, each in posted.items()
        }

    for found in results(size, program, seed=seed):
        assert len(found) == 2 * len(kinds)
        assert all(line == [1, 2, 3, 4] for line in found.values()), found


@pytest.mark.parametrize("seed", range(20))
def test_no_way_of_a_message_overtakes_another(seed):
    """Small ones go through mailboxes, or by MPI after a large one; large ones always by MPI."""
    mail, each = shared_mail(2), 12

    def program(comm):
        rank, chance = Rank(comm, mail=mail), Random(1000 * seed + comm.rank)
        sizes = Random(seed).choices([1, 1, 1, 3000, LARGE], k=each)
        if comm.rank:
            works = []
            for number, items in enumerate(sizes):
                works.append(rank.isend(number, 0, items=items))
                poll(lambda: False, chance.choice([0, 0, 0.01]))
            for work in works:
                work.wait()
            return None
        found = []
        for items in sizes:
            poll(lambda: False, chance.choice([0, 0, 0.01]))
            if chance.random() < 0.5:
                found.append(rank.recv(1, items=items))
            else:
                work, data = rank.irecv(1, items=items)
                work.wait()
                found.append(data[-1].item())
        return found

    assert results(2, program, seed=seed)[0] == list(range(each))


@pytest.mark.parametrize(
    ("kind", "is_gone", "expected", "words"),
    [
        (Kind.SEND, False, CollectiveTimeout, "send to rank 20 .* has begun to be received"),
        (Kind.SEND, True, RankFailure, "rank 20 died during send to rank 20"),
        (Kind.RECV, False, CollectiveTimeout, "recv from rank 20 .* has begun to be written"),
        (Kind.RECV, True, RankFailure, "rank 20 died during recv from rank 20"),
    ],
)
def test_who_waits_for_one_that_stops_in_the_middle_of_copying_is_told(
    kind, is_gone, expected, words
):
    ended = subprocess.Popen(["true"])
    ended.wait()

    def program(comm):
        messages = Rank(comm).messages
        pids = [os.getpid(), ended.pid if is_gone else os.getpid()]
        messages._pids = pids
        waits_for = "is_settled" if kind is Kind.SEND else "is_copied"
        messages.matching.mail = SimpleNamespace(**{waits_for: lambda rank: False})
        data = np.zeros(LARGE)
        call = Message(kind, data, dtype_row(data.dtype), data.shape, 1)
        if comm.rank == 0:
            with pytest.raises(expected, match=words):
                messages.await_copied(call)
            setattr(messages.matching.mail, waits_for, lambda rank: True)
            messages.await_copied(call)

    results(2, program, seed=0)


class LongProbes:
    """A communicator of which a probe takes so long that others send meanwhile."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Iprobe(self, *args):  # noqa: N802 (MPI's name)
        self._comm.world.sleep(0.5)
        return self._comm.Iprobe(*args)


@pytest.mark.parametrize("source", [1, ANY_SOURCE])
def test_a_message_in_a_mailbox_comes_before_the_later_one_that_mpi_finds_first(source):
    mail = shared_mail(2)

    def program(comm):
        rank = Rank(comm, mail=mail)
        if comm.rank:
            comm.world.sleep(0.1)
            rank.isend(7, 0).wait()
            rank.messages.matching.mail.pause_ns = 1  # from now on MPI carries all
            rank.isend(8, 0).wait()
            return None
        matching = rank.messages.matching
        matching.comm = LongProbes(matching.comm)
        return rank.recv(source), rank.recv(source)

    assert results(2, program, seed=0, slowest_s=0.01)[0] == (7, 8)


@pytest.mark.parametrize("mail_of", [no_mail, shared_mail])
@pytest.mark.parametrize("seed", range(12))
def test_receives_from_any_rank_take_each_message_once_in_the_order_of_its_sender(seed, mail_of):
    size, each = 4, 5
    mail = mail_of(size)

    def program(comm):
        rank = Rank(comm, mail=mail)
        if comm.rank:
            for number in range(each):
                rank.isend(10 * comm.rank + number, 0, tag=3).wait()
            return None
        works = [rank.irecv(ANY_SOURCE, tag=3) for _ in range(each * (size - 1))]
        for work, data in works:
            work.wait()
            assert work.source == 10 * (int(data[0]) // 10 + 1)
        return [int(data[0]) for _, data in works]

    taken = results(size, program, seed=seed)[0]
    for sender in range(1, size):
        own = [value for value in taken if value // 10 == sender]
        assert own == [10 * sender + number for number in range(each)]


@pytest.mark.parametrize("seed", range(20))
def test_a_message_goes_to_the_earliest_receive_whether_that_names_its_sender_or_not(seed):
    size, named, of_any = 3, 3, 6

    def program(comm):
        rank, chance = Rank(comm), Random(seed)
        if comm.rank:
            for number in range(named + of_any):
                comm.world.sleep(chance.choice([0, 0.001]))
                rank.isend(100 * comm.rank + number, 0)
            return poll(lambda: False, 0.2)
        sources = [*(named * [*range(1, size)]), *(of_any * [ANY_SOURCE])]
        works = [rank.irecv(source) for source in chance.sample(sources, len(sources))]
        for work, _ in works:
            work.wait()
        return [int(data[0]) for _, data in works]

    taken = results(size, program, seed=seed)[0]
    for sender in range(1, size):
        own = [value - 100 * sender for value in taken if value // 100 == sender]
        assert own == list(range(len(own))), taken


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_first_send_large_messages_to_each_other_do_not_hang(seed):
    def program(comm):
        rank, peer = Rank(comm), 1 - comm.rank
        rank.isend(comm.rank, peer, items=LARGE).wait()
        return rank.recv(peer, items=LARGE)

    assert results(2, program, seed=seed) == [1, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_taken_in_before_it_was_asked_for_is_received_in_order(seed):
    def program(comm):
        rank = Rank(comm)
        if comm.rank:
            for number in range(8):
                rank.isend(number, 0, tag=number // 4).wait()
            return None
        poll(lambda: False, 0.3)
        return [rank.recv(1, tag=tag) for _ in range(4) for tag in (1, 0)]

    assert results(2, program, seed=seed)[0] == [4, 0, 5, 1, 6, 2, 7, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_would_go_beyond_the_bound_stays_with_its_sender(seed):
    def program(comm):
        rank = Rank(comm, limit_bytes=8 * LARGE)
        if comm.rank:
            works = [rank.isend(number, 0, tag=number, items=LARGE) for number in range(3)]
            with pytest.raises(CollectiveTimeout, match=r"do not fit into the .* HPCDIST_EARLY_MB"):
                works[1].wait()
            for work in works:
                work.wait()
            return None
        poll(lambda: False, LIMIT_S + 0.7)  # in another operation
        return [rank.recv(1, tag=number, items=LARGE) for number in range(3)]

    assert results(2, program, seed=seed)[0] == [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_of_another_size_is_refused_and_stays_for_one_that_fits(seed):
    def program(comm):
        rank = Rank(comm)
        if comm.rank:
            return rank.isend(5, 0, items=3).wait()
        with pytest.raises(MismatchError, match="rank 20 sent 24 bytes of float64, but rank 10"):
            rank.recv(1, items=2)
        return rank.recv(1, items=3)

    assert results(2, program, seed=seed) == [5, True]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_of_another_dtype_is_waited_past_while_the_right_one_may_come(seed):
    def program(comm):
        rank = Rank(comm)
        if comm.rank:
            rank.isend(5, 0, dtype=np.int64).wait()
            comm.world.sleep(0.8 * LIMIT_S)
            return rank.isend(6, 0, dtype=np.float32).wait()
        return rank.recv(1, dtype=np.float32), rank.recv(1, dtype=np.int64)

    assert results(2, program, seed=seed)[0] == (6, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_of_another_dtype_is_an_error_once_its_sender_has_left(seed):
    def program(comm):
        rank = Rank(comm)
        if comm.rank:
            rank.isend(5, 0, dtype=np.int64).wait()
            return rank.news.leave("has ended")
        with pytest.raises(MismatchError, match="sent 8 bytes of int64, but rank 10 receives"):
            rank.recv(1, dtype=np.float32)
        assert comm.world.now < LIMIT_S / 2
        return rank.recv(1, dtype=np.int64)

    assert results(2, program, seed=seed)[0] == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_rank_sent_before_it_left_is_received_and_then_it_is_missed(seed):
    def program(comm):
        rank = Rank(comm)
        if comm.rank:
            rank.isend(5, 0).wait()
            return rank.news.leave("has ended")
        poll(lambda: bool(rank.news.left), LIMIT_S)
        assert rank.recv(1) == 5
        with pytest.raises(RemoteError, match="rank 20 has ended and sent nothing for recv"):
            rank.recv(1)
        return comm.world.now < LIMIT_S

    assert results(2, program, seed=seed, slowest_s=LIMIT_S / 2)[0]


@MAILS
@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_wait_for_what_is_on_its_way_do_not_wait_in_a_circle(seed, mail_of):
    def program(comm):
        rank, peer = Rank(comm, mail=mail), 1 - comm.rank
        rank.isend(5, peer, dtype=np.int64).wait()
        if comm.rank:
            assert rank.recv(0, tag=1) == 7
            rank.isend(6, 0, dtype=np.float32).wait()
        else:
            rank.isend(7, 1, tag=1).wait()
            assert rank.recv(1, dtype=np.float32) == 6
        return rank.recv(peer, dtype=np.int64)

    mail = mail_of(2)
    assert results(2, program, seed=seed, slowest_s=LIMIT_S / 2) == [5, 5]


@pytest.mark.parametrize("seed", SEEDS)
@MAILS
def test_who_has_sent_what_another_has_not_yet_seen_is_not_in_its_way(mail_of, seed):
    def program(comm):
        rank = Rank(comm, mail=mail)
        matching = rank.messages.matching
        if comm.rank:
            rank.recv(0, tag=3)
            rank.isend(5, 0).wait()
            return rank.recv(0, tag=4)
        ticket, step = matching.circles.open(), Step(True, matching.seen_from(1))
        wait = Wait(lambda: "a message", lambda: [Blocker(rank.news, 1, step)])
        rank.isend(6, 1, tag=3).wait()
        comm.world.sleep(LIMIT_S / 4)
        rank.news.chase(ticket, 1, step)
        poll(lambda: False, LIMIT_S / 4, wait=wait)
        closed = matching.circles.closed(ticket)
        rank.isend(7, 1, tag=4).wait()
        return closed, rank.recv(1)

    mail = mail_of(2)
    assert results(2, program, seed=seed) == [(set(), 5), 7]


@pytest.mark.parametrize("seed", SEEDS)
@MAILS
def test_who_waits_for_a_message_that_is_there_waits_for_nobody(mail_of, seed):
    def program(comm):
        rank = Rank(comm, mail=mail)
        if comm.rank:
            rank.recv(0, tag=3)
            return rank.isend(5, 0).wait()
        work, data = rank.irecv(1)
        before = len(work.blockers())
        rank.isend(6, 1, tag=3).wait()
        comm.world.sleep(LIMIT_S / 4)
        after = len(work.blockers())
        work.wait()
        return before, after, data[0]

    mail = mail_of(2)
    assert results(2, program, seed=seed, slowest_s=LIMIT_S / 8)[0] == (1, 0, 5)


@MAILS
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_wait_in_a_circle_for_other_dtypes_find_out_before_their_time_is_over(
    size, seed, mail_of
):
    def program(comm):
        rank, after, before = Rank(comm, mail=mail), (comm.rank + 1) % size, (comm.rank - 1) % size
        rank.isend(5, after, dtype=np.int64).wait()
        try:
            rank.recv(before, dtype=np.float32)
            found = None
        except MismatchError:
            found = comm.world.now
        rank.isend(6, after, dtype=np.float32).wait()
        return found

    mail = mail_of(size)
    found = [each for each in results(size, program, seed=seed) if each is not None]
    assert found
    assert max(found) < LIMIT_S


@pytest.mark.parametrize("seed", SEEDS)
def test_who_sends_nothing_is_asked_what_it_waits_for(seed):
    def program(comm):
        rank = Rank(comm)
        if comm.rank:
            poll(lambda: False, 2 * LIMIT_S)
            return
        work, data = rank.irecv(1, tag=4)
        with pytest.raises(CollectiveTimeout, match=r"recv from rank 20 .* with tag 4") as info:
            work.wait()
        assert info.value.missing == (20,)
        assert not data.any()

    results(2, program, seed=seed)
