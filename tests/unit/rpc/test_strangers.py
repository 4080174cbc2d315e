"""Who connects and is no rank: it is closed, nothing of it is unpickled, and RPC goes on."""

import contextlib
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.comm.session import require_session
from hpcdist.rpc import frames, links, reception, trust
from hpcdist.rpc.agent import AGENT, Agent
from hpcdist.rpc.frames import Parcel
from hpcdist.rpc.links import Door, door_on_node
from hpcdist.rpc.names import Directory, WorkerInfo
from hpcdist.rpc.reception import Reception
from hpcdist.rpc.switchboard import Contact, Setup

PATIENCE_S = 60
UNPICKLED = []


class Bomb:
    def __reduce__(self):
        return UNPICKLED.append, ("it was unpickled",)


class Nobody:
    """Stands for a group in the events of an agent."""

    id, ranks, flight, transport = 0, (0, 1), 0, None


def agent_of(rank, doors, contacts, token, **options):
    directory = Directory(contact.info for contact in contacts.values())
    settings = {"threads": 2, "max_threads": 4, **options}
    agent = Agent(
        Setup(
            rank,
            contacts,
            directory,
            token,
            Reception(token, rank, doors),
            settings["threads"],
            settings["max_threads"],
            Nobody,
        )
    )
    agent.open()
    return agent


def contact_of(rank, door):
    return Contact(WorkerInfo(f"worker{rank}", rank, "", 0), 0, (door.address,))


@pytest.fixture
def pair():
    """Two agents in this process, of which the first is attacked."""
    UNPICKLED.clear()
    token = trust.random_token()
    doors = [door_on_node(), door_on_node()]
    contacts = {rank: contact_of(rank, door) for rank, door in enumerate(doors)}
    agents = [agent_of(rank, [doors[rank]], contacts, token) for rank in (0, 1)]
    yield agents
    assert agents[1].call(0, max, (1, 2)).wait(PATIENCE_S) == 2  # it goes on
    assert not UNPICKLED
    for agent in agents:
        agent.close("the test has ended")


@pytest.fixture
def descriptors():
    """Nothing is left open by the test."""

    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    yield
    until = time.monotonic() + PATIENCE_S
    while count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert count() <= before


@pytest.fixture
def descriptors_for():
    """Allow this process so many descriptors, for the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(count):
        soft, hard = before
        if hard != resource.RLIM_INFINITY and hard < count:
            pytest.skip(f"the limit of descriptors is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def stranger(agent):
    (address, *_) = agent.reception.addresses
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address.at)  # blocks while others wait to be let in
    sock.settimeout(PATIENCE_S)
    return sock


def told_nothing_but_the_greeting(sock):
    """Return whether the connection is closed after a greeting."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(1 << 16):
            came += more
    sock.close()
    return len(came) == trust.GREETING_BYTES


def bomb_frame():
    return b"".join(frames.parts(frames.CALL, 1, Parcel(pickle.dumps(Bomb()))))


def greeting_of(sock):
    return sock.recv(trust.GREETING_BYTES, socket.MSG_WAITALL)


WRITTEN = {
    "garbage": lambda greeting: os.urandom(1000),
    "a call": lambda greeting: bomb_frame() * 3,
    "web": lambda greeting: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10,
    "its own words": lambda greeting: greeting + greeting,
    "wrong token": lambda greeting: (
        trust.Response(trust.random_token(), 1, 0, greeting).answer + bomb_frame()
    ),
}


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_strangers_write_is_refused(pair, kind, caplog):
    with caplog.at_level(logging.WARNING, "hpcdist.rpc"), stranger(pair[0]) as sock:
        sock.sendall(WRITTEN[kind](greeting_of(sock)))
        with contextlib.suppress(ConnectionError):
            assert not sock.recv(1000)
        assert "refused a connection" in caplog.text
    assert pair[0].reception.refused == 1


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("nbytes", [0, 1, trust.ANSWER_BYTES - 1])
def test_half_an_answer_is_refused(pair, nbytes):
    with stranger(pair[0]) as sock:
        sock.sendall(bytes(nbytes))
        sock.shutdown(socket.SHUT_WR)
        assert told_nothing_but_the_greeting(sock)
    assert pair[0].reception.refused == 1


