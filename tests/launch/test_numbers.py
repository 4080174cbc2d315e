"""Numbers that Python and C must mean alike: those of kinds may change, others are refused."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from environments import ENVIRONMENTS, EVERY_MPI, ROOT

from hpcdist.compiled import missing
from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site

MIXED = """
from contextlib import nullcontext
import numpy as np
import hpcdist as dist
from hpcdist.transport.call import kinds
from hpcdist.transport.shm.hot import switched_off

assert kinds.Kind.BROADCAST == 7 and kinds.Kind.SEND == 17
rank, size = dist.init_parallel_env(timeout=60).rank, dist.get_world_size()
x = rank + np.arange(4.0)
sums = size * np.arange(4.0) + size * (size - 1) / 2

def collectives(count):
    mine, whole = np.full(count, rank + 1.0), np.empty((size, count))
    dist.all_reduce(mine)
    assert (mine == size * (size + 1) / 2).all()
    mine[:] = rank
    dist.broadcast(mine, 1)
    assert (mine == 1).all()
    mine[:] = rank
    dist.all_gather(whole, mine)
    assert (whole == np.arange(size)[:, None]).all()
    dist.alltoall_single(whole, whole.copy())
    assert (whole == rank).all()
    dist.reduce_scatter(mine, whole)
    assert (mine == size * (size - 1) / 2).all()
    mine[:] = rank
    dist.reduce(mine, 0)
    assert rank or (mine == size * (size - 1) / 2).all()
    mine[:] = rank
    dist.gather(mine, whole if rank == 0 else None, 0)
    assert rank or (whole == np.arange(size)[:, None]).all()
    dist.scatter(mine, whole if rank == 0 else None, 0)
    assert (mine == rank).all()
    dist.barrier()

def objects():
    found = []
    dist.all_gather_object(found, rank)
    assert found == list(range(size))
    given = [rank, "word"]
    dist.broadcast_object_list(given, 1)
    assert given == [1, "word"]
    found = []
    dist.gather_object(rank, found if rank == 0 else None, 0)
    assert found == (list(range(size)) if rank == 0 else [])
    found = [None]
    dist.scatter_object_list(found, list(range(size)) if rank == 0 else None, 0)
    assert found == [rank]

def messages():
    mine = np.full(3, rank, "f4")
    if rank == 0:
        dist.send(mine, 1, tag=5)
        dist.send_object_list(["a"], 1)
        dist.recv(mine, 1)
        assert (mine == 1).all()
    elif rank == 1:
        theirs, words = np.empty(3, "f4"), [None]
        dist.recv(theirs, 0, tag=5)
        assert (theirs == 0).all()
        dist.recv_object_list(words, 0)
        assert words == ["a"]
        dist.send(mine, 0)

for cold in (lambda: rank % 2, lambda: rank % 2 == 0, lambda: False, lambda: True):
    with switched_off() if cold() else nullcontext():
        for count in (1, 4, 40_000):
            collectives(count)
        objects()
        messages()
print("all alike")
"""


@pytest.fixture
def package(tmp_path):
    """Return a copy of the package, with what is compiled."""
    if missing():
        pytest.skip("not all parts are compiled here")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hpcdist", tmp_path / "hpcdist", ignore=ignored)
    return tmp_path


def edit(path, pattern, replacement):
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count > 0, f"{pattern} is not in {path}"
    path.write_text(text)


def run(argv, environ, package):
    environ = {**environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        argv, env=environ, cwd=package, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("mpi", EVERY_MPI)
def test_a_kind_may_be_inserted_in_the_middle(mpi, package):
    def one_more(found):
        number = int(found[2])
        return f"{found[1]}{number + (number >= 6)}{found[3]}"

    edit(
        package / "hpcdist/transport/call/kinds.py",
        r"(?m)^(    [A-Z_]+ = )(\d+)(, Family)",
        one_more,
    )
    (package / "mixed.py").write_text(MIXED)
    environ = ENVIRONMENTS[mpi]
    options = Options((sys.executable, "mixed.py"), nprocs=2, here=True, label=False)
    command = build_command(options, find_site(environ), environ)
    kept = {name: value for name, value in environ.items() if name not in command.unset}
    code, out = run(command.argv, kept | command.env, package)
    assert code == 0, out
    assert out.count("all alike") == 2, out


@pytest.mark.parametrize(
    ("path", "pattern", "replacement", "words"),
    [
        (
            "transport/shm/kernel.py",
            r"(?m)^MOST = 256",
            "MOST = 128",
            "MOST = 256, and Python has 128",
        ),
        ("transport/shm/control.py", r"STEP_BITS = 24", "STEP_BITS = 20", "STEP_BITS = 24"),
        ("transport/shm/node.py", r"_ATTACHED = -2", "_ATTACHED = -3", "ATTACHED = -2"),
        ("transport/flight/layout.py", r"BEGUN, ENDED", "ENDED, BEGUN", "BEGUN = 1"),
        ("transport/call/kinds.py", r" GATHER = 8,", " GATHER = 99,", "needs the number of GATHER"),
    ],
)
def test_a_number_that_differs_is_refused_at_import(path, pattern, replacement, words, package):
    edit(package / "hpcdist" / path, pattern, replacement)
    code, out = run([sys.executable, "-c", "import hpcdist.comm"], os.environ, package)
    assert code != 0
    assert f"ImportError: {'' if 'needs' in words else 'hpcdist.transport._'}" in out, out
    assert words in out, out
    assert "compile" in out
