"""Programs that hang, each in its own way: `hpcdist ps` names the rank to blame, and the line.

The line that the blamed rank called last, or is in, ends in ``# blamed``; that at which others wait
for it in ``# waits``.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import NamedTuple

import pytest
from environments import ENVIRONMENTS, ROOT

from hpcdist.diagnostics.flight import jobs
from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site
from hpcdist.transport.flight import rings

RANKS = 3
PATIENCE_S = 60.0

HEAD = """
import os, re, signal, sys, threading, time
import numpy as np
import hpcdist as dist
world = dist.init_parallel_env(timeout=120)
rank = world.rank
x, large = np.ones(4), np.ones(1 << 20)
def forever():
    time.sleep(600)
"""


class Hung(NamedTuple):
    """A program, the ranks that it hangs because of, and settings of its job."""

    blamed: tuple[int, ...]
    text: str
    env: tuple[tuple[str, str], ...] = ()
    head: str = HEAD


PROGRAMS = {
    "a rank sleeps": Hung((1,), """
for step in range(5):
    dist.all_reduce(x)  # blamed
if rank == 1:
    forever()
dist.broadcast(x, 1)  # waits
"""),
    "a rank holds the interpreter": Hung((2,), """
dist.barrier()  # blamed
if rank == 2:
    re.match("(a+)+$", "a" * 60 + "b")
dist.all_reduce(large)  # waits
"""),
    "a rank is stopped": Hung((0,), """
dist.barrier()  # blamed
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(x)  # waits
"""),
    "a rank is killed": Hung((1,), """
dist.barrier()  # blamed
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)  # waits
"""),
    "two groups are used in another order": Hung((0, 1), """
one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
if rank < 2:
    for group in (one, two) if rank == 0 else (two, one):
        dist.all_reduce(x, group=group)  # waits # blamed
forever()
"""),
    "nobody sends": Hung((0,), """
dist.barrier()  # blamed
if rank == 2:
    dist.recv(x, src=0)  # waits
forever()
"""),
    "all receive first": Hung((0, 1, 2), """
dist.recv(x, src=(rank + 1) % 3)  # waits # blamed
dist.send(x, dst=(rank - 1) % 3)
"""),
    "a member does not make the group": Hung((2,), """
dist.barrier()  # blamed
if rank != 2:
    dist.new_group([0, 1, 2])  # waits
forever()
"""),
    "an asynchronous operation is waited for": Hung((0,), """
dist.barrier()  # blamed
if rank:
    work = dist.all_reduce(large, sync_op=False)
    work.wait()  # waits
forever()
"""),
    "a plan is not started": Hung((1,), """
plan = dist.plan_all_reduce(x)
dist.barrier()  # blamed
if rank != 1:
    work = plan.start()
    work.wait()  # waits
forever()
"""),
    "a function does not return": Hung((1,), """
def sleeps():
    time.sleep(600)
dist.rpc.init_rpc(f"worker{rank}")
dist.barrier()  # blamed
if rank == 0:
    future = dist.rpc.rpc_async("worker1", sleeps)
    future.wait()  # waits
forever()
"""),
    "a rank calls a function and forgets the others": Hung((2,), """
def sleeps():
    time.sleep(600)
dist.rpc.init_rpc(f"worker{rank}")
dist.all_reduce(x)  # blamed
if rank == 2:
    forever()
if rank == 1:
    dist.rpc.rpc_sync("worker2", sleeps)
dist.barrier()  # waits
"""),
    "a rank reads what nobody writes": Hung((2,), """
dist.barrier()  # blamed
if rank == 2:
    os.read(os.pipe()[0], 1)
dist.reduce_scatter(x[:1], [x[:1]] * 3)  # waits
"""),
    "a rank waits for its own lock": Hung((0,), """
lock = threading.Lock()
dist.barrier()  # blamed
lock.acquire()
if rank == 0:
    lock.acquire()
dist.scatter(x, [x] * 3 if rank == 0 else None, src=0)  # waits
"""),
    "nobody takes a large message": Hung((1,), """
dist.barrier()  # blamed
if rank == 0:
    dist.send(large, dst=1)  # waits
forever()
""", (("HPCDIST_EARLY_MB", "1"),)),
    "objects of one are missing": Hung((0,), """
dist.barrier()  # blamed
if rank == 0:
    forever()
dist.all_gather_object([], rank)  # waits
"""),
    "a chain of groups": Hung((2,), """
pair = dist.new_group([1, 2])
dist.alltoall_single(np.ones(3), np.ones(3))  # blamed
if rank == 0:
    dist.barrier()
if rank == 1:
    dist.all_reduce(x, group=pair)  # waits
forever()
"""),
    "a loop is too short on one rank": Hung((0, 1), """
for step in range(4 if rank == 1 else 5):
    dist.all_reduce(x)  # waits
if rank == 1:
    dist.recv(x, src=0)  # blamed
forever()
"""),
    "a rank does not end its block": Hung((2,), """
dist.barrier()  # blamed
with dist.together():
    if rank == 2:
        forever()
forever()
"""),
    "several receives are waited for": Hung((2,), """
dist.barrier()  # blamed
if rank == 2:
    forever()
works = [dist.irecv(np.ones(4), src=2) for _ in range(3)]
dist.wait_all(works)  # waits
"""),
    "a batch of messages": Hung((1,), """
