"""Trainings on virtual ranks over two nodes of a real Slurm: the bits of one process."""

import os
import re
import sys
from pathlib import Path

import pytest
from training_engines import ENGINES

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests/launch/survive_training.py"
ON_VIRTUAL_RANKS = [engine for engine in ENGINES if "virtual ranks" in engine]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ON_VIRTUAL_RANKS)
def test_two_nodes_train_what_one_process_trains(cluster, mpi, engine, tmp_path):
    pytest.importorskip("torch")
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/checks'}"}

    def train(ranks, run, **options):
        done = run(sys.executable, TRAINING, engine, "50", tmp_path / f"{ranks}", **options)
        found = re.search(r"trained on (\d) ranks: (\w+)", done.stdout)
        assert found, done.stdout + done.stderr
        assert int(found[1]) == ranks
        return found[2]

    alone = train(1, cluster.run, environ=mpi.environ | path, timeout=100)
    for ranks in (3, 4):

        def on_nodes(*words, ranks=ranks, **options):
            return cluster.srun("-N2", f"-n{ranks}", *words, mpi=mpi, **options)

        assert train(ranks, on_nodes, environ=path, timeout=200) == alone
