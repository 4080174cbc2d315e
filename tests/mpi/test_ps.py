"""Tables on real ranks: against a dict of rows, saves, and rows without lock step."""

import numpy as np
import pytest
from table_checks import RATE, SGD, check_programs, check_saves, check_worlds, initial
from table_programs import run_programs

import hpcdist as dist
from hpcdist import fleet, ps

pytestmark = pytest.mark.usefixtures("_anew")


@pytest.fixture
def _anew(world_with):
    """Each test has tables of its own."""
    world_with()


@pytest.fixture
def group(_anew):
    return dist.get_group()


def test_a_table_does_what_a_dict_of_rows_does(group):
    check_programs(group)


def test_a_table_of_some_ranks_is_theirs(group):
    half = group.split(group.rank % 2)
    check_programs(half)


def test_what_was_saved_comes_back(group, folder):
    check_saves(group, folder)


def test_what_is_wrong_on_one_rank_is_an_error_on_all(group):
    table = ps.SparseTable("rows", 3)
    last = group.rank == group.nranks - 1
    with pytest.raises(dist.UsageError if last else dist.RemoteError):
        table.pull(["no id"] if last else [1])
    if group.nranks > 1:
        with pytest.raises(dist.MismatchError, match="has dim=3, but rank"):
            ps.SparseTable("others", 3 + last)
    assert table.pull([1]).shape == (1, 3)


@pytest.mark.parametrize("mode", [ps.Async(2, 3), ps.Ssp(1), ps.Sync()])
@pytest.mark.parametrize("servers", [0, 1])
def test_no_push_is_lost_or_doubled(mode, servers, group):
    servers = min(servers, group.nranks - 1)
    fleet.init(server_num=servers)
    table = ps.SparseTable("rows", 3, optimizer=SGD, initializer=initial, mode=mode)
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    ids = np.arange(300)
    for _ in range(6):
        table.push(ids, np.ones((300, 3), np.float32))
        table.pull(ids)
    table.flush()
    fleet.barrier_worker()
    expected = initial(ids, 3) - RATE * 6 * fleet.worker_num()
    assert np.array_equal(table.pull(ids), expected)
    fleet.stop_worker()


def test_servers_take_part_in_what_all_do(group):
    check_worlds(group.nranks // 2)


@pytest.mark.parametrize("mode", [ps.Sync(), ps.Async(3, 2), ps.Geo(2)])
def test_a_table_does_what_its_model_does(mode, group):
    run_programs(range(4), group.nranks // 2, mode, steps=25)
