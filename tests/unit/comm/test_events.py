"""What listeners hear on simulated ranks; see `event_checks`."""

import event_checks
import pytest

import hpcdist as dist


@pytest.mark.parametrize("check", event_checks.check)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_listeners(check, ranks):
    dist.simulate(ranks, check)
