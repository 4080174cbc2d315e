"""What holds for arrays across ranks and their reshards, on any number of ranks.

`of_pairs` has the checks of all pairs of placements; they take the mesh's shape and that of the
array.
"""

import itertools
import math
import pickle
from copy import copy, deepcopy

import numpy as np
import pytest
from checks import Checks

import hpcdist as dist
from hpcdist import Partial, ProcessMesh, ReduceType, Replicate, Shard
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import layout_of, make_layout
from hpcdist.mesh.planner import plan_reshard
from hpcdist.mesh.reshard import reshard_to
from hpcdist.mesh.room import room_for
from hpcdist.mesh.routes import exchange_boxes
from hpcdist.mesh.steps import run_steps

check = Checks()

SHAPES = [(5, 7), (8, 8), (3, 1), (0, 4), (), (9, 2, 5)]

COMBINED = {
    ReduceType.kRedSum: np.add.reduce,
    ReduceType.kRedMax: np.maximum.reduce,
    ReduceType.kRedMin: np.minimum.reduce,
    ReduceType.kRedProd: np.multiply.reduce,
    ReduceType.kRedAvg: lambda parts: np.mean(parts, axis=0),
    ReduceType.kRedAny: np.logical_or.reduce,
    ReduceType.kRedAll: np.logical_and.reduce,
}
"""What contributions are worth together."""

OTHERS = {
    ReduceType.kRedMax: lambda part: part - part.dtype.type(1),
    ReduceType.kRedMin: lambda part: part + part.dtype.type(1),
    ReduceType.kRedProd: np.ones_like,
    ReduceType.kRedAny: np.zeros_like,
    ReduceType.kRedAll: np.ones_like,
}
"""What ranks contribute beside the one that has the value."""


def numbers(shape, dtype="f8"):
    """Return small whole numbers, none of them 0, of which sums and products are exact."""
    return (np.arange(math.prod(shape)) * 5 % 11 + 1).reshape(shape).astype(dtype)


def meshes_of(size):
    """Return meshes of all ranks: lines and grids, in order and not."""
    ranks = np.arange(size)
    yield ProcessMesh(ranks)
    if size > 2:
        yield ProcessMesh(np.roll(ranks, 1)[::-1])
    if size % 2 == 0:
        yield ProcessMesh(ranks.reshape(2, -1), ["x", "y"])
    if size == 4:
        yield ProcessMesh([[3, 1], [0, 2]])
    if size == 8:
        yield ProcessMesh(ranks.reshape(2, 2, 2))


def placements_of(mesh, shape, kinds):
    """Return every list of placements of an array, with partial ones of these kinds."""
    each = [Replicate(), *map(Shard, range(len(shape))), *map(Partial, kinds)]
    for given in itertools.product(each, repeat=mesh.ndim):
        if len({p for p in given if p.is_partial()}) < 2:
            yield given


def where(box):
    return tuple(slice(lo, hi) for lo, hi in box)


