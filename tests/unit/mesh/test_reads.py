"""What ranks read, done in memory: every pair of placements is what NumPy says."""

import itertools

import numpy as np
import pytest
from in_memory import MESHES, SHAPES, array_of, every_layout, pieced, scattered, whole_of
from tiers import first_of

from hpcdist.mesh.layout import layout_of, make_layout
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import gives_of, reads_of
