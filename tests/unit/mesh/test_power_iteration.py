"""The example finds what NumPy finds, on any number of ranks."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist

EXAMPLE = Path(__file__).parents[3] / "examples/power_iteration.py"


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_power_iteration_finds_the_largest_eigenvalue(ranks):
    spec = importlib.util.spec_from_file_location("power_iteration", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    places = np.arange(50)
    matrix = 1 / (1 + abs(places[:, None] - places))

    def check():
        a = example.matrix_of(50, dist.ProcessMesh([*range(ranks)]))
        assert a.placements == [dist.Shard(0)]
        np.testing.assert_array_equal(dist.unshard_dtensor(a), matrix)
        value, vector, _ = example.largest_eigenvalue(a, 1e-9, 1000)
        assert value == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-9)
        np.testing.assert_allclose(
            dist.unshard_dtensor(vector), abs(np.linalg.eigh(matrix)[1][:, -1]), rtol=1e-6
        )
        with pytest.raises(SystemExit, match="no eigenvalue after 1 steps"):
            example.largest_eigenvalue(a, 0.0, 1)

    dist.simulate(ranks, check)
