"""Functions of neighbours and of parts on the ranks of this MPI job; see `stencil_checks`."""

import pytest
import stencil_checks


@pytest.mark.parametrize("check", stencil_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


@pytest.mark.parametrize(
    "check",
    [
        stencil_checks.a_stencil_comes_to_the_same_on_any_layout,
        stencil_checks.a_halo_is_deeper_than_the_parts,
        stencil_checks.neighbours_are_the_parts_of_other_ranks,
    ],
)
def test_between_nodes(check, world_with):
    world_with(ranks_per_node=1)
    check()
