"""Arrays that the ranks of a node lend each other for a block; on any number of ranks."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.comm import lending
from hpcdist.comm.lending import lent
from hpcdist.comm.session import require_session

pytestmark = pytest.mark.two_ranks
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def lend(array, shapes=None, words="numbers", key=11):
    group = require_session().world
    return lent(array, shapes or [array.shape] * SIZE, key=key, words=words, group=group)


@several
@pytest.mark.parametrize("make", [np.empty, dist.empty], ids=["ordinary", "shared"])
@pytest.mark.parametrize("shape", [(), (3,), (40, 3), (512, 600)])
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_every_rank_sees_the_arrays_of_all_as_they_are_then(make, shape):
    own = make(shape)
    for step in range(5):
        own[...] = RANK + 10 * step
        with lend(own) as arrays:
            for rank, array in enumerate(arrays):
                assert (array.shape, array.dtype) == (shape, own.dtype)
                assert (array == rank + 10 * step).all()
                assert not array.flags.writeable
            dist.barrier()  # operations go on
        own[...] = -1  # nobody reads it any more


@several
def test_arrays_of_different_lengths_and_none_are_lent():
    shapes = [(rank % 3, 2) for rank in range(SIZE)]
    dtypes = "i1", "f8", "c16", "M8[s]", [("id", "i4"), ("x", "f8", (2,))]
    for dtype in dtypes:
        own = np.full(shapes[RANK], RANK).astype(dtype) if type(dtype) is str else None
        own = np.zeros(shapes[RANK], dtype) if own is None else own
        with lend(own, shapes) as arrays:
            assert [array.shape for array in arrays] == shapes
            np.testing.assert_array_equal(arrays[RANK], own)


@several
def test_what_lies_in_shared_memory_is_not_copied(world):
    heap, own = world.transport.context.heap, dist.zeros(1 << 16)
    used = heap.used
    with lend(own):
        assert heap.used <= used
    ordinary = np.zeros(1 << 16)
    for _ in range(3):
        with lend(ordinary):
            assert heap.used > used
    dist.empty(1)  # takes back what has returned
    assert heap.used <= used + 256


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_where_one_rank_has_no_room_nobody_sees_anything(monkeypatch, world):
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(type(world.transport.context.heap), "empty", lambda *_: None)
        with lend(np.zeros(5)) as arrays:
            assert arrays is None
    with lend(np.zeros(5)) as arrays:
        assert arrays is not None


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_where_one_rank_has_no_memory_all_are_told(monkeypatch):
    def without_memory(*_):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(lending, "_shown", without_memory)
        with (
            pytest.raises(
                dist.TransportError if RANK == 0 else dist.RemoteError, match="none left"
            ),
            lend(np.zeros(5)),
        ):
            pass
    with lend(np.zeros(5)) as arrays:
        assert len(arrays) == SIZE


def test_between_nodes_nobody_sees_anything(world_with):
    world_with(ranks_per_node=1)
    with lend(np.zeros(5)) as arrays:
        assert arrays is None


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_rank_that_fails_in_the_block_holds_up_nobody():
    for failing in range(SIZE):
        try:
            with lend(np.full(3, RANK)) as arrays:
                if failing == RANK:
                    raise ValueError("no numbers")
                assert arrays[failing].tolist() == [failing] * 3
        except ValueError:
            assert failing == RANK


@several
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_ranks_that_lend_other_things_are_told_both():
    last = RANK == SIZE - 1
    words = "letters" if last else "numbers"
    with (
        pytest.raises(dist.MismatchError, match=r"(?s)numbers.*letters"),
        lend(np.zeros(3), words=words, key=12 if last else 11),
    ):
        pass


@several
@pytest.mark.parametrize("full", [False, True])
def test_products_and_sorted_arrays_are_the_same_where_nothing_can_be_lent(
    monkeypatch, world, full
):
    draw, mesh = np.random.default_rng(1), dist.ProcessMesh([*range(SIZE)])
    x, y = draw.integers(-9, 9, (3 * SIZE + 1, 500)), draw.integers(-9, 9, (500, 400))
    numbers = np.where(draw.random(90_000) < 0.1, np.nan, draw.random(90_000))
    if full and RANK == 0:
        monkeypatch.setattr(type(world.transport.context.heap), "empty", lambda *_: None)
    a, b = (dist.shard_tensor(each, mesh, [dist.Shard(0)], "f8") for each in (x, y))
    np.testing.assert_array_equal(dist.unshard_dtensor(a @ b), x @ y)
    c = dist.shard_tensor(numbers, mesh, [dist.Shard(0)])
    np.testing.assert_array_equal(dist.unshard_dtensor(np.sort(c)), np.sort(numbers))
    order = dist.unshard_dtensor(np.argsort(c))
    np.testing.assert_array_equal(order, np.argsort(numbers, kind="stable"))
