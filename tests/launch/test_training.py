"""The examples train: well, and to the same loss on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.launch.environment import inherited
from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

ROOT = Path(__file__).parents[2]
NEEDED = {
    "train.py": ["sklearn"],
    "train_torch.py": ["sklearn", "torch"],
    "train_jax.py": ["sklearn", "jax"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("example", NEEDED)
def test_two_ranks_train_as_well_as_one(example):
    for name in NEEDED[example]:
        pytest.importorskip(name)
    if find_site(snapshot()).mpiexec is None:
        pytest.skip("no mpiexec")
    accuracy, loss = trained(example, 2)
    assert accuracy > 0.9
    assert (accuracy, loss) == pytest.approx(trained(example, 1), abs=2e-4)


def trained(example, ranks):
    """Train on that many ranks; return the accuracy and the last loss."""
    left_out = inherited(os.environ, here=True)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    command = ["hpcdist", "run", "-n", str(ranks), "--launcher", "mpiexec"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT / "examples" / example), "--epochs", "4"],
        env={**environ, "HPCDIST_TIMEOUT_S": "30", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    told = re.search(r"test accuracy ([\d.]+) on \d+ images, loss ([\d.]+)", done.stdout)
    assert told, done.stdout + done.stderr
    return float(told[1]), float(told[2])