def test_nobody_waits_before_the_door_of_a_rank_that_makes_and_takes_no_more_calls():
    for _ in range(20):
        door, token = door_on_node(), trust.random_token()
        agent = agent_of(0, [door], {0: contact_of(0, door)}, token)
        stranger(agent).close()
        agent.close("the test has ended")
        with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
            late.connect(door.address.at)


@pytest.mark.usefixtures("descriptors")
def test_who_does_not_answer_is_sent_away(monkeypatch, pair):
    monkeypatch.setattr(reception, "ANSWER_S", 0.05)
    assert told_nothing_but_the_greeting(stranger(pair[0]))
    assert pair[0].reception.waiting == 0


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize(
    ("connections", "open_at_once"),
    [
        (600, 300),
        pytest.param(10_000, 300, marks=pytest.mark.thorough),
        pytest.param(10_000, 10_000, marks=pytest.mark.thorough),
    ],
)
def test_a_flood_of_connections_is_held_to_a_bound_and_ranks_get_in(
    pair, connections, open_at_once, descriptors_for
):
    descriptors_for(open_at_once + 1000)
    flood, most = [], 0
    for _ in range(connections):
        flood.append(stranger(pair[0]))
        most = max(most, pair[0].reception.waiting)
        if len(flood) == open_at_once < connections:
            flood.pop(0).close()
    assert most <= reception.HELD
    assert pair[1].call(0, max, (1, 2)).wait(PATIENCE_S) == 2
    for sock in flood:
        sock.close()
    until = time.monotonic() + PATIENCE_S
    while pair[0].reception.waiting and time.monotonic() < until:
        time.sleep(0.01)
    assert pair[0].reception.waiting == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_sent_away_without_a_word(pair):
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            os._exit(0 if stranger(pair[0]).recv(100) == b"" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert pair[0].reception.refused == 1


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("kind", ["garbage", "half a frame", "a lying length"])
def test_a_rank_that_breaks_off_in_a_frame_fails_its_own_calls_only(pair, kind):
    token = pair[0]._board._token
    link = links.connect(token, 1, 0, pair[0].reception.addresses)
    head = frames.parts(frames.CALL, 1, Parcel(b"x" * 100))
    raw = {
        "garbage": b"\xff" * 200,
        "half a frame": head[0] + b"x" * 50,
        "a lying length": frames._HEADER.pack(b"hRPC", 1, 1 << 30, 0, 1, 1 << 60),
    }[kind]
    link._socket.sendall(raw)
    if kind == "half a frame":
        link._socket.shutdown(socket.SHUT_WR)
    link._socket.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        assert link._socket.recv(100) == b""
    link.close()


def test_what_listens_instead_of_a_rank_is_not_trusted():
    impostor = Door(links.Address("127.0.0.1"))
    impostor.socket.setblocking(True)
    token = trust.random_token()

    def pretend():
        sock, _ = impostor.socket.accept()
        sock.sendall(trust.Challenge(trust.random_token(), 0).greeting)
        sock.recv(trust.ANSWER_BYTES, socket.MSG_WAITALL)
        sock.sendall(bytes(trust.WELCOME_BYTES))
        sock.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(links.LinkError, match="does not know the token"):
        links.connect(token, 1, 0, [impostor.address])
    thread.join()
    impostor.close()


# ---- ranks that die


CHILD = """
import sys, time
sys.path[:0] = {path!r}
from test_strangers import *
{first}
token = bytes.fromhex({token!r})
door = door_on_node()
contacts = {{1: contact_of(1, door)}}
agent = agent_of(1, [door], contacts, token)
print(door.address.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(request):
    """An agent here and one in another process, which the test may kill.

    The other process runs the lines that are the parameter, if there is one, before all others.
    """
    first = getattr(request, "param", "")
    token = trust.random_token()
    path = [os.path.dirname(__file__)]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=path, token=token.hex(), first=first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    there = links.Address(name=child.stdout.readline().strip())
    door = door_on_node()
    contacts = {
        0: contact_of(0, door),
        1: Contact(WorkerInfo("worker1", 1, "", 0), 0, (there,)),
    }
    agent = agent_of(0, [door], contacts, token)
    yield agent, child
    agent.close("the test has ended")
    child.send_signal(signal.SIGCONT)
    child.kill()
    child.communicate()


def test_a_rank_that_is_killed_fails_every_pending_call_and_later_ones(other):
    agent, child = other
    assert agent.call(1, os.getpid).wait(PATIENCE_S) == child.pid
    futures = [agent.call(1, time.sleep, (PATIENCE_S,)) for _ in range(20)]
    child.kill()
    for future in futures:
        with pytest.raises(
            dist.RemoteError, match=r"rank 1 \(worker1\) has not answered"
        ) as caught:
            future.wait(PATIENCE_S / 2)
        assert caught.value.rank == 1
    child.wait()
    with pytest.raises(dist.RemoteError, match="has not answered"):
        agent.call(1, os.getpid).wait(PATIENCE_S)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "other", ["resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))"], indirect=True
)
def test_a_rank_that_has_no_descriptor_left_goes_on(other):
    agent, child = other
    assert agent.call(1, os.getpid).wait(PATIENCE_S) == child.pid
    (address,) = agent._board._contacts[1].on_node
    flood = []
    for _ in range(200):
        flood.append(socket.socket(socket.AF_UNIX))
        flood[-1].connect(address.at)
    assert agent.call(1, os.getpid).wait(PATIENCE_S) == child.pid
    agent._board.link_to(1).break_off("the test wants another one")
    while True:
        try:
            assert agent.call(1, os.getpid).wait(PATIENCE_S) == child.pid
        except dist.RemoteError:  # while this rank has not noticed yet
            continue
        break
    for sock in flood:
        sock.close()


def stop(child):
    """Stop a process; return when none of its threads runs any more."""
    child.send_signal(signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        tasks = Path(f"/proc/{child.pid}/task").iterdir()
        with contextlib.suppress(OSError):  # a thread may end in between
            stats = [(task / "stat").read_text().rpartition(")")[2].split() for task in tasks]
            if all(state == "T" for state, *_ in stats):
                return
        time.sleep(0.01)
    raise AssertionError("the process does not stop")


def test_a_rank_that_is_stopped_is_named_when_the_time_is_over(other):
    agent, child = other
    assert agent.call(1, max, (1, 2)).wait(PATIENCE_S) == 2
    stop(child)
    large = bytes(50_000_000)  # more than its connection takes
    for args in ((1, 2), (large, b"")):
        with pytest.raises(dist.CollectiveTimeout, match=r"rank 1 \(worker1\)") as caught:
            agent.call(1, max, args, timeout=0.3).wait()
        assert caught.value.missing == (1,)
    child.send_signal(signal.SIGCONT)
    assert agent.call(1, np.sum, (np.ones(300_000),)).wait(PATIENCE_S) == 300_000


def test_a_call_waits_no_longer_than_its_limit_for_a_connection(other):
    agent, child = other
    stop(child)
    with pytest.raises(dist.CollectiveTimeout, match=r"rank 1 \(worker1\).*nothing was sent"):
        agent.call(1, max, (1, 2), timeout=0.3).wait(PATIENCE_S / 2)
    child.send_signal(signal.SIGCONT)
    assert agent.call(1, max, (1, 2)).wait(PATIENCE_S) == 2


def test_a_rank_that_interrupts_itself_while_it_sends_connects_anew(other, monkeypatch):
    agent, child = other
    assert agent.call(1, max, (1, 2)).wait(PATIENCE_S) == 2

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(links.Link, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            agent.call(1, max, (1, 2))
    assert agent.call(1, os.getpid).wait(PATIENCE_S) == child.pid


def test_a_function_whose_module_is_not_there_is_an_error_that_says_so(other):
    agent, _ = other
    module = type(sys)("only_here")
    exec("def f(): return 1", module.__dict__)
    sys.modules["only_here"] = module
    try:
        with pytest.raises(ModuleNotFoundError, match="only_here") as caught:
            agent.call(1, module.f).wait(PATIENCE_S)
        assert isinstance(caught.value, dist.RemoteError)
        assert agent.call(1, max, (1, 2)).wait(PATIENCE_S) == 2
    finally:
        del sys.modules["only_here"]


def test_simulated_ranks_leave_no_descriptor_and_no_thread():
    def program():
        dist.rpc.init_rpc()
        dist.rpc.rpc_sync(1 - dist.get_rank(), max, (1, 2))
        dist.barrier()
        return require_session()[AGENT]

    dist.simulate(2, program)  # what is made once
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for agent in dist.simulate(2, program):
        assert agent.closed  # its rank has ended without shutdown
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and (
        threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > files
    ):
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
