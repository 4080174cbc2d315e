"""Random programs of collectives, on the ranks of this MPI job, against NumPy.

To shrink a failure, run its program on threads: ``dist.simulate(size, run_program, program)``.
"""

import ml_dtypes
import numpy as np
import pytest
from collective_programs import run_program
from drawn_programs import draw_programs
from mpi4py import MPI

import hpcdist as dist
from hpcdist.transport.tuning import OPERATIONS, Algorithm, TuningRule

world = MPI.COMM_WORLD


FIRST, MORE = slice(80), slice(80, 200)


@pytest.mark.parametrize("part", [FIRST, pytest.param(MORE, marks=pytest.mark.thorough)], ids=str)
def test_random_programs_end_as_numpy_says(part):
    for program in draw_programs(part.stop, max_steps=6)[part]:
        run_program(program)


@pytest.mark.parametrize(
    "part", [slice(20), pytest.param(slice(20, 60), marks=pytest.mark.thorough)], ids=str
)
def test_reductions_cut_into_pieces_end_as_numpy_says(tiny_pieces, part):
    for program in draw_programs(part.stop, max_steps=3)[part]:
        run_program(program)


def test_programs_end_as_numpy_says_without_the_compiled_kernel(without_kernel):
    for program in draw_programs(60, max_steps=4):
        run_program(program)


def test_programs_end_as_numpy_says_on_several_nodes(two_nodes):
    for program in draw_programs(60, max_steps=4):
        run_program(program)


@pytest.fixture
def tiny_pieces(world_with):
    """Make every reduction of more than two numbers travel in pieces."""
    world_with(piece_mb=20 / 2**20)


@pytest.fixture
def without_kernel(world_with):
    """Leave boards to Python and reductions in shared memory to NumPy."""
    world_with(kernel="never")


@pytest.fixture
def two_nodes(tuned):
    """Pretend that the ranks are on several nodes, and let every collective use the lanes."""
    rules = [
        TuningRule(operation, "ordinary", Algorithm.HIERARCHICAL, nodes="several")
        for operation in OPERATIONS
    ]
    tuned(rules, ranks_per_node=2 if world.size > 2 else 1)


@pytest.mark.parametrize("count", [1, 7, 1001, 70_000])
@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16"])
def test_reductions_of_random_numbers_have_the_same_bits_on_all_ranks(count, dtype):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PROD, dist.ReduceOp.AVG):
        random = np.random.default_rng(dist.get_rank())
        numbers = random.normal(size=count) + 1j * random.normal(size=count)
        x = numbers.astype(dtype) if np.dtype(dtype).kind == "c" else numbers.real.astype(dtype)
        dist.all_reduce(x, op)
        assert len(set(world.allgather(x.tobytes()))) == 1
