"""What holds for functions of neighbours, and of parts, on any number of ranks of any transport."""

import itertools
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from checks import Checks

import hpcdist as dist
from hpcdist import MismatchError, Partial, ProcessMesh, Replicate, Shard, UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout

check = Checks()

EXAMPLE = Path(__file__).parents[2] / "examples/heat.py"

MODES = {"periodic": "wrap", "reflect": "reflect", "symmetric": "symmetric", "nearest": "edge"}
"""Boundaries, by the names that `np.pad` has for them."""
DEPTHS = [1, {0: 2}, {1: (0, 3)}, {0: (3, 1), 1: (1, 2)}]
BOUNDARIES = [*MODES, 7.0, None, {0: "periodic", 1: None}, {0: -1, -1: "reflect"}]


def numbers(shape):
    return (np.arange(math.prod(shape)) * 5 % 11).reshape(shape).astype("f8")


def layouts_of(shape, size):
    """Return layouts of a two-dimensional array: even, uneven, on grids, with empty parts."""
    line = ProcessMesh([*range(size)])
    for axes in ([(0,), ()], [(), (0,)], [(), ()]):
        yield make_layout(line, shape, axes)
    rows = shape[0]
    ends = [0, *[min(rows, 1 + step) for step in range(size - 1)], rows]
    yield make_layout(line, shape, [(0,), ()], [ends, None])
    yield make_layout(line, shape, [(0,), ()], [[0, *[rows] * size], None])
    yield make_layout(line, shape, [(0,), ()], [[*[0] * size, rows], None])
    if size % 2 == 0 and size > 2:
        grid = ProcessMesh(np.arange(size)[::-1].reshape(2, -1), ["x", "y"])
        for axes in ([(0,), (1,)], [(1,), (0,)], [(0,), ()], [(1, 0), ()]):
            yield make_layout(grid, shape, axes)


def spread(x, layout):
    box = layout.box(layout.mesh.coordinate)
    return DistArray._of(x[tuple(slice(lo, hi) for lo, hi in box)].copy(), layout)


def per_dim(given, otherwise):
    """Return what a depth or a boundary says for each of two dimensions."""
    if not isinstance(given, dict):
        return [given, given]
    found = [otherwise, otherwise]
    for dim, value in given.items():
        found[dim] = value
    return found


def padded(x, depth, boundary):
    """Return an array with what is around it, and how much that is before it: by `np.pad`."""
    before = []
    for dim, (deep, bound) in enumerate(
        zip(per_dim(depth, 0), per_dim(boundary, None), strict=True)
    ):
        pair = (deep, deep) if isinstance(deep, int) else deep
        width = [(0, 0), (0, 0)]
        width[dim] = (0, 0) if bound is None else pair
        if bound == "periodic":  # deeper than the array, `np.pad` is right since NumPy 1.25 only
            rows = range(-width[dim][0], x.shape[dim] + width[dim][1])
            x = np.take(x, rows, dim, mode="wrap")
        elif isinstance(bound, str):
            x = np.pad(x, width, MODES[bound])
        else:
            x = np.pad(x, width, constant_values=0 if bound is None else bound)
        before.append(width[dim][0])
    return x, before


def wanted_halo(x, layout, depth, boundary):
    """Return the part of this rank with what is around it, cut out of what `np.pad` makes."""
    around, before = padded(x, depth, boundary)
    cut = []
    for dim, (lo, hi) in enumerate(layout.box(layout.mesh.coordinate)):
        deep = per_dim(depth, 0)[dim]
        ahead, behind = (deep, deep) if isinstance(deep, int) else deep
        start, stop = lo - ahead + before[dim], hi + behind + before[dim]
        cut.append(slice(max(start, 0), min(stop, around.shape[dim])))
    return around[tuple(cut)]


@check
def halos_are_what_is_around_the_parts():
    for shape in [(5, 4), (1, 3), (2, 2)]:
        x = numbers(shape)
        for layout in layouts_of(shape, dist.get_world_size()):
            a = spread(x, layout)
            for depth, boundary in itertools.product(DEPTHS, BOUNDARIES):
                with a.halo(depth, boundary) as part:
                    np.testing.assert_array_equal(
                        part,
                        wanted_halo(x, layout, depth, boundary),
                        err_msg=f"{layout} {depth} {boundary}",
                    )