def contribution(x, layout, place):
    """Return what the rank at a place holds of `x`, which together with others makes `x`."""
    kind = next((each for each in layout.partial if each is not None), None)
    axes = [axis for axis, each in enumerate(layout.partial) if each is not None]
    part = x[where(layout.box(place))].copy()
    if kind is None:
        return part
    count, own = 1, 0
    for axis in axes:
        count *= layout.mesh.shape[axis]
        own = own * layout.mesh.shape[axis] + place[axis]
    mine = (np.arange(part.size) % count == own).reshape(part.shape)
    if kind is ReduceType.kRedSum:
        return (part - (count * (count - 1) // 2) if own == 0 else part * 0) + own
    if kind is ReduceType.kRedAvg:
        return part + (2 * own - count + 1)
    return np.where(mine, part, OTHERS[kind](part)).astype(x.dtype)


def spread(x, layout):
    """Return the array `x` in any layout, without communication."""
    place = layout.mesh.coordinate
    if place is None:
        return DistArray._of(room_for(layout, x), layout)
    return DistArray._of(contribution(x, layout, place), layout)


def assert_is(array, x):
    """Make sure that an array is `x`: collective if it is partial."""
    layout, place = array.layout, array.layout.mesh.coordinate
    assert array.shape == x.shape
    assert array.dtype == x.dtype
    if not layout.is_partial:
        if place is not None:
            np.testing.assert_array_equal(array.local, x[where(layout.box(place))], strict=True)
        return
    everyone = []
    dist.all_gather_object(everyone, None if place is None else (place, array.local))
    if place is None:
        return
    axes = {axis for axis, kind in enumerate(layout.partial) if kind is not None}
    kind = next(kind for kind in layout.partial if kind is not None)
    parts = [
        part
        for other, part in filter(None, everyone)
        if all(axis in axes or other[axis] == place[axis] for axis in range(len(place)))
    ]
    total = np.asarray(COMBINED[kind](np.stack(parts))).astype(x.dtype)
    np.testing.assert_array_equal(total, x[where(layout.box(place))])


# ---- all pairs of placements


def by_plan(a, layout):
    """Reshard by the planner's steps, whatever is best here."""
    steps = plan_reshard(a.layout, layout, a.itemsize)
    return DistArray._of(run_steps(a.local, a.layout, steps), layout) if steps else a


def in_one_step(a, layout):
    """Reshard by one exchange, whatever is best here."""
    room = room_for(layout, a.local)
    exchange_boxes(a.local, a.layout, layout, room)
    return DistArray._of(room, layout)


def every_pair(mesh, shape, kinds=(ReduceType.kRedSum,), most=2000):
    """Reshard between all placements; of more than `most` pairs, between some of them."""
    x = numbers(shape)
    layouts = [layout_of(mesh, shape, given) for given in placements_of(mesh, shape, kinds)]
    pairs = [*itertools.product(layouts, repeat=2)]
    for src, dst in pairs[:: -(-len(pairs) // most)]:
        a = spread(x, src)
        for way in (by_plan, in_one_step):
            assert_is(way(a, dst), x)
        assert_is(a, x)


@check
def pairs_of_placements_by_plan_and_in_one_step():
    for mesh in meshes_of(dist.get_world_size()):
        for shape in SHAPES[:1] if mesh.ndim > 1 else SHAPES:
            every_pair(mesh, shape, most=100)


def any_layout(mesh, shape, random):
    """Return a layout with any cuts, by axes in any order."""
    axes = [[] for _ in shape]
    for axis in random.permutation(mesh.ndim).tolist():
        dim = int(random.integers(-1, len(shape)))
        if dim >= 0:
            axes[dim].append(axis)
    parts = [math.prod(mesh.shape[axis] for axis in each) for each in axes]
    cuts = [
        (0, *sorted(random.integers(0, length + 1, count - 1).tolist()), length)
        for length, count in zip(shape, parts, strict=True)
    ]
    return make_layout(mesh, shape, axes, cuts)


@check
def any_cuts_become_any_other_cuts():
    random = np.random.default_rng(5)
    meshes = [*meshes_of(dist.get_world_size())]
    for _ in range(40):
        mesh, x = meshes[random.integers(len(meshes))], numbers(random.integers(0, 8, 3).tolist())
        src, dst = (any_layout(mesh, x.shape, random) for _ in range(2))
        for way in (by_plan, in_one_step, reshard_to):
            assert_is(way(spread(x, src), dst), x)
        elsewhere = any_layout(meshes[random.integers(len(meshes))], x.shape, random)
        assert_is(reshard_to(spread(x, src), elsewhere), x)


@check
def a_part_that_is_all_there_is_becomes_a_contribution():
    size = dist.get_world_size()
    mesh, x = ProcessMesh(np.arange(size)), numbers((4, 3))
    for owner in range(size):
        cuts = [[0] * (owner + 1) + [4] * (size - owner), None]
        src = make_layout(mesh, x.shape, [(0,), ()], cuts)
        for kind in (ReduceType.kRedSum, ReduceType.kRedMax):
            for way in (by_plan, in_one_step, reshard_to):
                assert_is(way(spread(x, src), layout_of(mesh, x.shape, [Partial(kind)])), x)


@check
def every_way_to_reduce_survives_every_pair():
    size = dist.get_world_size()
    mesh = ProcessMesh(np.arange(size))
    for kind in ReduceType:
        truth = kind in (ReduceType.kRedAny, ReduceType.kRedAll)
        x = numbers((5, 3)) % 2 == 0 if truth else numbers((5, 3))
        given = [Replicate(), Shard(0), Shard(1), Partial(kind)]
        layouts = [layout_of(mesh, x.shape, [each]) for each in given]
        for src, dst in itertools.product(layouts, repeat=2):
            for way in (by_plan, in_one_step):
                assert_is(way(spread(x, src), dst), x)


@check
def contributions_of_one_kind_become_contributions_of_another():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((4, 3))
    kinds = [kind for kind in ReduceType if kind < ReduceType.kRedAny]
    layouts = [layout_of(mesh, x.shape, [Partial(kind)]) for kind in kinds]
    for src, dst in itertools.product(layouts, repeat=2):
        for way in (by_plan, in_one_step):
            assert_is(way(spread(x, src), dst), x)


# ---- from one mesh to another


def other_meshes(size):
    """Return pairs of meshes whose ranks are others, in part or all, or in another order."""
    ranks = np.arange(size)
    half = max(1, size // 2)
    yield ProcessMesh(ranks), ProcessMesh(ranks[::-1])
    yield ProcessMesh([0]), ProcessMesh([size - 1])
    yield ProcessMesh(ranks[:half]), ProcessMesh(ranks[half:] if size > 1 else ranks)
    yield ProcessMesh(ranks[1:] if size > 1 else ranks), ProcessMesh(ranks)
    if size % 2 == 0:
        yield ProcessMesh(ranks), ProcessMesh(ranks.reshape(2, -1).T)


@check
def arrays_go_to_other_meshes():
    x = numbers((5, 3))
    for pair in other_meshes(dist.get_world_size()):
        for src_mesh, dst_mesh in (pair, pair[::-1]):
            lists = [
                [layout_of(mesh, x.shape, given) for given in placements_of(mesh, x.shape, kinds)]
                for mesh, kinds in ((src_mesh, [ReduceType.kRedSum]), (dst_mesh, [0]))
            ]
            for src, dst in itertools.product(*lists):
                a = spread(x, src)
                assert_is(reshard_to(a, dst), x)
                assert_is(a, x)


def any_mesh(size, random):
    """Return a mesh of any ranks in any order."""
    ranks = random.permutation(size)[: random.integers(1, size + 1)]
    rows = [count for count in range(1, len(ranks) + 1) if len(ranks) % count == 0]
    return ProcessMesh(ranks.reshape(rows[random.integers(len(rows))], -1))


@check
def an_array_survives_a_journey_over_meshes_of_any_ranks():
    size = dist.get_world_size()
    everyone = ProcessMesh(np.arange(size))
    for seed in range(25):
        random = np.random.default_rng(seed)
        x = numbers(random.integers(0, 7, random.integers(4)).tolist())
        a = dist.shard_tensor(x, everyone, [])
        for _ in range(8):
            mesh = any_mesh(size, random)
            layout, kind = any_layout(mesh, x.shape, random), ReduceType(random.integers(4))
            if random.random() < 0.4:
                placements = [*layout.placements]
                placements[random.integers(mesh.ndim)] = Partial(kind)
                layout = layout_of(mesh, x.shape, placements)
            a = reshard_to(a, layout)
            assert_is(a, x)


@check
def a_mesh_of_some_ranks_is_nothing_to_the_others():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ProcessMesh(np.arange(max(1, size - 1)))
    x = numbers((4, 6))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    b = dist.reshard(a, mesh, [Shard(1)])
    assert_is(b, x)
    if rank in mesh.process_ids:
        np.testing.assert_array_equal(dist.unshard_dtensor(b), x)
        assert "this rank has [" in repr(b)
        return
    assert b.local.size == 0
    assert b.shape == (4, 6)
    assert "this rank has nothing" in repr(b)
    with pytest.raises(dist.UsageError, match="reshard the array onto a mesh of all ranks"):
        dist.unshard_dtensor(b)
    with pytest.raises(dist.UsageError, match="does not know the shape"):
        dist.dtensor_from_local(x, mesh, [Shard(0)])


# ---- what Paddle cannot do


@check
def ranks_without_any_rows_take_part_like_all_others():
    size = dist.get_world_size()
    mesh = ProcessMesh(np.arange(size))
    for shape in ((size + 1, size - 1 or 1), (1, 1), (0, 3)):
        x = numbers(shape)
        rows = dist.shard_tensor(x, mesh, [Shard(0)])
        columns = dist.reshard(rows, mesh, [Shard(1)])
        assert_is(columns, x)
        np.testing.assert_array_equal(dist.unshard_dtensor(columns), x)


@check
def a_whole_array_survives_every_kind_of_partial():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((3, 5)) - 6
    for kind in ReduceType:
        given = x > 0 if kind >= ReduceType.kRedAny else x
        contributed = dist.shard_tensor(given, mesh, [Partial(kind)])
        assert_is(contributed, given)
        for placement in (Replicate(), Shard(0), Shard(1)):
            assert_is(dist.reshard(contributed, mesh, [placement]), given)


@check
def meshes_in_another_order_and_of_other_ranks_are_reached():
    size = dist.get_world_size()
    x = numbers((7,))
    a = dist.shard_tensor(x, ProcessMesh(np.arange(size)), [Shard(0)])
    turned = ProcessMesh(np.arange(size)[::-1])
    assert_is(dist.reshard(a, turned, [Shard(0)]), x)
    first, last = ProcessMesh([0]), ProcessMesh([size - 1])
    assert_is(dist.reshard(dist.reshard(a, first, [Shard(0)]), last, [Replicate()]), x)


# ---- dtypes and memory


NUMBERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "F", "D"]
DTYPES = ["?", *NUMBERS, "M8[s]", "m8[ms]", "S3", ">i4"]


def values_of(dtype):
    """Return a few different values of a dtype."""
    if dtype == "?":
        return numbers((4, 3)) % 2 == 0
    return numbers((4, 3), "i8").astype(dtype)


@check
def arrays_of_every_dtype_are_spread():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for dtype in (*DTYPES, bfloat16, [("value", "f8"), ("index", "i4")]):
        x = values_of(dtype) if not isinstance(dtype, list) else np.ones((4, 3), dtype)
        native = x.astype(x.dtype.newbyteorder("="))
        rows = dist.shard_tensor(x, mesh, [Shard(0)])
        for way in (by_plan, in_one_step):
            assert_is(way(rows, layout_of(mesh, x.shape, [Shard(1)])), native)
            assert_is(way(rows, layout_of(mesh, x.shape, [Replicate()])), native)


@check
def arrays_of_every_number_are_summed_and_compared():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for dtype in (*NUMBERS, bfloat16):
        x = values_of(dtype)
        kinds = [ReduceType.kRedSum, ReduceType.kRedProd]
        if np.dtype(dtype).kind != "c":
            kinds += [ReduceType.kRedMax, ReduceType.kRedMin]
        for kind, placement in itertools.product(kinds, (Replicate(), Shard(0))):
            for way in (by_plan, in_one_step):
                a = dist.shard_tensor(x, mesh, [Partial(kind)])
                assert_is(way(a, layout_of(mesh, x.shape, [placement])), x)


@check
def dates_are_compared_and_not_summed():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = values_of("M8[s]")
    for kind in (ReduceType.kRedMax, ReduceType.kRedMin):
        a = dist.shard_tensor(x, mesh, [Partial(kind)])
        assert_is(dist.reshard(a, mesh, [Replicate()]), x)
    with pytest.raises(dist.UsageError, match="cannot be Partial"):
        dist.shard_tensor(x, mesh, [Partial()])


@check
def large_arrays_are_read_where_they_lie():
    size = dist.get_world_size()
    mesh = ProcessMesh(np.arange(size))
    x = np.arange(400 * 301, dtype="f8").reshape(400, 301)
    rows = dist.shard_tensor(x, mesh, [Shard(0)])
    columns = dist.reshard(rows, mesh, [Shard(1)])
    assert_is(columns, x)
    assert_is(dist.reshard(columns, mesh, [Replicate()]), x)
    partial = dist.reshard(columns, mesh, [Partial()])
    assert_is(partial, x)
    assert_is(dist.reshard(partial, mesh, [Shard(0)]), x)
    assert_is(dist.reshard(partial, mesh, [Replicate()]), x)


@check
def parts_that_are_not_contiguous_are_packed():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ProcessMesh(np.arange(size))
    x = numbers((2 * size, 3))
    mine = np.asfortranarray(x[2 * rank : 2 * rank + 2])
    a = dist.dtensor_from_local(mine, mesh, [Shard(0)])
    for way in (by_plan, in_one_step):
        for placement in (Shard(1), Replicate()):
            assert_is(way(a, layout_of(mesh, x.shape, [placement])), x)


# ---- making arrays, and what they are


@check
def nested_lists_and_numbers_are_spread():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    a = dist.shard_tensor([[1, 2], [3, 4]], mesh, [Shard(0)], dtype="float32")
    assert_is(a, np.array([[1, 2], [3, 4]], "f4"))
    assert_is(dist.shard_tensor(2.5, mesh, []), np.array(2.5))
    assert_is(dist.shard_tensor(a, mesh, [Shard(1)], dtype="i8"), np.array([[1, 2], [3, 4]]))
    for bad, words in (
        ({"data": [[1], [2, 3]]}, "nested lists"),
        ({"data": "no array"}, "is not an array"),
        ({"data": 1, "dtype": "float33"}, "not a dtype of NumPy"),
        ({"data": 1, "placements": [Shard(0)]}, "has no dimensions"),
        ({"data": 1, "place": "gpu:0"}, "move them first"),
        ({"data": 1, "stop_gradient": False}, "DTensor"),
        ({"data": 1, "mesh": [0]}, "must be a ProcessMesh"),
        ({"data": [None]}, "Python objects"),
    ):
        with pytest.raises(dist.UsageError, match=words):
            dist.shard_tensor(**{"mesh": mesh, "placements": [], **bad})


@check
def an_array_does_not_share_memory_with_what_was_spread():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((4,))
    a = dist.shard_tensor(x, mesh, [Replicate()])
    b = dist.reshard(a, mesh, [Shard(0)])
    whole = dist.unshard_dtensor(a)
    x[:], whole[:] = 0, 0
    a.local[0] = 5
    assert_is(b, numbers((4,)))


@check
def creators_make_only_this_ranks_part():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    shape = 5, 3
    assert_is(dist.dtensor_from_fn(np.zeros, mesh, [Shard(0)], shape), np.zeros(shape))
    assert_is(dist.dtensor_from_fn(np.ones, mesh, [Shard(1)], shape, "i4"), np.ones(shape, "i4"))
    assert_is(dist.dtensor_from_fn(np.full, mesh, [Shard(0)], shape, 7), np.full(shape, 7))
    assert_is(dist.dtensor_from_fn(np.ones, mesh, [Partial()], shape=shape), np.ones(shape))
    assert_is(dist.dtensor_from_fn(np.ones, mesh, [Shard(0)], 6), np.ones(6))
    big = dist.dtensor_from_fn(np.ones, mesh, [Shard(0)], shape, ">f4")
    assert_is(dist.reshard(big, mesh, [Shard(1)]), np.ones(shape, "f4"))
    row = [1, 2, 3]
    assert_is(dist.dtensor_from_fn(np.full, mesh, [Shard(1)], shape, row), np.full(shape, row))
    assert dist.dtensor_from_fn(np.empty, mesh, [Shard(0)], shape).shape == shape


@check
def other_functions_make_the_whole():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))

    def made(seed, *, rows):
        return np.random.default_rng(seed).normal(size=(rows, 2))

    a = dist.dtensor_from_fn(made, mesh, [Shard(0)], 3, rows=5)
    assert_is(a, made(3, rows=5))


@check
def parts_of_any_length_become_one_array():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ProcessMesh(np.arange(size))
    lengths = [(3 * each + 2) % 4 for each in range(size)]
    x = numbers((sum(lengths), 2))
    ends = np.cumsum([0, *lengths])
    mine = x[ends[rank] : ends[rank + 1]]
    a = dist.dtensor_from_local(mine, mesh, [Shard(0)])
    assert a.shape == x.shape
    assert_is(a, x)
    assert dist.dtensor_to_local(a) is a.local
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        for way in (by_plan, in_one_step):
            assert_is(way(a, layout_of(mesh, x.shape, [placement])), x)
    back = reshard_to(dist.reshard(a, mesh, [Shard(1)]), a.layout)
    assert back.layout is a.layout
    assert_is(back, x)


@check
def cuts_of_two_axes_are_agreed():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size % 2:
        return
    mesh = ProcessMesh(np.arange(size).reshape(2, -1))
    row, column = mesh.coordinate
    local = np.full((row + 1, column + 2), rank)
    a = dist.dtensor_from_local(local, mesh, [Shard(0), Shard(1)])
    assert a.shape == (3, sum(each + 2 for each in range(size // 2)))
    whole = dist.unshard_dtensor(a)
    assert whole[-1, -1] == size - 1
    both = dist.dtensor_from_local(np.full(rank + 1, rank), mesh, [Shard(0), Shard(0)])
    np.testing.assert_array_equal(
        dist.unshard_dtensor(both), np.repeat(np.arange(size), np.arange(size) + 1)
    )


@check
def a_part_that_does_not_fit_the_shape_on_one_rank_fails_on_all():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ProcessMesh(np.arange(size))
    part = np.zeros((1, 2))
    a = dist.dtensor_from_local(part, mesh, [Shard(0)], shape=(size, 2))
    assert a.shape == (size, 2)
    assert a.local is part
    if size == 1:
        with pytest.raises(dist.UsageError, match="leave shape= out"):
            dist.dtensor_from_local(np.zeros((3, 2)), mesh, [Shard(0)], shape=(1, 2))
        return
    for bad in (
        {"local_tensor": np.zeros((3, 2))},
        {"local_tensor": "no"},
        {"shape": (-1, 2)},
        {"shape": ("a", 2)},
        {"placements": [Shard(2)]},
        {"mesh": "line"},
    ):
        given = {"local_tensor": part, "mesh": mesh, "placements": [Shard(0)], "shape": (size, 2)}
        with pytest.raises(dist.UsageError if rank == 0 else dist.RemoteError):
            dist.dtensor_from_local(**(given | bad if rank == 0 else given))
    with pytest.raises(dist.MismatchError):
        dist.dtensor_from_local(np.zeros(2), mesh, [], shape=(2,)) if rank == 0 else (
            dist.dtensor_from_local(part, mesh, [Shard(0)], shape=(size, 2))
        )
    assert dist.unshard_dtensor(a).shape == (size, 2)


@check
def a_rank_outside_joins_parts_by_their_shape():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    mesh = ProcessMesh(range(size - 1))
    part = np.full((1, 2) if rank < size - 1 else (0, 2), rank, "f8")
    a = dist.dtensor_from_local(part, mesh, [Shard(0)], shape=(size - 1, 2))
    assert_is(a, np.repeat(np.arange(size - 1.0), 2).reshape(-1, 2))


@check
def local_parts_are_those_of_the_placements_asked_for():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((4, 6))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    assert dist.dtensor_to_local(a, mesh, [Shard(0)]) is a.local
    np.testing.assert_array_equal(dist.dtensor_to_local(a, mesh, [Replicate()]), x)


@check
def what_one_rank_gets_wrong_all_ranks_hear_of():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, x = ProcessMesh(np.arange(size)), numbers((4, 6))
    a, too_many = dist.shard_tensor(x, mesh, [Shard(0)]), ProcessMesh(np.arange(size + 1))
    columns = dist.shard_tensor(x, mesh, [Shard(1)])
    wrong = [
        lambda bad: dist.shard_tensor(x, None if bad else mesh, [Shard(0)]),
        lambda bad: dist.shard_tensor(x, too_many if bad else mesh, [Shard(0)]),
        lambda bad: dist.shard_tensor(x, mesh, [Shard(2 if bad else 0)]),
        lambda bad: dist.shard_tensor(a, mesh, [Shard(1)], dtype="floot" if bad else "f8"),
        lambda bad: dist.dtensor_from_fn(np.zeros, "x" if bad else mesh, [Shard(0)], (3,)),
        lambda bad: dist.dtensor_from_local(x, [0, 1] if bad else mesh, [Shard(0)]),
        lambda bad: dist.dtensor_from_local(x, mesh, [Shard(3 if bad else 0)]),
        lambda bad: dist.reshard(x if bad else a, mesh, [Shard(1)]),
        lambda bad: dist.reshard(a, None if bad else mesh, [Shard(1)]),
        lambda bad: dist.reshard(a, mesh, [Shard(2 if bad else 1)]),
        lambda bad: dist.reshard(a, mesh, [Shard(1)], out=a if bad else columns),
        lambda bad: dist.reshard(a, mesh, [Shard(1)], async_op=3 if bad else False),
    ]
    for call in wrong:
        with pytest.raises(dist.HpcdistError) as raised:
            call(rank == size - 1)
        assert isinstance(raised.value, dist.UsageError if rank == size - 1 else dist.RemoteError)
        np.testing.assert_array_equal(dist.unshard_dtensor(a), x)


@check
def what_a_function_raises_on_one_rank_all_ranks_hear_of():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, x = ProcessMesh(np.arange(size)), numbers((4, 6))
    a = dist.shard_tensor(x, mesh, [Shard(0)])

    def failing(part=x):
        return {}["no such key"] if rank == size - 1 else part

    def failing_where_others_wait(part):
        part = failing(part)
        dist.barrier()
        return part

    for call in (
        lambda: dist.local_map(failing_where_others_wait, [Shard(0)])(a),
        lambda: dist.dtensor_from_fn(failing, mesh, [Shard(0)]),
        lambda: dist.local_map(failing, [Shard(0)])(a),
    ):
        with pytest.raises(KeyError if rank == size - 1 else dist.RemoteError, match="no such key"):
            call()
        np.testing.assert_array_equal(dist.unshard_dtensor(a), x)


@check
def what_is_wrong_where_nobody_waits_is_told_to_nobody():
    mesh, x = ProcessMesh(np.arange(dist.get_world_size())), numbers((4, 6))
    whole = dist.shard_tensor(x, mesh, [])
    if dist.get_rank() == 0:
        for make in (
            lambda: dist.reshard(whole, mesh, [Shard(2)]),
            lambda: dist.reshard(whole, mesh, [Shard(0)], out=whole),
        ):
            with pytest.raises(dist.UsageError):
                make()
    part = dist.reshard(whole, mesh, [Shard(0)])
    np.testing.assert_array_equal(dist.unshard_dtensor(part), x)


# ---- out and async


@check
def out_is_filled_and_returned():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((5, 7))
    rows, columns = (dist.shard_tensor(x, mesh, [Shard(dim)]) for dim in (0, 1))
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        out = dist.shard_tensor(x * 0, mesh, [placement])
        memory = out.local
        assert dist.reshard(rows, mesh, [placement], out=out) is out
        assert out.local is memory
        assert_is(out, x)
    place = mesh.coordinate
    strided = np.zeros((*columns.local.shape, 2))[..., 0]
    out = DistArray._of(strided, columns.layout)
    dist.reshard(rows, mesh, [Shard(1)], out=out)
    assert out.local is strided
    assert_is(out, x)
    assert dist.reshard(rows, mesh, [Shard(0)], out=rows) is rows
    assert_is(rows, x)
    assert place is not None
    for bad in (columns, dist.shard_tensor(x, mesh, [Shard(0)], dtype="f4"), strided):
        with pytest.raises(dist.UsageError, match="out must be a DistArray"):
            dist.reshard(columns, mesh, [Shard(0)], out=bad)


@check
def an_array_may_be_its_own_other_half():
    size = dist.get_world_size()
    mesh, turned = ProcessMesh(np.arange(size)), ProcessMesh(np.arange(size)[::-1])
    x = numbers((2 * size,))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    out = DistArray._of(a.local, layout_of(turned, x.shape, [Shard(0)]))
    assert_is(dist.reshard(a, turned, [Shard(0)], out=out), x)


@check
def reshards_are_under_way_together():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((6, 5))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    asked = [Shard(1), Replicate(), Partial(), Shard(0)]
    works = [dist.reshard(a, mesh, [each], async_op=True) for each in asked]
    assert dist.wait_all(works)
    for work, placement in zip(works, asked, strict=True):
        assert work.is_completed()
        assert work.result().placements == [placement]
        assert_is(work.result(), x)
    out = dist.shard_tensor(x * 0, mesh, [Shard(1)])
    work = dist.reshard(a, mesh, [Shard(1)], out=out, async_op=True)
    assert work.result() is out
    assert_is(out, x)


@check
def what_every_rank_has_is_not_communicated():
    mesh = ProcessMesh(np.arange(dist.get_world_size())[::-1])
    x = numbers((5, 7))
    whole = spread(x, layout_of(mesh, x.shape, []))
    if dist.get_rank() == 0:  # the others are not there
        for placement in (Shard(0), Shard(1), Partial(), Replicate()):
            part = dist.reshard(whole, mesh, [placement], out=None)
            assert part.placements == [placement]
            work = dist.reshard(whole, mesh, [placement], async_op=True)
            np.testing.assert_array_equal(work.result().local, part.local)
    dist.barrier()


@check
def ranks_that_have_the_same_have_the_same_bits():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ProcessMesh(np.arange(size))
    for rows in (3, 300):  # small ones are read, large ones reduced together
        mine = np.random.default_rng(rank).normal(size=(rows, 300))
        a = dist.dtensor_from_local(mine, mesh, [Partial()], shape=mine.shape)
        whole = dist.unshard_dtensor(a)
        everyone = []
        dist.all_gather_object(everyone, whole.tobytes())
        assert len({*everyone}) == 1
        terms = [np.random.default_rng(each).normal(size=mine.shape) for each in range(size)]
        np.testing.assert_allclose(whole, np.sum(terms, axis=0), rtol=1e-12, atol=1e-12)


@check
def nothing_changes_where_nothing_is_to_change():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    a = dist.shard_tensor(numbers((5, 7)), mesh, [Shard(0)])
    assert dist.reshard(a, mesh, [Shard(-2)]) is a


# ---- ranks that disagree, and wrong arguments


@check
def ranks_that_reshard_differently_hear_of_both_layouts():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    mesh = ProcessMesh(np.arange(size))
    a = dist.shard_tensor(numbers((5, 7)), mesh, [Shard(0)])
    with pytest.raises(dist.MismatchError) as caught:
        dist.reshard(a, mesh, [Shard(1) if rank == 0 else Replicate()])
    assert "[Shard(1)]" in str(caught.value)
    assert "[Replicate()]" in str(caught.value)
    assert_is(dist.reshard(a, mesh, [Shard(1)]), numbers((5, 7)))


@check
def ranks_that_spread_different_arrays_hear_of_both():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    mesh = ProcessMesh(np.arange(size))
    last = rank == size - 1
    for data, dtype, placement, words in (
        (np.zeros((2, 3 if last else 4)), None, Shard(0), [r"(2, 3)", r"(2, 4)"]),
        (np.zeros(4), "f4" if last else "f8", Shard(0), ["float32", "float64"]),
        (np.zeros(4), None, Replicate() if last else Shard(0), ["Replicate()", "Shard(0)"]),
    ):
        with pytest.raises(dist.MismatchError) as caught:
            dist.shard_tensor(data, mesh, [placement], dtype)
        assert all(each in str(caught.value) for each in words)
    for local, words in (
        (np.zeros((1, 3 if last else 4)), "do not fit together"),
        (np.zeros((1, 4), "f4" if last else "f8"), "not of one array"),
    ):
        with pytest.raises(dist.MismatchError, match=words):
            dist.dtensor_from_local(local, mesh, [Shard(0)])


@check
def an_array_that_one_rank_cannot_spread_fails_on_all():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    mesh = ProcessMesh(np.arange(size))
    first = rank == 0
    for spread_it in (
        lambda: dist.shard_tensor("no" if first else 1.0, mesh, []),
        lambda: dist.shard_tensor([1.0], mesh, [Shard(5 if first else 0)]),
        lambda: dist.dtensor_from_local("no" if first else np.zeros(1), mesh, [Shard(0)]),
        lambda: dist.dtensor_from_fn(np.zeros, mesh, [Shard(0)], -1 if first else 4),
    ):
        with pytest.raises(dist.UsageError if first else dist.RemoteError):
            spread_it()
    assert_is(dist.shard_tensor([1.0], mesh, []), np.ones(1))


@check
def what_is_no_array_is_refused():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    for call in (
        lambda: dist.reshard(np.zeros(3), mesh, []),
        lambda: dist.unshard_dtensor([1]),
        lambda: dist.dtensor_to_local(3),
    ):
        with pytest.raises(dist.UsageError, match="a DistArray is needed"):
            call()
    a = dist.shard_tensor(numbers((4,)), mesh, [])
    with pytest.raises(dist.UsageError, match="must be a ProcessMesh"):
        dist.reshard(a, [0], [])
    with pytest.raises(dist.UsageError, match="async_op"):
        dist.reshard(a, mesh, [], async_op="yes")
    with pytest.raises(dist.UsageError, match="shard_tensor"):
        DistArray(np.zeros(3), a.layout)


# ---- the container


@check
def an_array_tells_of_the_whole_without_communication():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ProcessMesh(np.arange(size))
    a = dist.shard_tensor(numbers((5, 7), "f4"), mesh, [Shard(0)])
    if rank == 0:  # the others are not there
        assert (a.shape, a.ndim, a.size, a.dtype) == ((5, 7), 2, 35, np.dtype("f4"))
        assert (a.itemsize, a.nbytes, len(a), a.device) == (4, 140, 5, "cpu")
        assert a.process_mesh == mesh
        assert a.placements == [Shard(0)]
        assert a.is_dist()
        rows = -(-5 // size)
        assert repr(a).startswith(f"DistArray((5, 7), float32, [Shard(0)] on {mesh!r}; ")
        assert f"this rank has [0:{rows}, 0:7]" in repr(a)
        assert str(a) == repr(a)
    dist.barrier()


@check
def values_that_others_have_are_not_given_silently():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((5, 7))
    cut = dist.shard_tensor(x, mesh, [Shard(0)])
    with pytest.raises(dist.UsageError, match="unshard_dtensor"):
        np.asarray(cut)
    with pytest.raises(dist.UsageError, match="unshard_dtensor"):
        np.asarray(dist.shard_tensor(x, mesh, [Partial()]))
    with pytest.raises(dist.UsageError, match="unshard_dtensor"):
        float(dist.shard_tensor([1.0], mesh, [Shard(0)]))
    for of_one in (bool, int, float, complex, DistArray.item):
        with pytest.raises(dist.UsageError, match="of one element"):
            of_one(cut)
    whole = dist.shard_tensor(x, mesh, [Replicate()])
    np.testing.assert_array_equal(np.asarray(whole), x)
    np.testing.assert_array_equal(np.array(whole, "i4"), x.astype("i4"))


@check
def one_number_is_a_number():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    a = dist.shard_tensor(3, mesh, [])
    assert (int(a), float(a), complex(a), bool(a), a.item()) == (3, 3.0, 3 + 0j, True, 3)
    assert [10, 11, 12, 13][a] == 13
    assert float(dist.shard_tensor([[2.5]], mesh, [])) == 2.5
    with pytest.raises(TypeError, match="without dimensions"):
        len(a)


@check
def copies_are_of_this_ranks_part_and_pickles_are_refused():
    mesh = ProcessMesh(np.arange(dist.get_world_size()))
    x = numbers((5, 7))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    for copied in (copy(a), deepcopy(a), deepcopy({"a": a})["a"]):
        assert copied.layout is a.layout
        copied.local[...] = 0
        assert_is(a, x)
    with pytest.raises(dist.UsageError, match="cannot be pickled"):
        pickle.dumps(a)
    with pytest.raises(TypeError, match="hash"):
        hash(a)


# ---- assignment by arrays


def values_for(mesh):
    """Return two rows of values: a number, an array that all ranks have, one across ranks."""
    yield 7.0
    yield np.ones((2, 3))
    yield dist.shard_tensor(np.ones((2, 3)), mesh, [Shard(0)])


@check
def an_index_by_arrays_that_one_rank_has_wrong_fails_on_all():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    mesh = ProcessMesh(range(size))
    first = rank == 0
    of_indices = [[0, 99], [0, -9], [0, 1.5], ["a", "b"], [[0, 1], [2]], np.zeros(5, bool)]
    for good, wrong in (
        *((np.array([0, 1]), each) for each in of_indices),
        (np.arange(8) < 2, np.zeros(5, bool)),
        (np.arange(8) < 2, [3, 99]),
    ):
        for value in values_for(mesh):
            a = dist.shard_tensor(np.zeros((8, 3)), mesh, [Shard(0)])
            with pytest.raises((IndexError, ValueError)) as raised:
                a[wrong if first else good] = value
            assert ("another rank" in str(raised.value)) != first
            assert not a.local.any()
            assert dist.unshard_dtensor(a).shape == (8, 3)  # all are in step


@check
def a_value_that_does_not_fit_on_one_rank_fails_on_all():
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    mesh = ProcessMesh(range(size))
    for index in ([0, 1], np.array([[0], [1]]), (slice(None), [0, 2])):
        a = dist.shard_tensor(np.zeros((8, 3)), mesh, [Shard(0)])
        wrong = np.ones((5, 5, 5))
        with pytest.raises((IndexError, ValueError)):
            a[index] = wrong if rank == 0 else 1.0
        assert not a.local.any()
        assert dist.unshard_dtensor(a).shape == (8, 3)


@check
def a_rank_outside_assigns_nothing_and_refuses_what_the_others_refuse():
    size = dist.get_world_size()
    if size == 1:
        return
    mesh = ProcessMesh(range(size - 1))
    kept = np.arange(8) % 4 == 1
    for index in ([0, 3], kept, (kept, slice(None, 2)), (kept, [0, 2]), (slice(None), [0, 2])):
        x = np.zeros((8, 3))
        for value in (7.0, np.ones(x[index].shape), np.ones(x[index].shape[-1:])):
            a, expected = dist.shard_tensor(x, mesh, [Shard(0)]), x.copy()
            a[index] = value
            expected[index] = value
            assert_is(a, expected)
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    for wrong in ([0, 8], [0, 1.5], np.zeros(5, bool), (slice(None), [3]), (None, [0, 8])):
        with pytest.raises((IndexError, dist.UsageError)):
            a[wrong] = 1.0
    with pytest.raises(ValueError, match="broadcast"):
        a[[0, 3]] = np.ones((3, 3))
