"""The small GPT: the same losses on every grid, and from a checkpoint of another one."""

import pytest
import training_examples

from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

pytest.importorskip("torch", minversion="2.11")


def losses_of(ranks, folder, steps, *arguments):
    sizes = ["--layers", 2, "--width", 32, "--steps", steps]
    return training_examples.losses_of("train_gpt.py", ranks, folder, *sizes, *arguments)


def grid(**degrees):
    return [each for axis, n in degrees.items() for each in (f"--{axis}", str(n))]


@pytest.fixture(autouse=True)
def _needs_mpiexec():
    if find_site(snapshot()).mpiexec is None:
        pytest.skip("no mpiexec")


@pytest.mark.thorough
def test_a_grid_of_four_trains_as_one_rank_and_goes_on_on_other_grids(tmp_path):
    def goes_on(ranks, steps, *arguments):
        return losses_of(ranks, tmp_path / "grid", steps, *arguments)

    alone = losses_of(1, tmp_path / "alone", 5)
    assert alone == sorted(alone, reverse=True)
    square = goes_on(4, 2, *grid(pp=2, mp=2), "--picture", str(tmp_path / "a.svg"))
    assert square == pytest.approx(alone[:2], abs=1e-5)
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    row = goes_on(2, 4, *grid(pp=2), "--schedule", "ZBH1", "--resume")
    assert row == pytest.approx(alone[2:4], abs=1e-5)
    cut = goes_on(2, 5, *grid(mp=2), "--resume")
    assert cut == pytest.approx(alone[4:], abs=1e-5)


@pytest.mark.slow
def test_eight_ranks_train_as_one_and_go_on_on_four(tmp_path):
    alone = losses_of(1, tmp_path / "alone", 12)
    cube = losses_of(8, tmp_path / "grid", 8, *grid(dp=2, pp=2, mp=2))
    assert cube == pytest.approx(alone[:8], abs=1e-5)
    row = losses_of(4, tmp_path / "grid", 12, *grid(dp=2, pp=2), "--schedule", "ZBH1", "--resume")
    assert row == pytest.approx(alone[8:], abs=1e-5)
