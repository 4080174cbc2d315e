"""The classifier of texts: the same losses on any number of ranks, also after a resume."""

import os

import pytest
import training_examples

from hpcdist.launch.launchers import find_site


def losses_of(ranks, folder, *arguments):
    sizes = ["--texts", 300, "--epochs", 2, "--batch", 48]
    return training_examples.losses_of("train_text.py", ranks, folder, *sizes, *arguments)


@pytest.mark.thorough
def test_the_losses_are_the_same_when_other_ranks_go_on(tmp_path):
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    alone = losses_of(1, tmp_path / "alone")
    assert len(alone) == 14
    assert alone[-1] < 0.95 * alone[0]
    begun = losses_of(2, tmp_path / "parts", "--stop", "5")
    assert len(begun) == 5
    assert begun + losses_of(1, tmp_path / "parts") == pytest.approx(alone, abs=2e-6)
