"""See `rpc_checks`: on the ranks of this MPI job."""

import pytest
import rpc_checks

import hpcdist as dist


@pytest.mark.parametrize("check", rpc_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_calls_go_by_messages_of_mpi():
    dist.rpc.init_rpc(link="mpi", threads=2, max_threads=4)
    rpc_checks.arrays_arrive_writable_and_equal()
    assert rpc_checks.call(rpc_checks.back_and_forth, 20) == 20
    with pytest.raises(ValueError, match="no"):
        rpc_checks.call(rpc_checks.fail, ValueError("no"))
    assert rpc_checks.call(rpc_checks.immediate, 3)[0] == 3
    assert rpc_checks.call(rpc_checks.add, 1, to=dist.get_rank()) == 1
    with pytest.raises(dist.CollectiveTimeout):
        rpc_checks.call(rpc_checks.rest, timeout=0.05)
    dist.rpc.shutdown()


@pytest.mark.skipif("dist.get_world_size() < 2", reason="needs two ranks")
def test_ranks_agree_on_the_link():
    with pytest.raises(dist.UsageError, match=r"link='mpi' on rank 0, but 'auto' on rank 1"):
        dist.rpc.init_rpc(link="auto" if dist.get_rank() else "mpi")
