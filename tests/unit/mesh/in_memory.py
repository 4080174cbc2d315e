"""Arrays of all ranks in one process: a dict from coordinates to parts."""

import itertools

import numpy as np

from hpcdist.mesh.boxes import lengths, within
from hpcdist.mesh.layout import layout_of
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import reads_of

MESHES = {
    "(4,)": ProcessMesh([0, 1, 2, 3]),
    "(2, 2)": ProcessMesh([[0, 1], [2, 3]]),
    "permuted": ProcessMesh([[3, 0], [1, 2]]),
    "(2, 2, 2)": ProcessMesh(shape=[2, 2, 2]),
}
SHAPES = [(5, 7), (8, 8), (3, 1), (0, 4), (9, 2, 5), ()]

SUM, MAX, AVG = ReduceType.kRedSum, ReduceType.kRedMax, ReduceType.kRedAvg
COMBINE = {
    SUM: np.add,
    MAX: np.maximum,
    ReduceType.kRedMin: np.minimum,
    ReduceType.kRedProd: np.multiply,
    AVG: np.add,
    ReduceType.kRedAny: np.logical_or,
    ReduceType.kRedAll: np.logical_and,
}
NEUTRAL = {
    SUM: 0,
    MAX: -np.inf,
    ReduceType.kRedMin: np.inf,
    ReduceType.kRedProd: 1,
    AVG: 0,
    ReduceType.kRedAny: 0,
    ReduceType.kRedAll: 1,
}


def every_layout(mesh, shape, kinds=(SUM, MAX)):
    """Return the layouts of all placements, with one kind of partial values at most."""
    choices = [Replicate(), *map(Shard, range(len(shape))), *map(Partial, kinds)]
    return [
        layout_of(mesh, shape, placements)
        for placements in itertools.product(choices, repeat=mesh.ndim)
        if len({each for each in placements if each.is_partial()}) < 2
    ]


def kind_of(layout):
    """Return how the partial values of a layout are reduced; None if there are none."""
    return next((kind for kind in layout.partial if kind is not None), None)


def partial_axes(layout):
    """Return the axes along which there are contributions."""
    return [axis for axis, kind in enumerate(layout.partial) if kind is not None]


def array_of(shape, kind=None):
    """Return an array whose elements differ; of 0 and 1 where a kind asks for truths."""
    array = (np.arange(np.prod(shape)) * 7 + 3).reshape(shape).astype(float)
    return array % 2 if kind in (ReduceType.kRedAny, ReduceType.kRedAll) else array


def scattered(array, layout):
    """Return the parts of an array; contributions differ, and what they make is the array."""
    mesh, kind = layout.mesh, kind_of(layout)
    parts = {}
    axes = partial_axes(layout)
    for place in mesh.coordinates():
        part = array[within(layout.box(place), tuple((0, n) for n in array.shape))].copy()
        number = sum(place[axis] * 2**i for i, axis in enumerate(axes))
        count = int(np.prod([mesh.shape[axis] for axis in axes]))
        if kind in (SUM, AVG):  # these sum up to (count times) the array
            scale = count if kind is AVG else 1
            others = [k for k in range(1, max(2, sum(2**i for i in range(len(axes))) + 1))]
            part = _summand(part * scale, number, axes, mesh, others)
        elif kind is not None and number != (part.size + len(axes)) % 2:
            part = part * 0 + NEUTRAL[kind] if number else part
        parts[place] = part
    return parts
