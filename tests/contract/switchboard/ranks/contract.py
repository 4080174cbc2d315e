"""The contract, on ranks that talk to a switchboard."""

import pytest

import hpcdist as dist
from hpcdist.testing.contract import TransportContract


class TestSwitchboard(TransportContract):
    def run(self, check):
        return [check()]


def test_the_world_and_its_groups_have_the_transport_that_was_asked_for():
    assert dist.get_backend() == "SWITCHBOARD"
    assert dist.new_group(backend="switchboard").backend == "SWITCHBOARD"
    assert dist.new_group(backend="gloo").backend == "SWITCHBOARD"
    with pytest.raises(dist.UsageError, match=r"'mpi' differs.*'switchboard'"):
        dist.new_group(backend="mpi")
    assert dist.ParallelEnv().local_size == dist.get_world_size()
    assert dist.get_group().mpi_comm is None


def test_groups_share_one_proxy_so_that_none_closes_the_connection_of_others_when_it_is_collected():
    assert dist.new_group().transport.board is dist.get_group().transport.board