@check
def a_halo_is_deeper_than_the_parts():
    x = numbers((4, 2))
    a = spread(x, make_layout(ProcessMesh([*range(dist.get_world_size())]), x.shape, [(0,), ()]))
    for boundary in MODES:
        with a.halo({0: 11}, boundary) as part:
            np.testing.assert_array_equal(part, wanted_halo(x, a.layout, {0: 11}, boundary))


@check
def a_halo_is_of_the_values_that_the_array_has_then():
    mesh = ProcessMesh([*range(dist.get_world_size())])
    small = dist.shard_tensor(np.zeros(7), mesh, [Shard(0)])
    shared = dist.dtensor_from_local(dist.zeros((300, 200)), mesh, [Shard(0)])
    for a in (small, shared):
        for step in range(5):
            a.local[...] = step
            with a.halo(1, "periodic") as part:
                a.local[...] = -1  # nobody reads it any more
                assert (part == step).all()
                part[...] = 9
            assert (a.local == -1).all()


@check
def neighbours_are_the_parts_of_other_ranks():
    mesh, size = ProcessMesh([*range(dist.get_world_size())]), dist.get_world_size()
    for x in (numbers((5, 3)), numbers((5, 40_000))):  # copied, and read where it lies
        a = dist.shard_tensor(x, mesh, [Shard(0)])
        for offset in range(-size, size + 1):
            there = dist.get_rank() + offset
            with a.neighbour(0, offset) as part:
                assert not part.flags.writeable
                if 0 <= there < size:
                    ((lo, hi), _) = a.layout.box((there,))
                    np.testing.assert_array_equal(part, x[lo:hi])
                else:
                    assert part.shape == (0, *x.shape[1:])
            ((lo, hi), _) = a.layout.box((there % size,))
            with a.neighbour(0, offset, "periodic") as part:
                np.testing.assert_array_equal(part, x[lo:hi])
        with a.neighbour(1, 0) as own, a.neighbour(-1, 1) as beyond:
            np.testing.assert_array_equal(own, a.local)
            assert beyond.shape == (a.local.shape[0], 0)


@check
def a_neighbour_is_there_until_the_end_of_the_block():
    size = dist.get_world_size()
    mesh, x = ProcessMesh([*range(size)]), numbers((size, 40_000))
    for make in (np.empty, dist.empty):
        local = make((1, 40_000))
        a = dist.dtensor_from_local(local, mesh, [Shard(0)])
        for step in range(5):
            local[...] = x[dist.get_rank()] + step
            with a.neighbour(0, 1, "periodic") as part:
                total = a.sum()  # operations go on
                np.testing.assert_array_equal(part[0], x[(dist.get_rank() + 1) % size] + step)
                np.testing.assert_allclose(float(total), x.sum() + step * x.size)
            local[...] = -1  # nobody reads it any more


def laplacian(u):
    """Return the sum of the neighbours of each element but the outermost."""
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


@check
def a_stencil_comes_to_the_same_on_any_layout():
    x = numbers((5, 6)) / 7
    for boundary in [*MODES, 0.5]:
        wanted = laplacian(padded(x, 1, boundary)[0])
        for layout in layouts_of(x.shape, dist.get_world_size()):
            found = dist.map_overlap(laplacian, spread(x, layout), depth=1, boundary=boundary)
            assert found.layout is layout
            np.testing.assert_array_equal(dist.unshard_dtensor(found), wanted)


@check
def a_stencil_may_leave_what_is_around_the_part_in_its_result():
    x = numbers((6, 2))
    a = dist.shard_tensor(x, ProcessMesh([*range(dist.get_world_size())]), [Shard(0)])
    for boundary in ["periodic", None]:
        up, down = dist.map_overlap(lambda u: (u + 1, -u), a, depth={0: 2}, boundary=boundary)
        np.testing.assert_array_equal(dist.unshard_dtensor(up), x + 1)
        np.testing.assert_array_equal(dist.unshard_dtensor(down), -x)


@check
def a_stencil_takes_several_arrays():
    mesh, x, y = (
        ProcessMesh([*range(dist.get_world_size())]),
        numbers((5, 4)),
        numbers((5, 4))[::-1],
    )
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    for b in [y, dist.shard_tensor(y, mesh, [Shard(1)]), dist.shard_tensor(y, mesh, [])]:
        found = dist.map_overlap(lambda u, v: u[1:] * v[:-1], a, b, depth={0: (1, 0)}, boundary=0.0)
        above = np.pad(y, ((1, 0), (0, 0)))[:-1]
        np.testing.assert_array_equal(dist.unshard_dtensor(found), x * above)


