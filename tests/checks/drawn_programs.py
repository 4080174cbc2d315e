"""Random programs of collectives that all ranks of an MPI job have in common."""

from collective_programs import programs
from hypothesis import HealthCheck, Phase, given, settings
from mpi4py import MPI

world = MPI.COMM_WORLD


def draw_programs(count, max_steps):
    """Return rank 0's programs on every rank: always the same ones."""
    drawn = []

    @given(programs(world.size, max_steps))
    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(program):
        drawn.append(program)

    collect()
    return world.bcast(drawn)
