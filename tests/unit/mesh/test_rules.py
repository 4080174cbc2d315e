"""The rules of arrays across ranks against NumPy, on simulated ranks; see `array_checks`."""

import numpy as np
import pytest
from array_checks import (
    CREATION,
    FAMILIES,
    check_creation,
    check_default_mesh,
    check_grids,
    check_index,
    check_memory,
    check_program,
    check_row,
)

import hpcdist as dist
from hpcdist.mesh.rules import panels

MORE = pytest.mark.thorough


def check_rows(rows, mix):
    for row in rows:
        check_row(row, mix)


@pytest.mark.parametrize(
    ("ranks", "mix"),
    [
        (1, False),
        (3, False),
        pytest.param(2, True, marks=MORE),
        pytest.param(4, True, marks=MORE),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_come_to_what_numpy_does(family, ranks, mix):
    dist.simulate(ranks, check_rows, FAMILIES[family], mix)


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=MORE)])
def test_new_arrays_are_those_of_numpy(ranks):
    def check():
        for line in filter(None, map(str.strip, CREATION.splitlines())):
            check_creation(line)
        check_default_mesh()
        check_grids()

    dist.simulate(ranks, check)


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=MORE)])
def test_random_programs_end_as_numpy_says(ranks):
    dist.simulate(ranks, lambda: [check_program(seed) for seed in range(12)])


@MORE
@pytest.mark.parametrize("ranks", [1, 4])
def test_many_random_programs_end_as_numpy_says(ranks):
    dist.simulate(ranks, lambda: [check_program(seed) for seed in range(100, 400)])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_large_matrix_that_is_wanted_whole_is_multiplied_in_panels(ranks):
    def check():
        mesh = dist.ProcessMesh([*range(ranks)])
        draw = np.random.default_rng(0)
        x, y = (
            draw.integers(-9, 9, (301, 302)).astype("f8"),
            draw.integers(-9, 9, (302, 501)) * 1.0,
        )
        a, b = (dist.shard_tensor(each, mesh, [dist.Shard(0)]) for each in (x, y))
        assert panels.fit(a, b, (a.layout, dist.reshard(b, mesh, []).layout))
        found = a @ b
        assert found.placements == [dist.Shard(0)]
        np.testing.assert_array_equal(dist.unshard_dtensor(found), x @ y)

    dist.simulate(ranks, check)


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=MORE)])
def test_random_indices_choose_what_they_choose_in_numpy(ranks):
    dist.simulate(ranks, lambda: [check_index(seed) for seed in range(40)])


@MORE
@pytest.mark.parametrize("ranks", [1, 4])
def test_many_random_indices_choose_what_they_choose_in_numpy(ranks):
    dist.simulate(ranks, lambda: [check_index(seed) for seed in range(100, 500)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_has_memory_of_its_own_where_that_of_numpy_has(family):
    dist.simulate(2, lambda: [check_memory(row) for row in FAMILIES[family]])
