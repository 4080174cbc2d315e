"""Ranks of RPC that are processes of their own, without MPI: a test may kill them, or stop them.

The test itself is rank 0. Nothing but the meeting is left out: the processes get from the command
line what ranks of a job tell each other in `init_rpc`.
"""

import contextlib
import itertools
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import hpcdist as dist
from hpcdist.comm.session import require_session
from hpcdist.rpc.agent import AGENT, Agent
from hpcdist.rpc.links import Address, Door
from hpcdist.rpc.names import Directory, WorkerInfo
from hpcdist.rpc.reception import Reception
from hpcdist.rpc.switchboard import Contact, Setup

TESTS = Path(__file__).parent


def take_part(me, size, token):
    """Make this simulated rank rank `me` of `size`."""
    addresses = [Address(name=f"hpcdist-{token[:16]}-{rank}") for rank in range(size)]
    infos = [WorkerInfo(f"worker{rank}", rank, "127.0.0.1", 0) for rank in range(size)]
    contacts = {
        info.rank: Contact(info, 0, (address,))
        for info, address in zip(infos, addresses, strict=True)
    }
    session, secret = require_session(), bytes.fromhex(token)
    session[AGENT] = Agent(
        Setup(
            me,
            contacts,
            Directory(infos),
            secret,
            Reception(secret, me, [Door(addresses[me])]),
            threads=4,
            max_threads=16,
            group=session.world,
        )
    )
    session[AGENT].open()
    return session[AGENT]


class Others:
    """The processes that are the other ranks."""

    def __init__(self, count):
        self.token = secrets.token_hex(32)
        self.size = count + 1
        self.processes = {
            rank: subprocess.Popen(
                [sys.executable, __file__, str(rank), str(self.size), self.token],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(1, count + 1)
        }
        for process in self.processes.values():
            assert process.stdout.readline() == b"ready\n"

    def kill(self, rank):
        self.processes[rank].kill()

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.communicate()


@contextlib.contextmanager
def others(count):
    """Start other ranks, and end them."""
    started = Others(count)
    try:
        yield started
    finally:
        started.end()


def as_rank_0(started, function):
    """Run a function as rank 0, beside the others."""

    def run():
        take_part(0, started.size, started.token)
        return function()

    return dist.simulate(1, run)[0]


def main(me, size, token):
    def run():
        take_part(int(me), int(size), token)
        print("ready", flush=True)
        sys.stdin.read()  # until the test ends it, or is over

    dist.simulate(1, run)


# ---- what the other ranks do


def pid():
    return os.getpid()


def sleep_for_ever():
    threading.Event().wait()


def add(a, b):
    return a + b


COUNT = itertools.count(1)


def count():
    """Return how often this has been called here."""
    return next(COUNT)


class Place:
    def pid(self):
        return os.getpid()

    def sleep(self):
        threading.Event().wait()


SERVES = threading.Event()


@dist.rpc.inline
def has_served():
    return SERVES.is_set()


def serve_others():
    """Serve; return which rank has gone."""
    SERVES.set()
    try:
        dist.rpc.serve()
    except dist.RemoteError as error:
        return error.rank
    return None


if __name__ == "__main__":
    import rpc_processes  # functions are named by this module on all ranks

    rpc_processes.main(*sys.argv[1:])
