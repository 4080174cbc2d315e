"""What has the same bits on any number of ranks: on groups of 1, 2, 3 ... ranks of one job."""

from hashlib import sha256

import numpy as np
from array_programs import program, run_program

import hpcdist as dist
from hpcdist import ProcessMesh, Replicate, Shard

WAYS = [[Replicate()], [Shard(0)], [Shard(1)]]


def _step(u):
    return u[1:-1] + 0.2 * (u[:-2] - 2 * u[1:-1] + u[2:])


def _heat(a):
    for _ in range(5):
        a = dist.map_overlap(_step, a, depth={0: 1}, boundary="reflect")
    return a


RANDOM = {
    "random": lambda generator, **where: generator.random((37, 11), **where),
    "uniform": lambda generator, **where: generator.uniform(-1, 2, (37, 11), **where),
    "integers": lambda generator, **where: generator.integers(0, 1000, (37, 11), **where),
    "normal": lambda generator, **where: generator.normal(1.0, 3.0, (37, 11), **where),
}
FUNCTIONS = {
    "arithmetic": lambda a: (a * 1.1 + a.T[:11, :11].max() - 0.3) / (a * a + 0.7),
    "functions": lambda a: np.sqrt(np.abs(a)) + np.floor(a * 7) % 3,
    "extremes": lambda a: np.stack([a.max(0), a.min(0), np.ptp(a, 0)]),
    "places": lambda a: np.stack([a.argmax(0), a.argmin(0)]),
    "wholes": lambda a: np.cumsum(np.round(a * 9), 0) + np.round(a).sum(0),
    "products of wholes": lambda a: np.round(a * 9).T @ np.round(a * 9),
    "order": lambda a: np.sort(a, 0) + np.argsort(a, 0),
    "order of all": lambda a: np.sort(a.reshape(-1)),
    "different": lambda a: np.unique(np.round(a, 1) + 0.0),
    "quantiles": lambda a: np.quantile(a, [0.1, 0.5, 0.77], axis=0),
    "quantiles of all": lambda a: np.quantile(a, [0.1, 0.5, 0.77]),
    "median": lambda a: np.median(a),
    "seams": lambda a: np.roll(a, 5, 0) - np.pad(a, ((1, 0), (0, 0)), "edge")[:-1],
    "differences": lambda a: np.gradient(a)[0],
    "stencil": _heat,
    "chosen": lambda a: a[a > 0.5],
    "taken": lambda a: a[[3, -1, 3]],
    "transforms": lambda a: np.fft.fft(a, axis=1),
}  # fmt: skip
ADDED = {
    "sum": lambda a: a.sum(),
    "sums of columns": lambda a: a.sum(0),
    "sums of rows": lambda a: a.sum(1, keepdims=True),
    "sum in float32": lambda a: a.astype(np.float32).sum(0),
    "sum where": lambda a: np.sum(a, 0, where=a > 0.1),
    "sum of complex": lambda a: (a + 1j * a.max()).sum(),
    "mean": lambda a: np.stack([a.mean(0), a.var(0), a.std(0)]),
    "average": lambda a: np.average(a, 0, np.arange(37.0)),
    "norm": lambda a: np.linalg.norm(a),
    "norms": lambda a: np.linalg.norm(a, 3, axis=0),
    "sum without NaN": lambda a: np.nansum(np.where(a > 1, np.nan, a), 0),
    "mean without NaN": lambda a: np.nanmean(np.where(a > 1, np.nan, a), 0),
    "spread without NaN": lambda a: np.nanstd(np.where(a > 1, np.nan, a), 0),
    "area": lambda a: np.trapezoid(a, axis=0) if hasattr(np, "trapezoid") else a.sum(0),
    "trace": lambda a: np.trace(a),
    "dot": lambda a: np.vdot(a, a + 1),
    "dot of complex": lambda a: np.vdot(a * 1j + 1, a),
    "product": lambda a: a.T @ a,
    "product in float32": lambda a: a.astype(np.float32).T @ a.astype(np.float32),
    "product of complex": lambda a: (a * (1 + 2j)).T @ a,
    "vector": lambda a: a.T @ a[:, 0],
    "letters": lambda a: np.einsum("ij,ik->jk", a, np.exp(a)),
    "covariance": lambda a: np.cov(a.T),
}
"""Of these every floating-point sum is reproducible, under that policy."""


def _told(array):
    whole = dist.unshard_dtensor(array)
    return f"{whole.shape} {whole.dtype} {sha256(whole.tobytes()).hexdigest()[:16]}"


def _digests(ranks):
    """Return what everything comes to on some ranks, by name; nothing on the others."""
    mesh, found = ProcessMesh(ranks), {}
    if mesh.coordinate is None:
        return found
    x = np.random.default_rng(1).standard_normal((37, 11))
    for way in WAYS:
        for name, make in RANDOM.items():
            made = make(dist.random.Generator(seed=3), mesh=mesh, placements=way)
            found[f"{name} {way}"] = _told(made)
        for name, function in FUNCTIONS.items():
            found[f"{name} {way}"] = _told(function(dist.shard_tensor(x, mesh, way)))
        with dist.array_policy(sums="reproducible"):
            for name, function in ADDED.items():
                found[f"{name}, added {way}"] = _told(function(dist.shard_tensor(x, mesh, way)))
    drawn = dist.random.Generator(seed=3).permutation(101, mesh=mesh, placements=WAYS[1])
    found["permutation"] = _told(drawn)
    return found


def check_everything():
    """All has the same bits on groups of any number of ranks, in any order, however it is cut."""
    size = dist.get_world_size()
    everyone = []
    groups = [range(count) for count in range(1, size + 1)] + [range(size)[::-1]]
    dist.all_gather_object(everyone, [_digests([*ranks]) for ranks in groups])
    by_name = {}
    for found in (each for rank in everyone for each in rank):
        for name, digest in found.items():
            kind = name if name.startswith("permutation") else name.split(" [")[0]
            by_name.setdefault(kind, {}).setdefault(digest, name)
    differ = {name: told for name, told in by_name.items() if len(told) > 1}
    assert not differ, differ


def check_programs(seeds):
    """Exact lines of random programs have the same bits on groups of any number of ranks."""
    size = dist.get_world_size()
    for seed in seeds:
        written = program(seed)
        groups = [run_program(written, range(count)) for count in range(1, size + 1)]
        everyone = []
        dist.all_gather_object(everyone, groups)
        told = [each for rank in everyone for each in rank if each]
        assert all(each == told[0] for each in told), f"seed {seed}"
