"""Sharded training of plain arrays, on the ranks of this MPI job."""

import pytest
import sharding_checks


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("check", sharding_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check, overlap, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    check()
