"""Sorting, sets, searching, order statistics and random numbers, on any ranks of any transport.

Each against NumPy: of values of every kind, with many equal ones, NaN, and parts that are uneven
or empty; the results are the same to the bit. Random numbers are those of one rank.
"""

from __future__ import annotations

import numpy as np
from array_checks import R, check_parts, meshes, placements_of, same

import hpcdist as dist
from hpcdist.mesh.dist_array import DistArray

METHODS = """
linear lower higher nearest midpoint inverted_cdf averaged_inverted_cdf closest_observation
interpolated_inverted_cdf hazen weibull median_unbiased normal_unbiased
""".split()  # noqa: SIM905 - so it is read more easily


def cases(seed):
    """Return arrays of one dimension, of all kinds and lengths: a third of those of a seed."""
    return [*_every(seed)][seed % 3 :: 3]


def _every(seed):
    draw = np.random.default_rng(seed)
    length = int(draw.integers(0, 40))
    for size in (length, 101, 3, 1, 0):
        few, many = draw.integers(-2, 3, size), draw.standard_normal(size)
        yield from (
            few,
            many,
            many.astype("f4"),
            few > 0,
            few.astype("i1"),
            np.abs(few).astype("u8"),
        )
        yield np.where(draw.random(size) < 0.3, np.nan, few)
        yield np.full(size, np.nan)
        yield few + 1j * draw.integers(0, 2, size)
        yield np.zeros(size, "i4")
    yield draw.choice([np.inf, -np.inf, 0.0, 1.0, np.nan], 30)
    yield np.array([2**63 + 5, 1, 2**63 + 4, 2**64 - 1, 1], "u8")


def spreads(x):
    """Yield an array spread in several ways, also with parts of uneven lengths."""
    for mesh in meshes():
        for placements in placements_of(mesh, x.ndim):
            yield dist.shard_tensor(x, mesh, placements)
    mesh = next(meshes())
    bounds = np.sort(np.random.default_rng(x.size).integers(0, x.shape[0] + 1, mesh.size - 1))
    bounds = [0, *bounds.tolist(), x.shape[0]]
    here = dist.get_rank()
    part = x[bounds[here] : bounds[here + 1]].copy()
    yield dist.dtensor_from_local(part, mesh, [dist.Shard(0)])


def told(found, wanted, what):
    """Make sure that a result is NumPy's."""
    if isinstance(wanted, tuple):
        assert len(found) == len(wanted), what
        for one, other in zip(found, wanted, strict=True):
            told(one, other, what)
        return
    assert isinstance(found, DistArray), (what, type(found))
    check_parts(found)
    same(dist.unshard_dtensor(found), wanted, True, what)


def check_sorting(seed):
    """Sorted arrays and what sorts them are NumPy's, and lie as the array did."""
    for x in cases(seed):
        for a in spreads(x):
            what = f"{x!r} {a.layout}"
            told(np.sort(a), np.sort(x), what)
            told(np.argsort(a), np.argsort(x, kind="stable"), what)
            assert np.sort(a).placements == np.argsort(a).placements == a.placements
            assert np.sort(a).layout.is_even
            backwards = dist.array.argsort(a, descending=True)
            order = dist.unshard_dtensor(backwards)
            same(x[order], np.flip(np.sort(x)), True, what)
            equal = x[order][1:] == x[order][:-1]
            assert (np.diff(order)[equal] > 0).all(), what
            told(dist.array.sort(a, descending=True), np.flip(np.sort(x)), what)
            told(np.partition(a, 0), np.sort(x), what) if x.size else None
            a.sort()
            told(a, np.sort(x), what)


