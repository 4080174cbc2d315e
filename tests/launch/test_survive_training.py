"""Drills: ranks of a training die, the others or spares go on, and the weights are the same.

Each is a job under Open MPI's own mpiexec with ULFM. What it trains is compared in all bits with
what the same engine makes of it on one rank, without a death.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
from environments import ROOT

from hpcdist.launch.command import Family
from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

SITE = find_site(snapshot())
STEPS = 11
pytestmark = pytest.mark.skipif(
    SITE.family is not Family.OPENMPI, reason="only Open MPI goes on after a death"
)


@pytest.fixture
def train(tmp_path):
    """Run a training to its end; return on how many ranks it ended, and its fingerprint."""
    started = []

    def train(engine, *kills, nprocs=1, spares=0, **settings):
        ft = ["--with-ft", "ulfm"] if kills else []
        script = ROOT / "tests/launch/survive_training.py"
        job = subprocess.Popen(
            [
                *(SITE.mpiexec, *ft, "-n", str(nprocs + spares), sys.executable, str(script)),
                *(engine, str(STEPS), str(tmp_path / f"whole-{len(started)}"), *kills),
            ],
            env=snapshot()
            | {
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}",
                "PYTHONWARNINGS": "ignore",
                "HPCDIST_SURVIVE": str(int(bool(kills))),
                "HPCDIST_SPARES": str(spares),
                "HPCDIST_TIMEOUT_S": "60",
                **settings,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(job)
        out, err = job.communicate(timeout=300)
        found = re.search(r"trained on (\d+) ranks: (\w+)", out)
        assert found, f"exit code {job.returncode}\n{out}\n{err}"
        return int(found[1]), found[2]

    yield train
    for job in started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def drills():
    """Return engines and deaths; those that stand for the others are not slow."""
    often = {
        ("data parallel", "fewer"),
        ("arrays os", "two deaths, one spare"),
    }
    for engine in ENGINES:
        for way in WAYS:
            mark = pytest.mark.thorough if (engine, way) in often else pytest.mark.slow
            yield pytest.param(engine, way, marks=mark, id=f"{engine}, {way}")


ENGINES = [
    "data parallel",
    *(f"arrays {level}" for level in ("os", "os_g", "p_g_os")),
    "torch data parallel",
    "torch virtual ranks",
    "torch fsdp2",
    *(f"torch {level}" for level in ("os", "os_g", "p_g_os")),
]
WAYS = {
    "fewer": ({"nprocs": 4}, ["2@6"], 3),
    "rank 0": ({"nprocs": 3}, ["0@5"], 2),
    "one after the other": ({"nprocs": 4}, ["3@6", "0@9"], 2),
    "a spare": ({"nprocs": 3, "spares": 1}, ["1@6"], 3),
    "two deaths, one spare": ({"nprocs": 3, "spares": 1}, ["0@6", "2@9"], 2),
}
"""How many processes there are, who dies when, and how many ranks end the training."""


@pytest.mark.parametrize(("engine", "way"), [*drills()])
def test_the_weights_are_those_of_a_training_without_a_death(train, engine, way):
    if "torch" in engine:
        pytest.importorskip("torch")
    processes, kills, left = WAYS[way]
    expected = train(engine)[1]
    assert train(engine, *kills, **processes) == (left, expected)


@pytest.mark.thorough
def test_the_example_of_the_same_bits_prints_one_fingerprint():
    pytest.importorskip("torch")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "hpcdist", "run", "--survive", "-n", "3", "--no-label"),
            *(str(ROOT / "examples/same_bits.py"), "--steps", "22", "--kill", "0@13"),
        ],
        env=snapshot() | {"PYTHONPATH": str(ROOT), "HPCDIST_TIMEOUT_S": "60"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    ).stdout
    told = re.findall(r"on (\d) ranks: (\w{64})", found)
    assert [ranks for ranks, _ in told] == ["3", "2"], found
    assert told[0][1] == told[1][1]
