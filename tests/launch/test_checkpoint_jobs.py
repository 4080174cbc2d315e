"""Checkpoints of real jobs: saved on n ranks and loaded on m; and ranks killed while they save."""

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from environments import ENVIRONMENTS, ROOT

from hpcdist import checkpoint
from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site

pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")

HEAD = """
import os, random, signal, sys, threading, time
import numpy as np
import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import LocalSlice

world = dist.init_parallel_env(timeout=60)
rank, size = world.rank, world.nranks
folder, seed = sys.argv[1], int(sys.argv[2])

def part(whole):
    begin, end = (whole.size * each // size for each in (rank, rank + 1))
    return LocalSlice(whole.reshape(-1)[begin:end].copy(), whole.shape, offset=begin)
"""

SAVE = """
whole = np.arange(300_007.0)
state = {"shards": part(whole), "same": whole, "epoch": 4}
checkpoint.save(state, folder, async_save=seed % 2 == 1)
"""

LOAD = """
whole = np.arange(300_007.0)
state = {"shards": part(np.zeros_like(whole)), "same": np.zeros_like(whole), "epoch": 0}
checkpoint.load(state, folder)
assert (state["shards"].data == part(whole).data).all()
assert (state["same"] == whole).all()
assert state["epoch"] == 4
print("loaded", flush=True)
"""

KILLED = """
series, beside = seed % 2 == 0, seed % 4 >= 2
chance = random.Random(seed)
victim, when = chance.randrange(size), chance.random()

def save(step):
    whole = np.full(1_000_003, float(step))
    state = {"shards": part(whole), "same": whole[:500_000], f"own {rank}": whole[:99]}
    state["step"] = step
    settings = {"step": step, "keep": 2} if series else {}
    return checkpoint.save(state, folder, async_save=beside, **settings)

save(1).wait()
began = time.perf_counter()
save(2).wait()
taken = time.perf_counter() - began
print("saved 2", flush=True)
dist.barrier()
if rank == victim:
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(3 * taken * when, kill).start()
for step in range(3, 10**6):
    work = save(step)
    if not beside:
        print("saved", step, flush=True)
"""


def run_job(text, tmp_path, ranks, folder, seed=0, mpi=None):
    """Run a script on so many ranks; return its exit code and what it printed."""
    environ = ENVIRONMENTS[mpi or next(iter(ENVIRONMENTS))]
    script = tmp_path / "job.py"
    script.write_text(HEAD + text)
    program = (sys.executable, str(script), str(folder), str(seed))
    options = Options(program, nprocs=ranks, here=True, label=False)
    command = build_command(options, find_site(environ), environ)
    env = {name: value for name, value in environ.items() if name not in command.unset}
    done = subprocess.run(
        command.argv,
        env={**env, **command.env, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def changes_of_size():
    """Yield numbers of ranks that save and load; most of them are slow."""
    thorough = {(1, 3), (3, 2), (4, 3)}
    for savers in range(1, 5):
        for loaders in range(1, 5):
            change = savers, loaders
            marks = pytest.mark.thorough if change in thorough else pytest.mark.slow
            yield pytest.param(*change, marks=() if change == (2, 1) else marks)


@pytest.mark.parametrize(("savers", "loaders"), list(changes_of_size()))
def test_a_job_loads_what_a_job_of_another_size_has_saved(tmp_path, savers, loaders):
    folder = tmp_path / "saved"
    code, _, err = run_job(SAVE, tmp_path, savers, folder, seed=savers)
    assert code == 0, err
    code, out, err = run_job(LOAD, tmp_path, loaders, folder)
    assert (code, out.count("loaded")) == (0, loaders), err
    assert checkpoint.load(None, folder)["shards"].sum() == np.arange(300_007.0).sum()


def kills():
    """Yield 100 drills, spread over the MPIs; 92 are slow, and 6 of the others thorough."""
    names = list(ENVIRONMENTS)
    for number in range(100):
        marks = () if number < 2 else pytest.mark.thorough if number < 8 else pytest.mark.slow
        yield pytest.param(names[number // 4 % len(names)], number, marks=marks)


@pytest.mark.parametrize(("mpi", "number"), list(kills()) if ENVIRONMENTS else [])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, mpi, number):
    """Even numbers save a series, odd ones to one folder; half of both in the background."""
    seed = random.randrange(10**6) * 4 + number % 4
    folder = tmp_path / "saved"
    code, out, err = run_job(KILLED, tmp_path, 3, folder, seed=seed, mpi=mpi)
    assert code != 0
    assert "saved 2" in out, err
    told = [int(step) for step in re.findall(r"^saved (\d+)$", out, re.MULTILINE)]  # whole lines
    state = checkpoint.load(None, folder)
    assert state["step"] >= max(told, default=2)  # the last line may be cut
    assert (state["shards"] == state["step"]).all()
    assert (state["same"] == state["step"]).all()
    assert all((state[f"own {rank}"] == state["step"]).all() for rank in range(3))
    assert_next_save_tidies_up(folder, state["step"])


def assert_next_save_tidies_up(folder, step):
    is_series = any(name.startswith("step-") for name in os.listdir(folder))
    if is_series:
        checkpoint.save({"x": np.ones(3)}, folder, step=step + 10, keep=2)
        assert len(os.listdir(folder)) == 2
        folder = checkpoint.latest(folder)
    else:
        checkpoint.save({"x": np.ones(3)}, folder)
    assert len(os.listdir(folder)) == 2
    checkpoint.verify(folder)
