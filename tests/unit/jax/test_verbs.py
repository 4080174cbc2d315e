"""The verbs on JAX arrays, on simulated ranks."""

import pytest

pytest.importorskip("jax")

import jax_checks
import jax_programs

import hpcdist as dist

way = jax_checks.way
pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("check", jax_checks.check)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_on_simulated_ranks(ranks, check):
    dist.simulate(ranks, check)


@pytest.mark.parametrize("name", jax_checks.NAMES)
@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.thorough if n != 2 else ()) for n in (1, 2, 3)]
)
def test_gradients_agree_with_differences(ranks, name):
    dist.simulate(ranks, jax_checks.gradients_agree_with_differences, name)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_random_programs_end_as_numpy_says(ranks):
    dist.simulate(ranks, jax_programs.run_programs, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_random_programs_end_as_numpy_says(ranks):
    dist.simulate(ranks, jax_programs.run_programs, range(jax_programs.MANY), timeout=600.0)
