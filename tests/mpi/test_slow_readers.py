"""An array is read where it lies: what its owner does with it must wait for the slowest reader.

Rank 0 reads slowly here. Whatever the others do to their parts once an operation has ended, rank 0
must end with what was in them when it began.
"""

import time
import weakref

import numpy as np
import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist import Partial, ProcessMesh, Shard
from hpcdist.transport.mpi import intranode_boxes

SHAPE = (640, 512)
WAIT_S = 0.1

OPERATIONS = {
    "made whole": lambda a: dist.reshard(a, a.process_mesh, []),
    "cut otherwise": lambda a: dist.reshard(a, a.process_mesh, [Shard(1)]),
    "rolled": lambda a: np.roll(a, 100, 0),
    "windows": lambda a: dist.map_overlap(lambda part: part[1:-1], a, depth={0: 1}, boundary=0.0),
    "sorted": lambda a: np.sort(a.reshape(-1)),
    "in the background": lambda a: dist.reshard(a, a.process_mesh, [Shard(1)], async_op=True),
}
EXPECTED = {"rolled": lambda x: np.roll(x, 100, 0), "sorted": lambda x: np.sort(x.reshape(-1))}


@pytest.fixture(autouse=True)
def _rank_0_reads_slowly(monkeypatch, rank):
    filled = intranode_boxes.fill

    def fill_later(call, pieces):
        time.sleep(WAIT_S)
        filled(call, pieces)

    if rank == 0:
        monkeypatch.setattr(intranode_boxes, "fill", fill_later)


def spread(x, memory, mesh):
    """Return an array cut into rows, in memory that the ranks share or in that of each rank."""
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    if memory == "ordinary":
        a = dist.dtensor_from_local(a.local.copy(), mesh, [Shard(0)], shape=x.shape)
    heap = mesh.group.transport.context.heap
    is_shared = heap.offset_of(a.local) is not None
    assert is_shared == (memory == "shared" and mesh.size > 1)
    return a


def overwrite(arrays):
    arrays[0].local[...] = -1


def drop(arrays):
    """Drop an array, and fill free memory; return whether nobody holds the memory that it had."""
    owner = local = arrays[0].local
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    held, shape = weakref.ref(owner), local.shape
    del owner, local
    arrays.clear()
    for other in [dist.empty(shape) for _ in range(4)]:
        other[...] = -1
    return held() is None


@pytest.mark.parametrize("then", [overwrite, drop])
@pytest.mark.parametrize("memory", first_of(["shared", "ordinary"]))
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_slow_reader_has_what_was_there(name, memory, then, size):
    x = np.random.default_rng(0).permutation(SHAPE[0] * SHAPE[1]).reshape(SHAPE) * 1.0
    arrays = [spread(x, memory, ProcessMesh([*range(size)]))]
    result = OPERATIONS[name](arrays[0])
    if name == "in the background" and then is overwrite:
        result.wait()
    is_free = then(arrays)
    result = result.result() if name == "in the background" else result
    if then is drop and memory == "shared" and name != "in the background" and size > 1:
        assert is_free
    whole = dist.unshard_dtensor(result)
    np.testing.assert_array_equal(whole, EXPECTED.get(name, lambda x: x)(x))


@pytest.mark.parametrize("placements", [[], [Shard(0)]], ids=["whole", "cut"])
def test_contributions_are_combined_from_what_was_there(placements, rank, size):
    mesh = ProcessMesh([*range(size)])
    part = dist.empty(SHAPE)
    part[...] = rank + 1
    arrays = [dist.dtensor_from_local(part, mesh, [Partial()], shape=SHAPE)]
    result = dist.reshard(arrays[0], mesh, placements)
    part[...] = -1
    drop(arrays)
    np.testing.assert_array_equal(
        dist.unshard_dtensor(result), np.full(SHAPE, sum(range(size + 1)))
    )


def test_memory_that_others_may_read_is_not_resized(size):
    a = dist.shard_tensor(np.zeros(SHAPE), ProcessMesh([*range(size)]), [Shard(0)])
    if size > 1:
        with pytest.raises(ValueError, match="does not own its data"):
            a.local.resize((1,), refcheck=False)
