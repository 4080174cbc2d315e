"""Arrays across the ranks of this MPI job."""

import mesh_checks
import numpy as np
import pytest

import hpcdist as dist
from hpcdist import ProcessMesh, ReduceType, Shard


@pytest.mark.parametrize("check", mesh_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.thorough
@pytest.mark.parametrize("shape", mesh_checks.SHAPES)
def test_pairs_of_placements(shape):
    for mesh in mesh_checks.meshes_of(dist.get_world_size()):
        mesh_checks.every_pair(mesh, shape, [ReduceType.kRedSum, ReduceType.kRedMax], 300)


@pytest.mark.parametrize(
    "check",
    [
        mesh_checks.pairs_of_placements_by_plan_and_in_one_step,
        mesh_checks.arrays_go_to_other_meshes,
        mesh_checks.large_arrays_are_read_where_they_lie,
        mesh_checks.ranks_that_reshard_differently_hear_of_both_layouts,
        mesh_checks.reshards_are_under_way_together,
    ],
)
def test_between_nodes(check, world_with):
    world_with(ranks_per_node=1)
    check()


def test_meshes_within_nodes_share_memory(world_with, rank, size):
    world_with(ranks_per_node=2)
    mine = ProcessMesh([each for each in range(size) if each // 2 == rank // 2])
    a = dist.shard_tensor(np.ones((400, 400)), mine, [Shard(0)])
    for array in (a, dist.reshard(a, mine, [Shard(1)])):
        shared = mine.group.transport.context.heap.offset_of(array.local)
        assert (shared is not None) == (mine.size > 1)


@pytest.mark.parametrize("make", [dist.shard_tensor, dist.dtensor_from_local])
def test_functions_of_meshes_begin_the_world(make, rank, size):
    dist.destroy_process_group()
    mesh = ProcessMesh([*range(size)], ["x"])
    assert dist.get_mesh() is None
    array = make(np.ones((2, 3)), mesh, [Shard(0)])
    assert array.sum() == (6 if make is dist.shard_tensor else 6 * size)
    assert mesh.coordinate == (rank,)
    assert dist.is_initialized()
