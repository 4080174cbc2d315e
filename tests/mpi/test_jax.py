"""The verbs on JAX arrays, on the ranks of this MPI job."""

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import jax_checks
import jax_programs

import hpcdist as dist
import hpcdist.jax as hj

way = jax_checks.way
pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("check", jax_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_large_program_ends_with_an_error_and_can_be_called_again():
    """XLA gives parts of it to threads of its own, where there are cores for them."""
    rank, n, *_ = jax_checks.place()

    def program(x, last):
        for _ in range(6):
            x = jnp.tanh(x @ x / 1000) + hj.all_reduce(x) / 1000
        return x, hj.all_reduce(last)

    x = jnp.ones((300, 300))
    step = jax.jit(lambda x, last: program(x, last))
    for _ in range(2):
        before = step(x, jnp.ones(2))
        if n > 1:
            with pytest.raises((dist.MismatchError, jax.errors.JaxRuntimeError), match="disagree"):
                step(x, jnp.ones(2 + (rank == 0)))
        jax_checks.close(before[1], [n, n])
        jax_checks.close(step(x, jnp.ones(2))[0], before[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", jax_checks.NAMES)
def test_gradients_agree_with_differences(name):
    jax_checks.gradients_agree_with_differences(name)


def test_random_programs_end_as_numpy_says():
    jax_programs.run_programs(range(10, 20))


@pytest.mark.slow
def test_many_random_programs_end_as_numpy_says():
    jax_programs.run_programs(range(jax_programs.MANY))
