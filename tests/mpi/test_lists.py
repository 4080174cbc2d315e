"""Lists of arrays on real ranks: of torch's tensors, and in memory that the ranks share."""

import pytest

import hpcdist as dist
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi.collectives import VERBS

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")
COUNT = 20_000


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_lists_of_tensors_of_different_shapes_are_filled(name, rank, size):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)

    def tensor(number, count=COUNT):
        return (torch.arange(count * (number + 1)) % 3 == number % 3).to(dtype).view(-1, number + 1)

    def check(found):
        assert all(each.dtype is dtype for each in found)
        for each, x in enumerate(found):
            assert torch.equal(x, tensor(each))

    outs = [torch.zeros_like(tensor(each)) for each in range(size)]
    dist.all_gather(outs, tensor(rank))
    check(outs)
    filled = []
    dist.alltoall(filled, [tensor(rank)] * size)
    check(filled)
    mine = torch.zeros_like(tensor(rank))
    dist.scatter(mine, outs if rank == 0 else None)
    assert torch.equal(mine, tensor(rank))
    if dtype is not torch.bool:
        dist.reduce_scatter(mine, outs)
        assert torch.equal(mine, tensor(rank) * size)


@pytest.fixture
def _no_mpi(monkeypatch, world):
    """Let operations fail that would copy through MPI what lies in shared memory."""
    if world.nranks == 1 or not world.transport.one_node:
        pytest.skip("needs ranks that share memory")
    for kind in Kind:
        if Kind.REDUCE_SCATTER <= kind <= Kind.ALLTOALL:
            monkeypatch.delitem(VERBS, kind)


@pytest.mark.usefixtures("_no_mpi")
def test_lists_in_shared_memory_are_read_where_they_lie(rank, size):
    def listed():
        return [dist.zeros(COUNT) for _ in range(2 * size)][::2]

    given, outs, x = listed(), listed(), dist.zeros(COUNT)
    for to in range(size):
        given[to][...] = 10 * rank + to
    x[...] = rank
    dist.all_gather(outs, x)
    assert all((outs[each] == each).all() for each in range(size))
    dist.gather(x, outs[::-1] if rank == 0 else None, 0)
    assert rank or all((outs[::-1][each] == each).all() for each in range(size))
    dist.alltoall(outs, given)
    assert all((outs[each] == 10 * each + rank).all() for each in range(size))
    filled = []
    dist.alltoall(filled, given)
    assert all((filled[each] == 10 * each + rank).all() for each in range(size))
    dist.scatter(x, given if rank == size - 1 else None, size - 1)
    assert (x == 10 * (size - 1) + rank).all()
    dist.reduce_scatter(x, given)
    assert (x == sum(10 * each + rank for each in range(size))).all()
