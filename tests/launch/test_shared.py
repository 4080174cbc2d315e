"""Shared memory when a rank is killed, and the contract without the kernel and on several nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import ENVIRONMENTS, EVERY_MPI, ROOT
from tiers import first_of

from hpcdist.launch.command import Family, Options, build_command
from hpcdist.launch.launchers import find_site
from hpcdist.transport.shm.kernel import compiled

RANKS = 3
SOON_S = 40.0
"""Far above the second that an end takes, below the time limit of an operation."""

KEEP_THE_REST = {Family.OPENMPI: ["--enable-recovery"]}
"""What makes a launcher leave the other ranks alone when one is killed.

MPICH's has `-disable-auto-cleanup`, but ends them now and then all the same.
"""

STREAM = """
import os, signal, sys, threading, time
import numpy as np
import hpcdist as dist

rank = dist.init_parallel_env(timeout=60).rank
x = np.ones(8 << 10)
large, shared = np.ones(512 << 10), dist.zeros(512 << 10)
operations = {
    "all_reduce of an ordinary array": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
    "all_reduce of a large ordinary array": lambda: dist.all_reduce(large, dist.ReduceOp.MAX),
    "all_reduce of a shared array": lambda: dist.all_reduce(shared, dist.ReduceOp.MAX),
    "barrier": dist.barrier,
}
operation = operations[sys.argv[1]]
operation()
if rank == 1:
    with open("failing", "w") as moment:  # a launcher may drop the last words of who is killed
        moment.write(str(time.time() + 0.3))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        operation()
except dist.HpcdistError as error:
    with open(f"rank.{rank}", "w") as words:
        words.write(f"{type(error).__name__} {getattr(error, 'rank', None)}: {error}")
    time.sleep(1)
    os._exit(3)
"""


pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")


def run(environ, program, folder, keep_the_rest=False, **settings):
    """Run a program on three ranks to its end; return its exit status and what it printed."""
    site = find_site(environ)
    options = Options((sys.executable, *program), nprocs=RANKS, here=True, label=False)
    command = build_command(options, site, environ)
    launcher, *rest = command.argv
    kept = KEEP_THE_REST[site.family] if keep_the_rest else []
    env = {name: value for name, value in environ.items() if name not in command.unset}
    # where /dev/shm is too small it would use TCP, and end every rank when one closes a socket
    settings = {"OMPI_MCA_btl_sm_backing_directory": str(folder), **settings}
    job = subprocess.Popen(
        [launcher, *kept, *rest],
        env={**env, **command.env, "PYTHONPATH": str(ROOT), **settings},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = job.communicate(timeout=300)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    return job.returncode, out


def own_names():
    """Return what of ours has a name in /dev/shm: nothing ever should."""
    return list(Path("/dev").glob("shm/*hpcdist*"))


BECOMES_UNREADABLE = """
import ctypes, sys
import numpy as np
import hpcdist as dist

PTRACE, VERSION, DUMPABLE = 19, 0x20080522, 4
libc = ctypes.CDLL(None, use_errno=True)


def drop(which):  # capabilities, of a mask of 32
    head, able = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, able) == 0
    able[:3] = [each & ~which for each in able[:3]]
    assert libc.capset(head, able) == 0


drop(1 << PTRACE)  # else whoever is root reads everything
rank, size = (dist.init_parallel_env(timeout=30).rank, dist.get_world_size())
total, last = size * (size + 1) / 2, size - 1


def operations(count):
    own, each, given = np.full(count, rank + 1.0), np.empty((size, count)), np.empty((size, count))
    given[:] = 10 * rank + np.arange(size)[:, None]
    told, text, ahead = [], [str(rank) * 8 * count], np.empty(count)
    dist.all_gather(each, own)
    assert (each.T == np.arange(1, size + 1)).all()
    dist.alltoall(each, given)
    assert (each.T == 10 * np.arange(size) + rank).all()
    dist.scatter(own, list(given) if rank == last else None, last)
    assert (own == 10 * last + rank).all()
    for root in range(size):
        own[:] = rank + 1
        dist.gather(own, each if rank == root else None, root)
        assert rank != root or (each.T == np.arange(1, size + 1)).all()
        dist.broadcast(own, root)
        assert (own == root + 1).all()
        dist.broadcast_object_list(text, root)
        assert text == [str(root) * 8 * count]
        text = [str(rank) * 8 * count]
    dist.all_gather_object(told, text[0])
    assert [words[-1] for words in told] == [str(other) for other in range(size)]
    for reduce in (dist.all_reduce, lambda x: dist.reduce(x, last)):
        own[:] = rank + 1
        reduce(own)
        assert reduce is not dist.all_reduce and rank != last or (own == total).all()
    dist.reduce_scatter(own, np.full((size, count), rank + 1.0))
    assert (own == total).all()
    for _ in range(3):
        work = dist.irecv(ahead, (rank - 1) % size)
        dist.send(np.full(count, rank + 0.5), (rank + 1) % size)
        work.wait()
        assert (ahead == (rank - 1) % size + 0.5).all()


