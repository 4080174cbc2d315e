"""Functions of neighbours and of parts on the ranks of this MPI job; see `stencil_checks`."""

import pytest
import stencil_checks


@pytest.mark.parametrize("check", stencil_checks.check)
@pytest.mark.usefixtures("and_the_world_goes_on")
def test_on_the_ranks_of_this_job(check):
    check()


def test_where_no_memory_is_shared(world_with):
    world_with(shared_heap_mb=0)
    stencil_checks.a_stencil_comes_to_the_same_on_any_layout()
    stencil_checks.neighbours_are_the_parts_of_other_ranks()