def check_dimensions(seed):
    """Arrays of more dimensions are sorted along each, and flat."""
    draw = np.random.default_rng(seed)
    for shape in [(7, 5), (2, 9), (9, 1), (1, 6), (3, 4, 5), (0, 4), (4, 0), ()]:
        x = draw.integers(-3, 4, shape).astype("f8")
        for mesh in meshes():
            for placements in placements_of(mesh, x.ndim):
                a = dist.shard_tensor(x, mesh, placements)
                for axis in (*range(x.ndim), None):
                    what = f"{axis} of {a.layout}"
                    told(np.sort(a, axis), np.sort(x, axis), what)
                    told(np.argsort(a, axis), np.argsort(x, axis, kind="stable"), what)


def check_sets(seed):
    """What is different in an array, where it is first, where each is, and how many."""
    for x in cases(seed):
        for a in spreads(x):
            what = f"{x!r} {a.layout}"
            for equal_nan in (True, False):
                options = {"equal_nan": equal_nan}
                told(np.unique(a, **options), np.unique(x, **options), what)
                wanted = np.unique(x, True, True, True, **options)
                told(np.unique(a, True, True, True, **options), wanted, what)
                found = np.unique(a, return_counts=True, **options)
                told(found, np.unique(x, return_counts=True, **options), what)
            values, _, inverse, counts = wanted
            told(tuple(dist.array.unique_all(a)), wanted, what)
            told(dist.array.unique_values(a), values, what)
            told(tuple(dist.array.unique_counts(a)), (values, counts), what)
            told(tuple(dist.array.unique_inverse(a)), (values, inverse), what)
            told(np.isin(a, x[:2]), np.isin(x, x[:2]), what)
    x = np.random.default_rng(seed).integers(0, 5, (6, 4))
    for mesh in meshes():
        for placements in placements_of(mesh, 2):
            a = dist.shard_tensor(x, mesh, placements)
            inverse = np.unique(x, return_inverse=True)[1].reshape(x.shape)
            told(dist.array.unique_inverse(a).inverse_indices, inverse, f"{a.layout}")


