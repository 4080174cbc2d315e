"""A torch training that is killed goes on, on any number of ranks, as if nothing had happened."""

import re
import shutil
import subprocess
import sys

import pytest
from environments import ENVIRONMENTS, ROOT

from hpcdist import checkpoint
from hpcdist.launch.command import Options, build_command
from hpcdist.launch.launchers import find_site

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="no mpiexec")

EXAMPLE = str(ROOT / "examples/resume_torch.py")
STEPS, EVERY = 45, 10

KILLED = """
import os, runpy, signal, sys
import hpcdist as dist

real, calls = dist.checkpoint.save, []

def save(*args, **options):
    work = real(*args, **options)  # goes on in the background
    calls.append(work)
    if len(calls) == 3 and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return work

dist.checkpoint.save = save
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_job(ranks, folder, losses, *head):
    """Train on so many ranks; return the exit code and what was printed."""
    environ = ENVIRONMENTS[next(iter(ENVIRONMENTS))]
    settings = {"steps": STEPS, "every": EVERY, "folder": folder, "losses": losses}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    program = (sys.executable, *head, EXAMPLE, *words)
    options = Options(program, nprocs=ranks, here=True, label=False)
    command = build_command(options, find_site(environ), environ)
    env = {name: value for name, value in environ.items() if name not in command.unset}
    done = subprocess.run(
        command.argv,
        env={**env, **command.env, "PYTHONPATH": str(ROOT), "HPCDIST_TIMEOUT_S": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A training on two ranks whose last one was killed, and the losses of one that was not."""
    place = tmp_path_factory.mktemp("killed")
    losses = place / "losses.txt"
    code, told = run_job(2, place / "whole", losses)
    assert code == 0, told
    expected = numbers_of(losses)
    assert len(expected) == STEPS
    losses.unlink()

    script = place / "killed.py"
    script.write_text(KILLED)
    code, told = run_job(2, place / "run", losses, str(script))
    assert code != 0, told
    assert not losses.exists()
    assert checkpoint.latest(place / "run") is not None
    return place / "run", expected


def numbers_of(path):
    return [float(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_training_that_is_killed_goes_on_with_the_same_losses(killed, tmp_path, ranks):
    """On as many ranks to the last bit; on others, sums are rounded in another order: 1e-9."""
    run, expected = killed
    folder, losses = tmp_path / "run", tmp_path / "losses.txt"
    shutil.copytree(run, folder)
    code, told = run_job(ranks, folder, losses)
    assert code == 0, told
    first = int(re.search(rf"{ranks} ranks begin with step (\d+)", told)[1])
    assert first in (2 * EVERY, 3 * EVERY)  # the last save was under way, or done
    found = numbers_of(losses)
    assert found[:first] == expected[:first]
    assert found == (expected if ranks == 2 else pytest.approx(expected, rel=1e-9, abs=0))
