"""Operations that nobody waits for: what goes wrong in them is told, and makes the program fail."""

import subprocess
import sys

import pytest
from environments import ENVIRONMENTS, ROOT
from tiers import first_of

from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site
from hpcdist.transport.shm.kernel import compiled

FIRST = next(iter(ENVIRONMENTS), None)
HEAD = """
import sys, time
import numpy as np
import hpcdist as dist
world = dist.init_parallel_env(timeout=60)
rank, n = world.rank, world.nranks
x = np.ones(1 << 16)
uneven = np.ones(3 + rank)
"""
TAIL = "\nprint('good', flush=True)\n"
TOLD = ("failed, and nobody waited for it", "call wait() on it")


@pytest.fixture
def run(tmp_path):
    """Run a program on the ranks of an MPI, to its end; return the exit code and stderr."""

    def run(text, n=2, name=FIRST, options=()):
        script = tmp_path / "program.py"
        script.write_text(HEAD + text + TAIL)
        environ = ENVIRONMENTS[name]
        program = (sys.executable, *options, str(script))
        command = build_command(
            Options(program, nprocs=n, here=True, label=False), find_site(environ), environ
        )
        env = {name: value for name, value in environ.items() if name not in command.unset}
        done = subprocess.run(
            command.argv,
            env=env | command.env | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "".join(done.stdout.split()) == "good" * n, done.stderr
        return done.returncode, done.stderr

    return run


pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")

DROPPED = {
    "a collective, before a barrier": "dist.all_reduce(uneven, sync_op=False)\ndist.barrier()",
    "the last collective of the program": "dist.all_reduce(uneven, sync_op=False)",
    "a collective whose work is kept": "work = dist.all_reduce(uneven, sync_op=False)",
    "a collective before the end of the world": (
        "dist.all_reduce(uneven, sync_op=False)\ndist.destroy_process_group()"
    ),
    "a collective in a group of its own": (
        "group = dist.new_group()\ndist.all_reduce(uneven, group=group, sync_op=False)\n"
        "dist.destroy_process_group(group)"
    ),
    "a collective that was looked at": (
        "work = dist.all_reduce(uneven, sync_op=False)\n"
        "while not work.is_completed():\n    time.sleep(1e-3)"
    ),
    "a wait that took too little time": (
        "time.sleep(rank * 0.5)\nwork = dist.all_reduce(uneven, sync_op=False)\n"
        "try:\n    work.wait(0 if rank == 0 else None)\n"
        "except dist.HpcdistError:\n    pass\n"
    ),
    "a message of another size": (
        "work = dist.irecv(np.empty(1), (rank + 1) % n)\n"
        "dist.send(x, (rank + 1) % n)\ndist.barrier()\n"
        "while not work.is_completed():\n    time.sleep(1e-3)"
    ),
    "messages in a batch": (
        "ops = [dist.P2POp(dist.isend, x, (rank + 1) % n),"
        " dist.P2POp(dist.irecv, np.empty(3), (rank - 1) % n)]\n"
        "works = dist.batch_isend_irecv(ops)\nworks[0].wait()\n"
        "while not works[1].is_completed():\n    time.sleep(1e-3)"
    ),
    "tensors of torch": (
        "import torch\ndist.all_reduce(torch.ones(3 + rank), sync_op=False)\ndist.barrier()"
    ),
}


@pytest.mark.parametrize("name", first_of(ENVIRONMENTS) if ENVIRONMENTS else [])
@pytest.mark.parametrize("what", first_of(DROPPED))
def test_an_error_that_nobody_has_waited_for_is_told_and_fails_the_program(run, what, name):
    if "torch" in DROPPED[what]:
        pytest.importorskip("torch")
    code, told = run(DROPPED[what], name=name)
    assert code == 1, told
    assert all(each in told for each in TOLD), told
    line = next(
        at
        for at, text in enumerate((HEAD + DROPPED[what]).split("\n"), 1)
        if any(f"{verb}(" in text for verb in ("all_reduce", "irecv", "batch_isend_irecv"))
    )
    assert f"program.py:{line}, failed" in told, told
    assert "Traceback" not in told, told


HEARD = {
    "waited for": (
        "try:\n    dist.all_reduce(uneven, sync_op=False).wait()\nexcept dist.MismatchError: pass"
    ),
    "waited for together": (
        "works = [dist.all_reduce(uneven, sync_op=False) for _ in range(3)]\n"
        "try:\n    dist.wait_all(works)\nexcept dist.MismatchError: pass"
    ),
    "awaited": (
        "import asyncio\nasync def program():\n"
        "    try:\n        await dist.all_reduce(uneven, sync_op=False)\n"
        "    except dist.MismatchError: pass\nasyncio.run(program())"
    ),
    "detached": "dist.all_reduce(uneven, sync_op=False).detach()\ndist.barrier()",
    "of a plan": (
        "plan = dist.plan_alltoall_single(np.empty(n), np.ones(n))\n"
        "plan.start().wait()\nplan.free()"
    ),
    "of messages that were sent and received": (
        "dist.isend(x, (rank + 1) % n)\ndist.recv(x.copy(), (rank - 1) % n)\n"
        "dist.isend(uneven, (rank + 1) % n, tag=3)\n"
        "dist.recv(np.ones(3 + (rank - 1) % n), (rank - 1) % n, tag=3)"
    ),
    "without an error": (
        "work = dist.all_reduce(x, sync_op=False)\nwhile not work.is_completed(): pass\n"
        "del work\ndist.all_reduce(x, sync_op=False)\ndist.wait(x)"
    ),
    "of torch.distributed": (
        "import torch, torch.distributed as td, hpcdist.torch\n"
        "td.init_process_group('hpcdist')\n"
        "try:\n    td.all_reduce(torch.ones(3 + rank), async_op=True).wait()\n"
        "except dist.MismatchError: pass\ntd.destroy_process_group()"
    ),
}


@pytest.mark.parametrize("what", first_of(HEARD))
@pytest.mark.parametrize("n", first_of([2, 1]))
def test_an_operation_that_has_been_heard_of_is_silent(run, what, n):
    if "torch" in HEARD[what]:
        pytest.importorskip("torch")
    text = HEARD[what] if n == 2 else HEARD[what].replace("uneven", "x")
    if n == 1 and "send" in text:
        text = "work = dist.isend(x, 0)\ndist.recv(x.copy(), 0)\nwork.wait()"
    code, told = run(text, n, options=("-W", "error"))
    assert (code, told) == (0, "")


def test_alone_an_error_is_told_as_well(run):
    code, told = run("dist.all_gather([x, x, x], x, sync_op=False)\ndist.barrier()", 1)
    assert code == 1
    assert all(each in told for each in TOLD), told


def test_a_work_that_is_dropped_before_its_operation_has_ended_is_a_resource_warning(run):
    text = "if rank == 0: time.sleep(0.3)\ndist.all_reduce(x, sync_op=False)\ntime.sleep(0.6)"
    assert run(text) == (0, "")
    code, told = run(text, options=("-W", "default::ResourceWarning"))
    assert code == 0
    assert "program.py:10: ResourceWarning: all_reduce(" in told
    assert "had not ended when its work was dropped" in told


def test_what_is_under_way_when_the_program_ends_is_told(run):
    code, told = run("dist.irecv(x, (rank + 1) % n, tag=7)\ndist.irecv(x, (rank + 1) % n).detach()")
    assert code == 0
    assert told.count("ends before these operations of this rank have ended: recv from") == 2
    assert "program.py:9" in told
    assert "program.py:10" not in told


@pytest.mark.thorough
def test_an_exit_code_of_the_program_is_not_hidden(run):
    code, told = run("dist.all_reduce(uneven, sync_op=False)\nprint('good')\nsys.exit(3)", 2)
    assert code != 0
    assert TOLD[0] in told


ENDS = {
    "the program": "",
    "its world": "dist.destroy_process_group()",
    "one of its groups": "dist.destroy_process_group(group)",
}


@pytest.mark.parametrize("end", first_of(["", "dist.destroy_process_group()"]))
@pytest.mark.parametrize("name", first_of(ENVIRONMENTS) if ENVIRONMENTS else [])
def test_who_comes_when_another_rank_has_ended_finds_it_in_what_it_has_begun(run, name, end):
    late = f"time.sleep(rank * 1.5)\nwork = dist.all_reduce(given, sync_op=False)\n{{}}\n{end}"
    waits = "if rank: work.wait(); assert (given == n).all()"
    for given in ("x", "np.ones(3)"):
        code, told = run(f"given = {given}\n{late.format(waits)}", name=name)
        assert code == 0, told
    hears = "try:\n    if rank: work.wait()\nexcept dist.MismatchError: print('good')"
    code, told = run(f"given = uneven\n{late.format(hears)}\nif rank: sys.exit()", name=name)
    assert code == 1
    assert TOLD[0] in told


def test_ranks_may_end_at_different_times_when_their_groups_have_nothing_left_to_do(run):
    text = """
for group in (dist.new_group(timeout=1000), dist.new_group(timeout=1000)):
    dist.all_reduce(x, group=group, sync_op=False).wait()
time.sleep(rank * 2)"""
    assert run(text) == (0, "")


@pytest.mark.parametrize("name", first_of(ENVIRONMENTS) if ENVIRONMENTS else [])
def test_who_waits_for_a_rank_that_has_ended_its_world_is_told_at_once(run, name):
    words = "rank 0 has ended the group and did not join barrier()"
    text = f"""
if rank:
    try:
        dist.barrier()
    except dist.RemoteError as error:
        assert {words!r} in str(error)
    else:
        raise AssertionError
dist.destroy_process_group()"""
    assert run(text, name=name) == (0, "")


@pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")
@pytest.mark.parametrize("end", ENDS)
def test_a_root_hears_at_the_end_of_what_it_did_not_wait_for(end, run):
    code, words = run(
        f"""
group = dist.new_group()
group.transport.context.node.control.most_eager = 16  # as where ranks share cores
if rank == 0:
    dist.broadcast(np.ones(1), 0, group=group)
else:
    try:
        dist.barrier(group)
    except dist.MismatchError as error:
        assert "rank 0: broadcast(shape (1,), float64, root 0)" in str(error)
    else:
        raise AssertionError("nobody has heard")
{ENDS[end]}
"""
    )
    assert code == 1
    assert "[rank 0] hpcdist: MismatchError: the ranks disagree in the end of the group" in words
    assert words.count("rank 1: barrier()") == 1
