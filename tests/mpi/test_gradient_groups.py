"""Parameters with a group of their own, on the ranks of this MPI job."""

import group_checks
import pytest


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("check", group_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check, overlap, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    check()
