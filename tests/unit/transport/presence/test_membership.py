"""Who is still there, and who hears of it."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.transport.presence.membership import Membership


def test_who_leaves_is_known_with_the_reason_that_came_first():
    group = Membership([10, 20, 30])
    assert (group.members, dict(group.departed)) == ((10, 20, 30), {})
    group.note(20, "has ended")
    group.note(20, "has failed")
    assert group.members == (10, 30)
    assert dict(group.departed) == {20: "has ended"}
    assert repr(group) == "<Membership: ranks [10, 30], rank 20 has ended>"


def test_what_is_known_cannot_be_changed_by_who_reads_it():
    with pytest.raises(TypeError):
        Membership([0, 1]).departed[1] = "has ended"


def test_listeners_hear_of_each_rank_once_until_they_stop():
    heard, group = [], Membership([10, 20, 30])
    stop = group.subscribe(lambda rank, why: heard.append((rank, why)))
    group.note(10, "has ended")
    group.note(10, "has ended")
    stop()
    stop()
    group.note(20, "has ended")
    assert heard == [(10, "has ended")]


def test_a_listener_that_fails_is_a_warning_and_the_others_hear_of_it():
    heard, group = [], Membership([10, 20])
    group.subscribe(lambda rank, why: 1 / 0)
    group.subscribe(lambda rank, why: heard.append(rank))
    with pytest.warns(RuntimeWarning, match="when rank 20 left: ZeroDivisionError"):
        group.note(20, "has ended")
    assert heard == [20]


def test_to_look_takes_in_what_others_have_told():
    group = Membership([10, 20], lambda: group.note(20, "has ended"))
    assert dict(group.departed) == {}
    assert dict(group.look()) == {20: "has ended"}


def test_simulated_ranks_know_which_of_them_has_left():
    def program():
        if dist.get_rank() == 1:
            return
        with pytest.raises(dist.RemoteError, match="rank 1"):
            dist.all_reduce(np.ones(1))
        membership = dist.get_group().transport.membership
        assert dist.get_rank() in membership.members
        assert 1 not in membership.members
        assert membership.departed[1]

    dist.simulate(3, program)
