"""Data-parallel training of plain arrays, on the ranks of this MPI job."""

import averaging_checks
import pytest
import training_checks
from tiers import first_of

CHECKS = [*training_checks.check, *averaging_checks.check]


@pytest.mark.parametrize("overlap", first_of(["always", "never"]))
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check, overlap, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    check()
