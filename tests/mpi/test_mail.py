"""Small messages through mailboxes: which go there, and that none overtakes another."""

import threading
import time
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from math import prod

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.comm.hot import hot
from hpcdist.transport.shm.hot import switched_off
from hpcdist.transport.waiting.work import DONE

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")


@pytest.fixture(autouse=True)
def mail(size, world, and_the_world_goes_on):
    if size == 1:
        pytest.skip("a rank alone has no mailboxes")
    if world.transport.mail is None:
        pytest.skip("the ranks do not share memory by the compiled kernel")
    return world.transport.mail


@pytest.fixture
def to(rank, size):
    return (rank + 1) % size


@pytest.fixture
def source(rank, size):
    return (rank - 1) % size


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 3), (1,) * 6])
@pytest.mark.parametrize("dtype", ["?", "i1", "f2", "f8", "c16"])
def test_a_small_array_is_sent_and_received_in_one_call_each(shape, dtype, to, source, rank):
    assert hot.send(np.full(shape, rank, dtype), to, None, True, 7) is DONE
    got = np.full(shape, 9, dtype)
    dist.barrier()
    work = hot.recv(got, source, None, True, 7)
    assert work.source == source
    assert (got == np.full(shape, source, dtype)).all()


def test_a_receive_from_any_rank_names_the_sender(to, rank, size):
    for each in range(size):
        assert hot.send(np.array([rank]), each, None, False, 0) is DONE
    dist.barrier()
    seen = set()
    for _ in range(size):
        work = hot.recv(got := np.zeros(1, int), None, None, True, 0)
        assert work.source == got[0]
        seen.add(work.source)
    assert seen == set(range(size))


def test_an_array_that_cannot_be_written_may_be_sent(to, source):
    x = np.ones(3)
    x.flags.writeable = False
    assert hot.send(x, to, None, True, 0) is DONE
    dist.barrier()
    assert hot.recv(x, source, None, True, 0) is None
    dist.recv(np.zeros(3), source)