@check
def contributions_are_combined_before_a_stencil():
    mesh = ProcessMesh([*range(dist.get_world_size())])
    a = dist.dtensor_from_local(np.arange(4.0), mesh, [Partial()], shape=(4,))
    found = dist.map_overlap(lambda u: u[2:] - u[:-2], a, depth=1, boundary="periodic")
    wanted = (np.roll(np.arange(4.0), -1) - np.roll(np.arange(4.0), 1)) * dist.get_world_size()
    np.testing.assert_array_equal(dist.unshard_dtensor(found), wanted)


@check
def ranks_outside_the_mesh_have_nothing():
    x, inside = numbers((6,)), dist.get_rank() == 0
    a = dist.shard_tensor(x, ProcessMesh([0]), [Shard(0)])
    for function in (
        lambda a: np.roll(a, 1),
        np.gradient,
        lambda a: np.pad(a, 1),
        lambda a: np.pad(a, (2, 0), "edge"),
        lambda a: np.convolve(a, [1.0, 2.0]),
        lambda a: np.convolve([1.0, 2.0], a, "same"),
    ):
        found, wanted = function(a), function(x)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(found.local, wanted if inside else [])
    found = dist.map_overlap(lambda u: u * 2, a, depth=1, boundary="periodic")
    np.testing.assert_array_equal(found.local, x * 2 if inside else [])
    with a.halo(1) as part:
        assert part.shape == ((6,) if inside else (0,))


@check
def an_array_without_dimensions_has_nothing_around_it():
    mesh = ProcessMesh([*range(dist.get_world_size())])
    a = dist.shard_tensor(np.array(3.0), mesh, [])
    for function in (np.copy, np.square):
        found = dist.map_overlap(function, a, depth=2, boundary=0)
        assert type(found.local) is np.ndarray
        np.testing.assert_array_equal(dist.unshard_dtensor(found), function(a.local))


@check
def wrong_stencils_are_errors():
    mesh = ProcessMesh([*range(dist.get_world_size())])
    a = dist.shard_tensor(numbers((6, 2)), mesh, [Shard(0)])
    for depth in (-1, 1.5, (1, 2, 3), {0: "x"}, None):
        with pytest.raises(UsageError, match="depth must be"), a.halo(depth):
            pass
    with pytest.raises(UsageError, match="boundary must be one of periodic"), a.halo(1, "wrap"):
        pass
    with pytest.raises(UsageError, match="boundary must be"):
        a.neighbour(0, 1, "reflect").__enter__()
    with pytest.raises(UsageError, match=r"the function returned an array of shape \(1, 1\)"):
        dist.map_overlap(lambda u: np.zeros((1, 1)), a, depth=1, boundary=0)
    with pytest.raises(UsageError, match="the function returned a float"):
        dist.map_overlap(lambda u: 1.0, a)
    with pytest.raises(UsageError, match="arrays of one shape"):
        dist.map_overlap(np.add, a, a[:3])
    with pytest.raises(UsageError, match="has none; give a value"), a[:0].halo(1, "periodic"):
        pass
    assert (dist.unshard_dtensor(a) == numbers((6, 2))).all()  # the ranks are still in step


@check
def different_halos_are_a_mismatch():
    if dist.get_world_size() == 1:
        return
    a = dist.shard_tensor(numbers((6, 2)), ProcessMesh([*range(dist.get_world_size())]), [Shard(0)])
    depth = 1 if dist.get_rank() else 2
    with pytest.raises(MismatchError, match=r"halo of depth \(\(2, 2\), \(2, 2\)\)"), a.halo(depth):
        pass


# ---- local_map


@check
def a_local_function_gets_the_parts():
    mesh, x = ProcessMesh([*range(dist.get_world_size())]), numbers((5, 3))
    a = dist.shard_tensor(x, mesh, [Shard(0)])

    def scaled(part, factor, *, plus):
        assert type(part) is np.ndarray
        return part * factor + plus

    for out in ([Shard(0)], [[Shard(0)]], ((Shard(0),),)):
        found = dist.local_map(scaled, out)(a, 3, plus=a)
        np.testing.assert_array_equal(dist.unshard_dtensor(found), x * 4)
        assert found.layout is a.layout
    assert dist.local_map(scaled, [Shard(0)]).__name__ == "scaled"


