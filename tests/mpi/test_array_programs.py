"""Random programs of arrays on the ranks of this MPI job, and what has the same bits.

To look at a failure, run its program on threads: ``dist.simulate(size, run_program, program(7))``.
"""

import pytest
from array_programs import program, run_program
from same_bits import check_everything, check_programs

from hpcdist.mesh import room
from hpcdist.transport.mpi import intranode_boxes

FEW, MORE = range(30), range(1000, 1060)


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MORE, marks=pytest.mark.thorough)], ids=str)
def test_each_line_comes_to_what_numpy_says(seeds):
    for seed in seeds:
        run_program(program(seed))


def test_programs_of_arrays_that_are_read_in_place_come_to_what_numpy_says(monkeypatch):
    monkeypatch.setattr(room, "SHARED_FROM", 1)
    monkeypatch.setattr(intranode_boxes, "PAYLOAD", 0)
    for seed in range(400, 415):
        run_program(program(seed))


def test_programs_between_nodes_come_to_what_numpy_says(world_with):
    world_with(ranks_per_node=1)
    for seed in range(200, 215):
        run_program(program(seed))


def test_any_number_of_ranks_gives_the_same_bits():
    check_everything()


def test_exact_lines_have_the_same_bits_on_any_number_of_ranks():
    check_programs(range(300, 308))
