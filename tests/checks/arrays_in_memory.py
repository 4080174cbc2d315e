"""Arrays of all ranks in one process: a dict from coordinates to parts."""

import itertools

import numpy as np
from hypothesis import strategies as st

from hpcdist.boxes import lengths, within
from hpcdist.mesh.layout import layout_of, make_layout
from hpcdist.mesh.placements import Partial, ReduceType, Replicate, Shard
from hpcdist.mesh.planner import WHOLE
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.reads import reads_of

MESHES = {
    "(4,)": ProcessMesh([0, 1, 2, 3]),
    "(2, 2)": ProcessMesh([[0, 1], [2, 3]]),
    "permuted": ProcessMesh([[3, 0], [1, 2]]),
    "(2, 2, 2)": ProcessMesh(shape=[2, 2, 2]),
}
OTHERS = [ProcessMesh(shape=[3, 2]), ProcessMesh(shape=[1, 3], process_ids=[2, 0, 5])]
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


@st.composite
def layouts_of(draw, shape, meshes=None):
    """Draw a layout: axes that cut in any order, boundaries anywhere, parts that are empty."""
    mesh = draw(st.sampled_from(meshes or [*MESHES.values(), *OTHERS]))
    kind = draw(st.sampled_from([SUM, MAX, AVG]))
    axes, partial, cuts = [[] for _ in shape], [None] * mesh.ndim, []
    for axis in draw(st.permutations(range(mesh.ndim))):
        what = draw(st.integers(-2, len(shape) - 1))
        if what >= 0:
            axes[what].append(axis)
        elif what == -1:
            partial[axis] = kind
    for length, cutting in zip(shape, axes, strict=True):
        inner = int(np.prod([mesh.shape[axis] for axis in cutting])) - 1
        anywhere = st.lists(st.integers(0, length), min_size=inner, max_size=inner)
        bounds = draw(st.none() | anywhere)
        cuts.append(None if bounds is None else (0, *sorted(bounds), length))
    return make_layout(mesh, shape, axes, cuts, partial)


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


def contributions_to(array, kind, count):
    """Return different arrays that are reduced to an array."""
    which = (np.arange(array.size) % count).reshape(array.shape)
    steps = np.arange(array.size).reshape(array.shape) % 3
    if kind in (SUM, AVG):
        others = [steps * (5 - k) for k in range(1, count)]
        return [array * (count if kind is AVG else 1) - sum(others), *others]
    if kind is ReduceType.kRedProd:
        others = [2.0 ** (steps - k) for k in range(1, count)]
        return [array / np.prod(others, axis=0), *others]
    weaker = {MAX: array - 1 - steps, ReduceType.kRedMin: array + 1 + steps}
    weaker = weaker.get(kind, np.full_like(array, NEUTRAL[kind]))
    return [np.where(which == k, array, weaker) for k in range(count)]


def contributors(layout):
    """Return the coordinates along the partial axes."""
    sizes = [layout.mesh.shape[axis] for axis in partial_axes(layout)]
    return [*itertools.product(*map(range, sizes))]


def scattered(array, layout):
    """Return the parts of an array; where there are contributions they differ."""
    keys = contributors(layout)
    kind = kind_of(layout)
    values = [array] if kind is None else contributions_to(array, kind, len(keys))
    values = dict(zip(keys, values, strict=True))
    axes = partial_axes(layout)
    return {
        place: values[tuple(place[axis] for axis in axes)][within(layout.box(place), all_of(array))]
        for place in layout.mesh.coordinates()
    }


def whole_of(parts, layout):
    """Return the array that parts are of; all ranks that hold the same must agree."""
    axes, kind = partial_axes(layout), kind_of(layout)
    values = {key: np.full(layout.shape, np.nan) for key in contributors(layout)}
    for place, part in parts.items():
        value = values[tuple(place[axis] for axis in axes)]
        assert part.shape == layout.local_shape(place)
        where = within(layout.box(place), all_of(value))
        there = value[where]
        assert np.isnan(there).all() or np.array_equal(there, part), "ranks hold different values"
        value[where] = part
    assert not any(np.isnan(value).any() for value in values.values())
    return combined([*values.values()], kind)


def combined(values, kind):
    """Return what contributions are reduced to."""
    whole = values[0]
    for value in values[1:]:
        whole = COMBINE[kind](whole, value)
    return whole / len(values) if kind is AVG else whole


def all_of(array):
    """Return the box of a whole array."""
    return tuple((0, length) for length in array.shape)


def pieced(parts, src, dst):
    """Return the parts of `dst`, read as `reads_of` says."""
    result = {}
    for place in dst.mesh.coordinates():
        box, kind = dst.box(place), kind_of(dst)
        part = np.full(lengths(box), np.nan if kind is None else float(NEUTRAL[kind]))
        counts = np.zeros(part.shape)
        for piece in reads_of(src, dst, place):
            value = parts[piece.coordinate][within(piece.box, src.box(piece.coordinate))]
            target = within(piece.box, box)
            assert piece.first == (counts[target] == 0).all()
            part[target] = value if piece.first else COMBINE[piece.reduce](part[target], value)
            counts[target] += 1
        if kind_of(src) is AVG:
            part = np.where(counts > 0, part / np.maximum(counts, 1), part)
        result[place] = part
    return result


def lines(mesh, axis):
    """Return the coordinates of each line of ranks along an axis."""
    found = {}
    for place in mesh.coordinates():
        found.setdefault((*place[:axis], *place[axis + 1 :]), []).append(place)
    return [*found.values()]


def stepped(parts, at, step):
    """Return the parts after a step, each made as its verb allows and of nothing else."""
    return {
        "slice": _sliced,
        "to_partial": _made_partial,
        "all_reduce": _reduced,
        "reduce_scatter": _reduced,
        "all_gather": _gathered,
        "all_to_all": _exchanged,
        "exchange": _exchanged,
    }[step.verb](parts, at, step)


def _sliced(parts, at, step):
    return {place: part[within(step.to.box(place), at.box(place))] for place, part in parts.items()}


def _made_partial(parts, at, step):
    kind, result = step.to.partial[step.axis], {}
    for place, part in parts.items():
        box = step.to.box(place)
        cuts = any(step.axis in axes for axes in at.axes)
        whole = np.full(lengths(box), float(NEUTRAL[kind]))
        if cuts or kind is AVG or place[step.axis] == 0:
            whole[within(at.box(place), box)] = part
        result[place] = whole
    return result


def _reduced(parts, at, step):
    kind, result = at.partial[step.axis], {}
    for line in lines(at.mesh, step.axis):
        assert len({at.box(place) for place in line}) == 1
        whole = combined([parts[place] for place in line], kind)
        for place in line:
            result[place] = whole[within(step.to.box(place), at.box(place))]
    return result


def _gathered(parts, at, step):
    result = {}
    for line in lines(at.mesh, step.axis):
        for place in line:
            box = step.to.box(place)
            result[place] = np.full(lengths(box), np.nan)
            for other in line:
                result[place][within(at.box(other), box)] = parts[other]
    return result


def _exchanged(parts, at, step):
    assert at.partial == step.to.partial
    result = {}
    for place in parts:
        box = step.to.box(place)
        result[place] = np.full(lengths(box), np.nan)
        for piece in reads_of(at, step.to, place):
            other = piece.coordinate
            assert piece.reduce is None
            same = [x == y for x, y in zip(place, other, strict=True)]
            assert step.axis == WHOLE or all(same[: step.axis] + same[step.axis + 1 :])
            part = parts[other][within(piece.box, at.box(other))]
            result[place][within(piece.box, box)] = part
    return result