@check
def parts_of_results_may_be_contributions():
    mesh, x = ProcessMesh([*range(dist.get_world_size())]), numbers((5, 3))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    total = dist.local_map(lambda part: part.sum(0), [[Partial()]])(a)
    assert total.layout.is_partial
    np.testing.assert_array_equal(dist.unshard_dtensor(total), x.sum(0))


@check
def several_results_are_a_tuple():
    mesh, x = ProcessMesh([*range(dist.get_world_size())]), numbers((5, 3))
    a = dist.shard_tensor(x, mesh, [Shard(0)])
    positive, count, rank = dist.local_map(
        lambda part: (part[part[:, 0] > 3], np.array(len(part)), dist.get_rank()),
        out_placements=[[Shard(0)], [Partial()], None],
        in_placements=[[Shard(0)]],
    )(a)
    np.testing.assert_array_equal(dist.unshard_dtensor(positive), x[x[:, 0] > 3])
    assert int(dist.unshard_dtensor(count)) == 5
    assert rank == dist.get_rank()
    none = dist.local_map(lambda part: None, [None])(a)
    assert none is None


@check
def arguments_are_spread_as_the_function_wants_them():
    mesh, x = ProcessMesh([*range(dist.get_world_size())]), numbers((4, 3))
    columns = dist.shard_tensor(x, mesh, [Shard(1)])
    options = {"out_placements": [Shard(0)], "in_placements": [[Shard(0)], None]}
    double = dist.local_map(np.multiply, **options, reshard_inputs=True)
    np.testing.assert_array_equal(dist.unshard_dtensor(double(columns, 2)), x * 2)
    rows = dist.dtensor_from_local(np.ones((dist.get_rank() + 1, 2)), mesh, [Shard(0)])
    assert dist.local_map(np.multiply, **options)(rows, 2).layout is rows.layout
    if dist.get_world_size() > 1:
        with pytest.raises(UsageError, match=r"argument 0 is spread as .*reshard_inputs=True"):
            dist.local_map(np.multiply, **options)(columns, 2)


@check
def a_local_function_without_arrays_needs_a_mesh():
    mesh = ProcessMesh([*range(dist.get_world_size())])
    ranks = dist.local_map(lambda: np.array([dist.get_rank()]), [Shard(0)], process_mesh=mesh)()
    assert dist.unshard_dtensor(ranks).tolist() == [*range(dist.get_world_size())]
    with pytest.raises(UsageError, match="process_mesh="):
        dist.local_map(np.zeros, [Replicate()])(3)


@check
def wrong_local_functions_are_errors():
    mesh = ProcessMesh([*range(dist.get_world_size())])
    a = dist.shard_tensor(numbers((4, 3)), mesh, [Shard(0)])
    with pytest.raises(UsageError, match="out_placements must be a list"):
        dist.local_map(np.sin, 3)
    with pytest.raises(UsageError, match="out_placements must be a list"):
        dist.local_map(np.sin, [3])
    with pytest.raises(UsageError, match="mesh must be a ProcessMesh"):
        dist.local_map(np.sin, [Shard(0)], process_mesh=3)
    with pytest.raises(UsageError, match="in_placements has 2 items for 1 arguments"):
        dist.local_map(np.sin, [Shard(0)], [[Shard(0)], None])(a)
    with pytest.raises(UsageError, match="argument 0 is a DistArray, but in_placements has None"):
        dist.local_map(np.sin, [Shard(0)], [None])(a)
    with pytest.raises(UsageError, match="argument 0 is a float"):
        dist.local_map(np.sin, [Shard(0)], [[Shard(0)]], mesh)(1.0)
    with pytest.raises(UsageError, match="2 results, but out_placements is for 1"):
        dist.local_map(np.modf, [[Shard(0)]])(a)
    assert (dist.unshard_dtensor(a) == numbers((4, 3))).all()  # the ranks are still in step


# ---- the example


@check
def heat_spreads_as_in_one_process():
    heat = runpy.run_path(str(EXAMPLE))
    rows, columns, steps = 37, 23, 12
    words = ["--rows", rows, "--columns", columns, "--steps", steps]
    found = heat["main"]([*map(str, words)])
    wanted = heat["plate"](rows, columns)
    for _ in range(steps):
        wanted = heat["step"](np.pad(wanted, 1, "edge"))
    np.testing.assert_array_equal(dist.unshard_dtensor(found), wanted)
    assert 0 < wanted.max() < 100
