"""Arrays across simulated ranks in a row, and NumPy's to compare them with."""

import numpy as np

import hpcdist as dist

S0, S1, S2 = dist.Shard(0), dist.Shard(1), dist.Shard(2)


def line(ranks, x, *placements):
    """Return an array over so many ranks."""
    return dist.shard_tensor(x, dist.ProcessMesh([*range(ranks)]), placements)


def values(*shape, seed=0):
    """Return random numbers, the same on every rank."""
    return np.random.default_rng(seed).standard_normal(shape)


def close(found, wanted, tolerance=1e-9):
    """Make sure that an array across ranks has these values."""
    np.testing.assert_allclose(dist.unshard_dtensor(found), wanted, rtol=tolerance, atol=tolerance)
