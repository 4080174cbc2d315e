"""What tables decide without ranks: modes, requests, and who is where."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import ps
from hpcdist.fleet.placement import Placement, Post, place, post_of
from hpcdist.fleet.roles import Role, UserDefinedRoleMaker
from hpcdist.ps.ids import owners
from hpcdist.ps.modes import mode_of, mode_told
from hpcdist.ps.route import Verb, agreed, requests_of


def test_requests_bring_ids_of_one_server_together_and_keep_their_order():
    ids = np.arange(100)
    for servers in (1, 2, 7):
        order, counts = requests_of(ids, servers)
        assert counts.sum() == 100
        assert sorted(order) == [*range(100)]
        parts = np.split(ids[order], np.cumsum(counts)[:-1])
        for server, part in enumerate(parts):
            assert (owners(part, servers) == server).all()
            assert (np.diff(part) > 0).all()


def test_requests_of_no_ids_are_none():
    order, counts = requests_of(np.empty(0, np.int64), 3)
    assert len(order) == 0
    assert counts.tolist() == [0, 0, 0]


def test_a_meeting_is_about_what_those_do_who_do_anything():
    told = np.array([[Verb.PULL, 1], [Verb.SERVES, -1], [Verb.PULL, 1], [Verb.STOPPED, -1]])
    assert agreed(told, range(4), ["a", "b"]) == (Verb.PULL, 1)
    assert agreed(told[[1, 3]], range(2), ["a", "b"]) == (None, -1)


def test_a_meeting_of_workers_that_do_different_things_names_them():
    told = np.array([[Verb.PULL, 1], [Verb.SERVES, -1], [Verb.PUSH, 0]])
    with pytest.raises(dist.MismatchError, match="rank 4 is in pull of table 'b', but rank 6 in p"):
        agreed(told, [4, 5, 6], ["a", "b"])


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("sync", ps.Sync()),
        ("async", ps.Async(16, 1)),
        ("geo", ps.Geo(100)),
        (ps.Ssp(3), ps.Ssp(3, None)),
    ],
)
def test_a_mode_is_a_name_or_one_with_settings(given, mode):
    assert mode_of(given) == mode


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("fast", "one of 'sync'"),
        (3, "got 3"),
        (ps.Async(0), "send_queue_size must be an integer of at least 1, got 0"),
        (ps.Geo(True), "k_steps must"),
        (ps.Ssp(-1), "staleness must be an integer of at least 0"),
        (ps.Ssp(1, -2.0), "timeout must be a positive number"),
    ],
)
def test_what_is_no_mode_is_refused(given, told):
    with pytest.raises(dist.UsageError, match=told):
        mode_of(given)


def test_a_strategy_tells_the_mode():
    configs = {"k_steps": -1, "send_queue_size": 4, "max_merge_var_num": 2}
    assert mode_told(False, configs) == ps.Sync()
    assert mode_told(True, configs) == ps.Async(4, 2)
    assert mode_told(True, configs | {"k_steps": 7}) == ps.Geo(7)


# ---- who is where


def test_the_last_ranks_serve_where_a_number_of_servers_is_told():
    posts = [post_of(None, 2, rank, 5) for rank in range(5)]
    assert place(posts, range(5)) == Placement((0, 1, 2), (3, 4))
    assert post_of(None, 0, 1, 5) is None


@pytest.mark.parametrize("number", [-1, 5, 1.0, True, "2"])
def test_a_number_of_servers_leaves_a_worker(number):
    with pytest.raises(dist.UsageError, match="server_num must be an integer"):
        post_of(None, number, 0, 5)


def test_role_makers_tell_who_serves():
    makers = [
        UserDefinedRoleMaker(
            role=Role.SERVER, current_id=0, worker_num=2, server_endpoints=["a:1"]
        ),
        UserDefinedRoleMaker(
            role=Role.WORKER, current_id=1, worker_num=2, server_endpoints=["a:1"]
        ),
        UserDefinedRoleMaker(
            role=Role.WORKER, current_id=0, worker_num=2, server_endpoints=["a:1"]
        ),
    ]
    posts = [post_of(maker, None, rank, 3) for rank, maker in enumerate(makers)]
    assert place(posts, range(3)) == Placement((2, 1), (0,))
    assert post_of(UserDefinedRoleMaker(worker_num=3), None, 0, 3) is None
    with pytest.raises(dist.UsageError, match="not both"):
        post_of(makers[0], 1, 0, 3)


def worker(number, of=(2, 1)):
    return Post(Role.WORKER, number, *of)


def server(number, of=(2, 1)):
    return Post(Role.SERVER, number, *of)


@pytest.mark.parametrize(
    ("posts", "told"),
    [
        ([worker(0), None, server(0)], "rank 1 was given nothing"),
        ([worker(0), worker(0), server(0)], "ranks 0 and 1 are both worker 0"),
        ([worker(0), worker(1, (3, 1)), server(0)], "rank 1 is set up for 3 workers and 1 servers"),
        ([worker(0), server(0)], "2 workers and 1 server, but the job has 1 and 1"),
        ([Post(Role.COORDINATOR, 0, 2, 1)] * 3, "rank 0 was given coordinator"),
    ],
)
def test_roles_that_do_not_fit_are_refused(posts, told):
    with pytest.raises(dist.UsageError, match=told):
        place(posts, range(len(posts)))
