"""Arrays across the ranks of this MPI job."""

import mesh_checks
import numpy as np
import pytest

import hpcdist as dist
from hpcdist import ProcessMesh, ReduceType


@pytest.mark.parametrize("check", mesh_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.thorough
@pytest.mark.parametrize("shape", mesh_checks.SHAPES)
def test_every_pair_of_placements(shape):
    for mesh in mesh_checks.meshes_of(dist.get_world_size()):
        mesh_checks.every_pair(mesh, shape, [ReduceType.kRedSum, ReduceType.kRedMax])


def test_where_no_memory_is_shared(world_with):
    world_with(shared_heap_mb=0)
    mesh_checks.large_arrays_are_read_where_they_lie()
    mesh_checks.every_pair(ProcessMesh(np.arange(dist.get_world_size())), (5, 7))
