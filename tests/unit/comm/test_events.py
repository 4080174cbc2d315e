"""What listeners hear on simulated ranks; see `event_checks`."""

import event_checks
import numpy as np
import pytest

import hpcdist as dist


@pytest.mark.parametrize("check", event_checks.check)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_listeners(check, ranks):
    dist.simulate(ranks, check)


def test_listeners_come_and_go():
    seen = []
    stop = dist.subscribe(seen.append)

    def reduce_once():
        dist.all_reduce(np.ones(2))

    dist.simulate(1, reduce_once)
    stop()
    stop()
    dist.simulate(1, reduce_once)
    assert [(event.phase, event.name, event.nbytes) for event in seen] == [
        ("begin", "all_reduce", 16),
        ("end", "all_reduce", 16),
    ]


def test_a_batch_of_which_one_message_is_wrong_is_not_told_to_begin():
    seen = []

    def program():
        good, wrong = np.zeros(2), np.zeros(2)
        batch = [dist.P2POp(op, x, 0) for op, x in [(dist.isend, good), (dist.irecv, wrong)]]
        wrong.flags.writeable = False
        with pytest.raises(dist.UsageError, match="read-only"):
            dist.batch_isend_irecv(batch)

    stop = dist.subscribe(seen.append)
    try:
        dist.simulate(1, program)
    finally:
        stop()
    assert seen == []
