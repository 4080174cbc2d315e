"""Arrays across the ranks of this MPI job, in checkpoints and files."""

import array_file_checks
import pytest


@pytest.mark.parametrize("check", array_file_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check, folder):
    check(folder)