UNUSUAL = {
    "a list": [1.0, 2.0],
    "a view with gaps": np.zeros(8)[::2],
    "another order": np.zeros((2, 3)).T,
    "other bytes first": np.zeros(3, ">f8"),
    "a dtype of ours": np.zeros(3, "S3"),
    "too large": np.zeros((1 << 20) + 1),
    "not aligned": np.zeros(17, "i1")[1:].view("f8"),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_an_unusual_array_is_left_to_python(what, to, source):
    assert hot.send(UNUSUAL[what], to, None, True, 0) is None
    assert hot.recv(UNUSUAL[what], source, None, True, 0) is None


UNUSUAL_ARGUMENTS = [
    (-1, None, True, 0),
    (True, None, True, 0),
    (1 << 70, None, True, 0),
    (0, "world", True, 0),
    (0, None, 1, 0),
    (0, None, True, -1),
    (0, None, True, True),
    (0, None, True, 1 << 70),
    (0, None, True, 1 << 40),
    (0, None, True, None),
    (0, None, True),
]


@pytest.mark.parametrize("args", UNUSUAL_ARGUMENTS)
def test_unusual_arguments_are_left_to_python(args):
    assert hot.send(np.zeros(1), *args) is None
    assert hot.recv(np.zeros(1), *args) is None
    assert hot.send_object_list([1], *args) is None
    assert hot.recv_object_list([1], *args) is None


def test_a_thread_and_a_listener_are_left_to_python(to, source):
    def both():
        return hot.send(np.ones(1), to, None, True, 0), hot.recv(np.ones(1), source, None, True, 0)

    found, end = [], dist.subscribe(lambda event: None)
    found.append(both())
    end()
    thread = threading.Thread(target=lambda: found.append(both()))
    thread.start()
    thread.join()
    assert found == [(None, None)] * 2


def test_what_a_listener_hears_of_a_small_message_is_its_beginning_and_its_end(to, source):
    heard = []
    end = dist.subscribe(lambda event: heard.append((event.name, event.phase)))
    dist.send(np.ones(1), to)
    dist.isend(np.ones(1), to).wait()
    dist.send_object_list([1], to)
    end()
    assert len(heard) == 6
    assert heard[::2] != heard[1::2]
    dist.recv(np.ones(1), source)
    dist.recv(np.ones(1), source)
    dist.recv_object_list([None], source)


# ---- large ones


@pytest.fixture
def patience(mail):
    """Let the compiled functions look for each other as often as a test says."""
    if not mail.attaches:
        pytest.skip("ranks may not read each other's memory here")
    before = mail.patience
    yield lambda looks: setattr(mail, "patience", looks)
    mail.patience = before


def test_a_large_array_whose_receiver_waits_is_copied_from_where_it_lies(patience, rank, size):
    patience(10**7)
    for one in range(size - 1):
        for sender, receiver in ((one, one + 1), (one + 1, one)):
            for shape in ((8191,), (20_000,), (3, 7, 10_000), (131_073,)):
                x = sender + np.arange(prod(shape)).reshape(shape)
                if rank == sender:
                    assert hot.send(x, receiver, None, True, 2) is DONE
                elif rank == receiver:
                    got = np.zeros(shape, int)
                    assert hot.recv(got, sender, None, True, 2).source == sender
                    np.testing.assert_array_equal(got, x)


UNWANTED = {"size": (np.zeros(20_001), 0), "tag": (np.zeros(20_000), 1), "dtype": ("i8", 0)}


@pytest.mark.parametrize("what", UNWANTED)
def test_an_offer_of_another_size_tag_or_dtype_is_left_alone(what, patience, rank, size):
    patience(1000)
    wrong, tag = UNWANTED[what]
    wrong = np.zeros(20_000, wrong) if what == "dtype" else wrong
    for sender in range(size - 1):
        dist.barrier()
        if rank == sender:
            assert hot.send(np.ones(20_000), rank + 1, None, True, 0) is None
        elif rank == sender + 1:
            assert hot.recv(wrong, sender, None, True, tag) is None
            assert not wrong.any()
        dist.barrier()
        if rank == sender:
            dist.send(np.ones(20_000), rank + 1)
        elif rank == sender + 1:
            dist.recv(got := np.zeros(20_000), sender)
            assert got.all()


# ---- objects

THINGS = {"a number": 7, "a small array": np.arange(5), "nested": {"loss": (0.5, [None])}}


@pytest.mark.parametrize("what", THINGS)
def test_small_objects_are_sent_and_received_in_one_call_each(what, to, source, rank):
    sent = [rank, THINGS[what]]
    assert hot.send_object_list(sent, to, None, True, 3) is DONE
    got = [None, None]
    dist.barrier()
    work = hot.recv_object_list(got, source, None, True, 3)
    assert work.source == source
    np.testing.assert_equal(got, [source, THINGS[what]])


LARGE = {"a long string": "x" * (1 << 20), "a large array": np.arange(1 << 17)}


@pytest.mark.parametrize("what", LARGE)
def test_objects_that_do_not_fit_are_pickled_once(what, to, source):
    class Counted:
        times = 0

        def __reduce__(self):
            Counted.times += 1
            return str, ("counted",)

    work = dist.send_object_list([Counted(), LARGE[what]], to, sync_op=True)
    got = [None, None]
    dist.recv_object_list(got, source)
    work.wait()
    np.testing.assert_equal(got, ["counted", LARGE[what]])
    assert Counted.times == 1


def test_objects_of_any_rank_and_arrays_of_one_tag_do_not_meet(to, source):
    dist.send(np.ones(1), to)
    dist.send_object_list(["a list"], to)
    dist.barrier()
    got = [None]
    assert dist.recv_object_list(got).source == source
    dist.recv(x := np.zeros(1), source)
    assert (got, x[0]) == (["a list"], 1)


def test_a_list_of_another_length_is_an_error_on_the_one_who_receives_it(to, source):
    dist.send_object_list([1, 2], to)
    dist.barrier()
    got = [None]
    with pytest.raises(dist.MismatchError, match="2 objects were sent"):
        dist.recv_object_list(got, source)
    assert got == [None]


def test_what_cannot_be_pickled_is_an_error_and_nothing_is_sent(to, source):
    with pytest.raises(dist.UsageError, match="cannot be pickled"):
        dist.send_object_list([threading.Lock()], to)
    dist.send_object_list(["good"], to)
    dist.recv_object_list(got := [None], source)
    assert got == ["good"]


class Nested:
    """Waits for another message of the group while it is unpickled."""

    def __reduce__(self):
        return dist.recv, (np.zeros(1), 0)


def test_a_receive_in_the_middle_of_unpickling_is_refused(to, source):
    dist.send_object_list([Nested()], to)
    dist.barrier()
    with pytest.raises(dist.UsageError, match="in the middle of another one"):
        dist.recv_object_list([None], source)


UNUSUAL_LISTS = [(), [], (1,), None, np.zeros(1)]


@pytest.mark.parametrize("given", UNUSUAL_LISTS, ids=str)
def test_what_is_no_list_is_left_to_python(given, to, source):
    assert hot.send_object_list(given, to, None, True, 0) is None
    assert hot.recv_object_list(given, source, None, True, 0) is None


# ---- one order


def test_small_messages_and_large_ones_come_in_the_order_sent(to, source, mail):
    counts = [1, 1, mail.most // 8, 1, 200_000, 1, 1, 200_000, 1]
    works = [dist.isend(np.full(count, at), to) for at, count in enumerate(counts)]
    for at, count in enumerate(counts):
        got = np.zeros(count, int)
        dist.recv(got, source)
        assert (got == at).all()
    dist.wait_all(works)


def test_more_messages_than_a_box_holds_wait_for_no_receive(to, source):
    for at in range(3000):
        dist.send(np.array([at]), to)
    dist.barrier()
    for at in range(3000):
        dist.recv(got := np.zeros(1, int), source)
        assert got[0] == at


def test_a_receive_that_was_posted_before_gets_the_earlier_message(to, source):
    first = dist.irecv(early := np.zeros(1), source)
    dist.barrier()
    assert hot.recv(np.zeros(1), source, None, True, 0) is None
    dist.barrier()
    for number in (1.0, 2.0):
        dist.send(np.full(1, number), to)
    dist.recv(late := np.zeros(1), source)
    first.wait()
    assert (early[0], late[0]) == (1, 2)


def test_a_message_of_another_size_is_an_error_that_names_both_and_stays(to, source, rank):
    dist.send(np.ones(3), to)
    for wrong in (np.zeros(2), np.zeros(4)):
        with pytest.raises(dist.MismatchError, match=f"rank {source} sent 24 bytes of float64"):
            dist.recv(wrong, source)
        assert not wrong.any()
    dist.recv(got := np.zeros(3), source)
    assert got.all()


def test_a_receive_whose_time_is_over_takes_nothing_that_comes_after(to, source):
    group = dist.new_group(timeout=0.05)
    with pytest.raises(dist.CollectiveTimeout, match="got no message within"):
        dist.recv(np.zeros(1), source, group)
    dist.barrier()
    dist.send(np.ones(1), to, group)
    dist.barrier()
    dist.recv(got := np.zeros(1), source, group)
    assert got[0] == 1
    dist.barrier()
    dist.destroy_process_group(group)


# ---- whatever the others do


class Program:
    """Messages between all ranks that all draw alike; how a rank goes about them, it draws alone.

    A rank waits for a message only when it has sent all its own before it, so none waits for ever.
    A message consists of its number, in the order of all.
    """

    TAGS = 6
    OBJECTS = 5
    """The tag of messages that are lists of one array."""

    def __init__(self, rank, size, count, most, seed):
        alike = np.random.default_rng(seed)
        self.own = np.random.default_rng([seed, rank + 1])
        self.counts = [1, 0, most // 8, most // 8 + 1, 20_000, 1]
        """Numbers in a message, by tag: so who receives from any rank knows how large it is."""
        pairs = alike.integers(size, size=(count, 2)).tolist()
        tags = alike.choice(self.TAGS, size=count, p=[0.4, 0.2, 0.1, 0.07, 0.03, 0.2]).tolist()
        drawn = [(at, *pair, tag) for at, (pair, tag) in enumerate(zip(pairs, tags, strict=True))]
        self.to_send = deque((at, to, tag) for at, by, to, tag in drawn if by == rank)
        self.to_get = defaultdict(deque)
        for at, by, to, tag in drawn:
            if to == rank:
                self.to_get[by, tag].append(at)
        self.works, self.checks = [], []

    def run(self):
        while self.to_send or self.to_get:
            chance = self.own.integers(40)
            if chance == 0:
                time.sleep(1e-4)
            with WAYS.get(chance, nullcontext)():
                sends = self.to_send and (not self.to_get or self.own.integers(2))
                self.send() if sends else self.receive()
            if len(self.checks) == 30:
                self.wait()
        self.wait()

    def wait(self):
        dist.wait_all([*self.works, *(work for work, *_ in self.checks)])
        for _, *received in self.checks:
            check(*received)
        self.works, self.checks = [], []

    def send(self):
        at, to, tag = self.to_send.popleft()
        x = np.full(self.counts[tag], at)
        if tag == self.OBJECTS:
            self.send_object(to, at)
        elif self.own.integers(2):
            dist.send(x, to, tag=tag)
        else:
            self.works.append(dist.isend(x, to, tag=tag))

    def send_object(self, to, at):
        count, waits = self.own.choice([1, 1, 1, 1, 5000]), bool(self.own.integers(4))
        work = dist.send_object_list([np.full(count, at)], to, sync_op=waits, tag=self.OBJECTS)
        if not waits:
            self.works.append(work)

    def receive(self):
        lines = [*self.to_get]
        source, tag = lines[self.own.integers(len(lines))]
        x, way = np.full(self.counts[tag], -1), self.own.integers(4)
        while self.to_send and self.to_send[0][0] <= self.to_get[source, tag][0]:
            self.send()
        if tag == self.OBJECTS:
            got = [None]
            source = dist.recv_object_list(got, source if way else None, tag=tag).source
            check(got[0], self.take(source, tag))
            return
        if way == 0:
            work = dist.irecv(x, source, tag=tag)
            self.checks.append((work, x, self.take(source, tag)))
            return
        anyone = way == 1 and all(work.is_completed() for work, *_ in self.checks)
        work = dist.recv(x, None if anyone else source, tag=tag)
        check(x, self.take(work.source, tag))

    def take(self, source, tag):
        line = self.to_get[source, tag]
        at = line.popleft()
        if not line:
            del self.to_get[source, tag]
        return at


def check(x, at):
    assert (x == at).all(), (x[:1], at)


@contextmanager
def listened_to():
    end = dist.subscribe(lambda event: None)
    yield
    end()


WAYS = {1: switched_off, 2: listened_to}


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_whatever_is_sent_in_whatever_way_arrives_once_whole_and_in_order(count, rank, size, mail):
    Program(rank, size, count, mail.most, seed=count).run()
    dist.barrier()


@pytest.mark.skipif(
    MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="this MPI allows one thread only"
)
def test_a_thread_may_receive_what_another_sends(to, source):
    wrong = []

    def use(tag):
        try:
            for at in range(200):
                dist.send(np.full(3, at), to, tag=tag)
                dist.recv(got := np.zeros(3, int), source, tag=tag)
                assert (got == at).all()
        except BaseException as error:
            wrong.append(error)

    user = threading.Thread(target=use, args=(1,))
    user.start()
    use(2)
    user.join()
    assert not wrong