def check_searching(seed):
    """Places in a sorted array, of needles that every rank has or that are cut."""
    draw = np.random.default_rng(seed)
    for x in cases(seed):
        needles = draw.permutation(np.concatenate([x, x[:3]]))
        grid = needles[: needles.size // 2 * 2].reshape(2, -1)
        for a in spreads(np.sort(x)):
            for v in (needles, grid):
                cut = dist.shard_tensor(v, a.process_mesh, [dist.Shard(v.ndim - 1)])
                for side in ("left", "right"):
                    wanted, what = np.searchsorted(np.sort(x), v, side), f"{x!r} {a.layout} {side}"
                    told(np.searchsorted(a, v, side), wanted, what)
                    told(np.searchsorted(a, cut, side), wanted, what)
                    told(np.searchsorted(np.sort(x), cut, side), wanted, what)
            if x.size:
                assert a.searchsorted(x[0]).item() == np.searchsorted(np.sort(x), x[0])


def check_statistics(seed):
    """Medians, quantiles, histograms and counts."""
    draw = np.random.default_rng(seed)
    for x in cases(seed):
        if not x.size or not np.isfinite(x).any():
            continue
        for a in spreads(x):
            _check_order(a, x, None, False, draw)
            if x.dtype.kind in "iuf" and np.isfinite(x).all():
                _check_histogram(a, x)
            if x.dtype.kind == "i":
                told(np.bincount(a + 2), np.bincount(x + 2), f"{a.layout}")
                weights = np.arange(x.size) % 5
                wanted = np.bincount(x + 2, weights, 7)
                told(np.bincount(a + 2, weights, minlength=7), wanted, f"{a.layout}")
    for shape in [(5, 4), (7, 1), (3, 4, 5)]:
        x = np.where(draw.random(shape) < 0.1, np.nan, draw.integers(0, 5, shape))
        for mesh in meshes():
            for placements in placements_of(mesh, x.ndim):
                a = dist.shard_tensor(x, mesh, placements)
                for axis in (None, *range(x.ndim), (0, 1), (0, x.ndim - 1)):
                    for keepdims in (False, True):
                        _check_order(a, x, axis, keepdims, draw)


def _check_order(a, x, axis, keepdims, draw):
    what = f"{x!r} {a.layout} {axis}"
    with np.errstate(invalid="ignore"):
        wanted = np.median(x, axis, keepdims=keepdims)
        told(np.median(a, axis, keepdims=keepdims), wanted, what)
        if x.dtype.kind in "cb":
            return
        method = METHODS[draw.integers(len(METHODS))]
        options = {"axis": axis, "method": method, "keepdims": keepdims}
        for q in (np.array([0.0, 0.25, 1 / 3, 1.0]), np.float64(0.7)):
            told(np.quantile(a, q, **options), np.quantile(x, q, **options), what + method)
            told(np.percentile(a, q * 100, axis), np.percentile(x, q * 100, axis), what)


def _check_histogram(a, x):
    what = f"{x!r} {a.layout}"
    edges = np.array([-1.0, 0.0, 0.5, 3.0])
    for options in ({}, {"bins": 4}, {"bins": edges}, {"range": (-1, 1)}, {"density": True}):
        told(np.histogram(a, **options), np.histogram(x, **options), what)
    weights = np.arange(x.size) % 3
    told(np.histogram(a, weights=weights), np.histogram(x, weights=weights), what)


# ---- random numbers

DRAWN = {
    "random": lambda g, size, **where: g.random(size, **where),
    "random of float32": lambda g, size, **where: g.random(size, "f4", **where),
    "uniform": lambda g, size, **where: g.uniform(-3, 8, size, **where),
    "standard_normal": lambda g, size, **where: g.standard_normal(size, **where),
    "normal of float32": lambda g, size, **where: g.normal(1, 2, size, "f4", **where),
    "integers": lambda g, size, **where: g.integers(-5, 7, size, **where),
    "integers of 64 bits": lambda g, size, **where: g.integers(
        -(2**63), 2**63 - 1, size, endpoint=True, **where
    ),
    "integers of uint8": lambda g, size, **where: g.integers(256, None, size, "u1", **where),
}
SIZES = [(), (0,), 1, 7, (103,), (13, 5), (4, 3, 7), (2, 0, 3)]


def whole_numbers():
    """Return all arrays as one rank makes them, by name and size."""
    mesh = dist.ProcessMesh([dist.get_rank()])
    return {
        (name, size): dist.unshard_dtensor(draw(seeded(), size, mesh=mesh))
        for name, draw in DRAWN.items()
        for size in SIZES
    }


def seeded():
    """Return a generator that has made an array before."""
    generator = dist.random.Generator(5)
    generator.random(3, mesh=dist.ProcessMesh([dist.get_rank()]))
    return generator


def check_random():
    """Numbers depend on the place in the array alone."""
    for (name, size), wanted in whole_numbers().items():
        for mesh in meshes():
            for placements in placements_of(mesh, wanted.ndim):
                a = DRAWN[name](seeded(), size, mesh=mesh, placements=placements)
                assert a.placements == [*placements]
                check_parts(a)
                found = dist.unshard_dtensor(a)
                assert found.dtype == wanted.dtype
                assert found.tobytes() == wanted.tobytes(), f"{name} {size} {placements}"


def check_permutation():
    """A permutation has each number once, and is the same for any placements."""
    alone = dist.ProcessMesh([dist.get_rank()])
    for n in (0, 1, 50):
        wanted = dist.unshard_dtensor(dist.random.Generator(3).permutation(n, mesh=alone))
        assert sorted(wanted) == [*range(n)]
        for mesh in meshes():
            for way in ([R], [dist.Shard(0)]):
                a = dist.random.Generator(3).permutation(n, mesh=mesh, placements=way)
                same(dist.unshard_dtensor(a), wanted, True, f"{n} {way}")


CHECKS = {
    "sorting": check_sorting,
    "dimensions": check_dimensions,
    "sets": check_sets,
    "searching": check_searching,
    "statistics": check_statistics,
}
"""By name, what is checked of a seed."""