sizes = (10_000, 200_000)
for count in sizes:
    operations(count)
if rank == 1 and sys.argv[1] == "it cannot be read":
    assert libc.prctl(DUMPABLE, 0, 0, 0, 0) == 0
if rank == 1 and sys.argv[1] == "it may not read":
    drop(0xFFFFFFFF)
for count in sizes:
    operations(count)
print("all right")
"""


@pytest.mark.parametrize("change", first_of(["it cannot be read", "it may not read"]))
@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_a_rank_whose_memory_becomes_unreadable_goes_other_ways_with_the_others(
    mpi, change, tmp_path
):
    script = tmp_path / "becoming.py"
    script.write_text(BECOMES_UNREADABLE)
    # MPICH reads the memory of other processes, too, and fails where it may not any more
    settings = {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}
    code, out = run(ENVIRONMENTS[mpi], (str(script), change), tmp_path, **settings)
    assert (code, out.count("all right")) == (0, RANKS), out


FAILS_WHILE_IT_READS = """
import os, signal, sys, time
import numpy as np
import hpcdist as dist
from hpcdist.comm.exchanges import exchange
from hpcdist.transport.call.call import Give, Read
from hpcdist.transport.mpi import intranode_boxes

group = dist.init_parallel_env()
dist.barrier()
group = dist.new_group(timeout=60 if sys.argv[1] == "dies" else 3)
rank, size = group.rank, group.nranks
shape, whole = (size << 20,), (slice(0, size << 20),)
send, recv = dist.zeros(shape), dist.zeros(shape)
reads = tuple(Read(each, shape, whole, whole, each > 0) for each in range(size))
gives = tuple(Give(each, whole) for each in range(size))
dist.barrier()
if rank == 1:
    with open("failing", "w") as moment:
        moment.write(str(time.time()))
    dies = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    intranode_boxes.fill = dies if sys.argv[1] == "dies" else lambda *_: time.sleep(60)
options = {"rule_op": dist.ReduceOp.SUM, "key": 1, "words": "sums of all", "group": group}
try:
    exchange(send, recv, reads, gives, **options)
except dist.HpcdistError as error:
    with open(f"rank.{rank}", "w") as words:
        words.write(f"{type(error).__name__} {getattr(error, 'rank', None)}: {error}")
    time.sleep(2)
    os._exit(3)
"""


@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_who_is_killed_while_it_reads_what_others_send_is_an_error_on_them(mpi, tmp_path):
    environ = ENVIRONMENTS[mpi]
    if find_site(environ).family not in KEEP_THE_REST:
        pytest.skip("no option of this launcher keeps the other ranks")
    script = tmp_path / "reading.py"
    script.write_text(FAILS_WHILE_IT_READS)
    _, out = run(environ, (str(script), "dies"), tmp_path, keep_the_rest=True)
    failed_at = float((tmp_path / "failing").read_text())
    assert time.time() - failed_at < SOON_S
    told = {path.name: path.read_text() for path in tmp_path.glob("rank.*")}
    assert sorted(told) == ["rank.0", "rank.2"], out
    for words in told.values():
        assert words.startswith("RankFailure 1: rank 1 died during exchange(sums of all"), words


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_who_stops_while_it_reads_what_others_send_is_named_by_them(mpi, tmp_path):
    script = tmp_path / "reading.py"
    script.write_text(FAILS_WHILE_IT_READS)
    code, out = run(ENVIRONMENTS[mpi], (str(script), "stops"), tmp_path)
    assert code != 0
    told = {path.name: path.read_text() for path in tmp_path.glob("rank.*")}
    assert sorted(told) == ["rank.0", "rank.2"], out
    for words in told.values():
        assert words.startswith("CollectiveTimeout None: exchange(sums of all"), words
        assert "missing ranks 1 did not proceed within 3 s" in words


READS_FROM_THE_DEAD = """
import os, signal, time
import numpy as np
import hpcdist as dist
from hpcdist.transport.mpi import intranode_boxes
from hpcdist.transport.shm.segment import is_dead

