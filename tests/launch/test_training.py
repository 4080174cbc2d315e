"""The examples train: well, and to the same loss on any number of ranks."""

import pytest
import training_examples

from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

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
    tells = r"test accuracy ([\d.]+) on \d+ images, loss ([\d.]+)"
    told = training_examples.run(example, ranks, "--epochs", 4, tells=tells)
    return float(told[1]), float(told[2])
