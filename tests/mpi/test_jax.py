"""The verbs on JAX arrays, on the ranks of this MPI job."""

import pytest

pytest.importorskip("jax")

import jax_checks
import jax_programs

way = jax_checks.way
pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("check", jax_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.thorough
@pytest.mark.parametrize("name", jax_checks.NAMES)
def test_gradients_agree_with_differences(name):
    jax_checks.gradients_agree_with_differences(name)


def test_random_programs_end_as_numpy_says():
    jax_programs.run_programs(range(10, 20))


@pytest.mark.slow
def test_many_random_programs_end_as_numpy_says():
    jax_programs.run_programs(range(2000))
