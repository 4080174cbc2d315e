"""What ranks read, done in memory: every pair of placements is what NumPy says."""

import itertools

import numpy as np
import pytest
from in_memory import (
    AVG,
    MAX,
    MESHES,
    SHAPES,
    SUM,
    array_of,
    every_layout,
    kind_of,
    pieced,
    scattered,
    whole_of,
)
from tiers import first_of

from hpcdist.mesh.boxes import meet, volume
from hpcdist.mesh.layout import layout_of, make_layout
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import gives_of, reads_of

X, Y = MESHES["(2, 2)"], MESHES["permuted"]


def check(array, src, dst):
    got = whole_of(pieced(scattered(array, src), src, dst), dst)
    assert np.array_equal(got, array), (src, dst)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*MESHES])
def test_every_layout_becomes_every_other_one(mesh, shape):
    layouts = every_layout(MESHES[mesh], shape)
    pairs = [*itertools.product(layouts, layouts)]
    array = array_of(shape)
    for src, dst in pairs[:: 1 + len(pairs) // 300]:
        check(array, src, dst)
