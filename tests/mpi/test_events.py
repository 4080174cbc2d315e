"""The same on the ranks of an MPI job; see `event_checks`."""

import event_checks
import pytest

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")


@pytest.mark.parametrize("check", event_checks.check)
def test_listeners(check):
    check()