group = dist.init_parallel_env(timeout=60)
rank, mesh = group.rank, dist.ProcessMesh(group.ranks)
pids, seen, fill = [], [], intranode_boxes.fill
dist.all_gather_object(pids, os.getpid())
x = np.arange(3 << 18) * 1.0
a = dist.shard_tensor(x, mesh, [dist.Shard(0)])

def dies(call, pieces):
    with open("failing", "w") as moment:
        moment.write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

def reads_when_the_other_is_dead(call, pieces):
    while not is_dead(pids[1]):
        time.sleep(0.01)
    fill(call, pieces)
    seen.append((call.recv == x).all())

intranode_boxes.fill = dies if rank == 1 else reads_when_the_other_is_dead
try:
    dist.reshard(a, mesh, [])
except dist.HpcdistError as error:
    with open(f"rank.{rank}", "w") as words:
        words.write(f"{seen} {type(error).__name__} {getattr(error, 'rank', None)}: {error}")
    time.sleep(2)
    os._exit(3)
"""


@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_what_a_killed_rank_had_is_read_to_its_end(mpi, tmp_path):
    environ = ENVIRONMENTS[mpi]
    if find_site(environ).family not in KEEP_THE_REST:
        pytest.skip("no option of this launcher keeps the other ranks")
    script = tmp_path / "reading.py"
    script.write_text(READS_FROM_THE_DEAD)
    _, out = run(environ, (str(script),), tmp_path, keep_the_rest=True)
    told = {path.name: path.read_text() for path in tmp_path.glob("rank.*")}
    assert sorted(told) == ["rank.0", "rank.2"], out
    for words in told.values():
        assert re.match(r"\[(np\.)?True_?\] RankFailure 1: rank 1 died during", words), words


OPERATIONS = ["all_reduce of an ordinary array", "all_reduce of a shared array", "barrier"]
LARGE = pytest.param("all_reduce of a large ordinary array", marks=pytest.mark.slow)


@pytest.mark.parametrize("operation", [*first_of(OPERATIONS), LARGE])
@pytest.mark.parametrize(
    "keep_the_rest",
    [pytest.param(False, marks=pytest.mark.thorough, id="ended"), pytest.param(True, id="kept")],
)
@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_ranks_do_not_wait_for_one_that_is_killed(mpi, keep_the_rest, operation, tmp_path):
    environ = ENVIRONMENTS[mpi]
    if keep_the_rest and find_site(environ).family not in KEEP_THE_REST:
        pytest.skip("no option of this launcher keeps the other ranks")
    if keep_the_rest and compiled is None:
        pytest.skip("without the kernel it is the launcher that ends who is inside MPI")
    script = tmp_path / "stream.py"
    script.write_text(STREAM)
    code, out = run(environ, (str(script), operation), tmp_path, keep_the_rest)
    failed_at = float((tmp_path / "failing").read_text())
    assert time.time() - failed_at < SOON_S
    assert keep_the_rest or code != 0
    told = {path.name: path.read_text() for path in tmp_path.glob("rank.*")}
    assert not keep_the_rest or sorted(told) == ["rank.0", "rank.2"], out
    for words in told.values():
        assert words.startswith("RankFailure 1: rank 1 died during"), words
    assert own_names() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setting", [{"HPCDIST_KERNEL": "never"}, {"HPCDIST_RANKS_PER_NODE": "2"}], ids=str
)
def test_the_contract_is_kept(setting, tmp_path):
    tests = str(ROOT / "tests" / "mpi" / "test_contract.py")
    program = ("-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
    environ = next(iter(ENVIRONMENTS.values()))
    code, out = run(environ, (*program, tests), tmp_path, **setting)
    assert code == 0, out[-8000:]
    assert out.count(" passed") == RANKS
    assert "failed" not in out