dist.barrier()  # blamed
if rank == 0:
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])
    works[0].wait()  # waits
forever()
"""),
    "a coroutine waits": Hung((1,), """
import asyncio
dist.barrier()  # blamed
async def main():
    await dist.all_reduce(x, sync_op=False)  # waits
if rank != 1:
    asyncio.run(main())
forever()
"""),
    "a rank does not start": Hung((2,), """
world = dist.init_parallel_env()  # waits
""", head="""
import os, time
import hpcdist as dist
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "2":
    time.sleep(600)
"""),
    "torch's own functions are called": Hung((1,), """
import torch, torch.distributed as tdist
import hpcdist.torch
tdist.init_process_group("hpcdist")
tensor = torch.ones(4)
tdist.all_reduce(tensor)  # blamed
if rank == 1:
    forever()
tdist.all_reduce(tensor)  # waits
"""),
    "a loop of JAX waits": Hung((1,), """
import jax, hpcdist.jax as hj
def body(i, x):
    jax.debug.callback(lambda i: forever() if i == 2 and rank == 1 else None, i, ordered=True)
    return hj.all_reduce(x)  # waits # blamed
jax.jit(lambda x: jax.lax.fori_loop(0, 5, body, x))(1.0)
"""),
    "a rank does not save": Hung((2,), """
import tempfile
dist.barrier()  # blamed
if rank != 2:
    dist.checkpoint.save({"x": x}, tempfile.gettempdir() + "/hung")  # waits
forever()
"""),
    "a rank does not commit": Hung((0,), """
memory = dist.Memory({"x": x})
memory.commit(0)  # blamed
if rank:
    memory.commit(1)  # waits
forever()
"""),
    "an exception is swallowed": Hung((1,), """
try:
    for step in range(9):
        if rank == 1 and step == 5:
            raise ValueError("a mistake")
        dist.all_reduce(x)  # waits # blamed
except ValueError:
    forever()
"""),
    "a stream waits": Hung((2,), """
dist.barrier()  # blamed
if rank != 2:
    task = dist.stream.all_reduce(large, sync_op=False)
    task.wait()  # waits
forever()
"""),
}  # fmt: skip

IN_TEST_ALL = ("a rank holds the interpreter",)
"""The others have their like in tests of the analysis."""

pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")


def _rows():
    for name, hung in PROGRAMS.items():
        mark = pytest.mark.thorough if name in IN_TEST_ALL else pytest.mark.slow
        yield pytest.param(hung, marks=mark, id=name)


@pytest.fixture
def start(tmp_path):
    """Start a program on three ranks; end what is left of it, with what its ranks recorded."""
    environ = next(iter(ENVIRONMENTS.values()))
    started = []

    def start(hung):
        script = tmp_path / "hung.py"
        script.write_text(hung.head + hung.text)
        options = Options((sys.executable, str(script)), nprocs=RANKS, here=True, label=False)
        command = build_command(options, find_site(environ), environ)
        env = {name: value for name, value in environ.items() if name not in command.unset}
        env |= {**command.env, **dict(hung.env), "PYTHONPATH": str(ROOT)}
        with (tmp_path / "log").open("w") as log:
            job = subprocess.Popen(
                command.argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        started.append(job)
        return job, script

    yield start
    for job in started:
        ranks = _children(job.pid)
        os.killpg(job.pid, signal.SIGKILL)  # first, as it ends the others when one of them dies
        job.wait()
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in rings.find_rings():  # of this job, whose ranks were killed
            if str(tmp_path).encode() in (rings.read_ring(path) or b""):
                rings.remove(path)


def _children(pid):
    """Return the processes that a launcher has started, which outlive it where they are stopped."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def _told(job):
    """Return what is said of a job by now, and who is to blame."""
    found = jobs.choose(jobs.jobs_of(jobs.snapshots()), str(job.pid))
    if found is None:
        return "", ()
    return jobs.report(found), tuple(jobs.explained(found).causes)


def lines_with(script, tag):
    lines = script.read_text().splitlines()
    return [f"{script}:{at}" for at, line in enumerate(lines, 1) if f"# {tag}" in line]


@pytest.mark.parametrize("hung", list(_rows()))
def test_the_rank_to_blame_is_named_with_its_line(start, hung):
    job, script = start(hung)
    wanted = [*lines_with(script, "blamed"), *lines_with(script, "waits")]
    assert wanted
    until = time.monotonic() + PATIENCE_S
    words, causes = "", ()
    while time.monotonic() < until:
        words, causes = _told(job)
        if causes == hung.blamed and all(line in words for line in wanted):
            break
        time.sleep(0.2)
    assert causes == hung.blamed, words
    for line in wanted:
        assert line in words


@pytest.mark.thorough
def test_the_watchdog_of_the_lowest_waiting_rank_says_it_once(start, tmp_path):
    hung = PROGRAMS["a rank is stopped"]._replace(env=(("HPCDIST_STALL_S", "3"),))
    _, script = start(hung)
    until = time.monotonic() + PATIENCE_S
    while "has waited" not in (tmp_path / "log").read_text() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(6)  # who would say it again, or on another rank, does so by now
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "has waited" in line]
    assert len(said) == 1, said
    assert "[rank 1] hpcdist has waited" in said[0]
    assert "rank 0 is stopped by a signal" in said[0]
    assert all(line in said[0] for line in lines_with(script, "blamed"))
