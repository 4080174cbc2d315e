"""One fingerprint of trainings on virtual ranks, on any number of ranks, whatever starts them.

Each is a job of its own, of 50 steps. What it trains is compared in all bits with what one process
makes of it.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from environments import ROOT
from private_slurm import find_mpis
from training_engines import ENGINES, VIRTUAL_RANKS, everything, fingerprint

import hpcdist as dist
from hpcdist.runtime.process import snapshot

pytest.importorskip("torch")

STEPS = 50
ON_VIRTUAL_RANKS = [engine for engine in ENGINES if "virtual ranks" in engine]
OFTEN = {("torch virtual ranks os_g", 3), ("arrays, virtual ranks os_g", 2)}
MPIS = find_mpis()
OPEN_MPI = next((mpi for mpi in MPIS if mpi.name == "Open MPI"), None)


def trained(mpi, engine, ranks, *kills):
    """Train under an MPI's mpiexec; return on how many ranks it ended, and its fingerprint."""
    ft = ["--with-ft", "ulfm"] if kills else []
    folder = tempfile.mkdtemp()
    done = subprocess.run(
        [
            *(mpi.mpiexec, *ft, "-n", str(ranks), sys.executable),
            *(str(ROOT / "tests/launch/survive_training.py"), engine, str(STEPS), folder, *kills),
        ],
        env=snapshot()
        | mpi.environ
        | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}",
            "PYTHONWARNINGS": "ignore",
            "HPCDIST_SURVIVE": str(int(bool(kills))),
            "HPCDIST_TIMEOUT_S": "120",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = re.search(r"trained on (\d+) ranks: (\w+)", done.stdout)
    assert found, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return int(found[1]), found[2]


@cache
def alone(engine):
    """Return the fingerprint of a training by one process."""
    (found,) = simulated(engine, 1)
    return found


def simulated(engine, ranks):
    """Return the fingerprints of ranks that are threads of this process."""
    folder = Path(tempfile.mkdtemp()) / "saved"

    def train():
        group = dist.init_parallel_env()
        training = ENGINES[engine](group)
        for step in range(STEPS):
            training.step(step)
        return fingerprint(everything(training, folder, group))

    return dist.simulate(ranks, train, timeout=200)


def jobs():
    """Return engines and numbers of ranks; those that stand for the others are not slow."""
    for engine in ON_VIRTUAL_RANKS:
        for ranks in (2, 3, 4, 5, 8):
            mark = pytest.mark.thorough if (engine, ranks) in OFTEN else pytest.mark.slow
            yield pytest.param(engine, ranks, marks=mark, id=f"{engine}, {ranks}")


@pytest.mark.parametrize("mpi", MPIS, ids=[mpi.name for mpi in MPIS])
@pytest.mark.parametrize(("engine", "ranks"), [*jobs()])
def test_processes_train_what_one_process_trains(mpi, engine, ranks):
    assert trained(mpi, engine, ranks) == (ranks, alone(engine))


@pytest.mark.parametrize(("engine", "ranks"), [*jobs()])
def test_threads_train_what_one_process_trains(engine, ranks):
    assert simulated(engine, ranks) == [alone(engine)] * ranks


@pytest.mark.slow
@pytest.mark.skipif(OPEN_MPI is None, reason="only Open MPI goes on after a death")
@pytest.mark.parametrize("engine", ON_VIRTUAL_RANKS)
@pytest.mark.parametrize("seed", range(3))
def test_deaths_at_random_steps_change_no_bit(engine, seed):
    numbers = random.Random(f"{engine} {seed}")
    first, second = sorted(numbers.sample(range(1, STEPS), 2))
    kills = f"{numbers.randrange(4)}@{first}", f"{numbers.randrange(3)}@{second}"
    assert trained(OPEN_MPI, engine, 4, *kills) == (2, alone(engine)), kills


@pytest.mark.thorough
def test_a_training_goes_on_from_a_checkpoint_on_other_ranks(tmp_path):
    for engine in ("torch virtual ranks os_g", "arrays, virtual ranks os"):
        path = tmp_path / engine

        def halted(engine=engine, path=path):
            group = dist.init_parallel_env()
            training = ENGINES[engine](group)
            for step in range(20):
                training.step(step)
            everything(training, path, group)

        def resumed(engine=engine, path=path):
            group = dist.init_parallel_env()
            training = ENGINES[engine](group)
            state = {"model": training.model, "optimizer": training.optimizer}
            dist.checkpoint.load(state, path, group)
            for step in range(20, STEPS):
                training.step(step)
            return fingerprint(everything(training, path.with_suffix(".whole"), group))

        dist.simulate(5, halted, timeout=100)
        for ranks in (1, 3, VIRTUAL_RANKS):
            assert {*dist.simulate(ranks, resumed, timeout=100)} == {alone(engine)}
