"""Find the largest eigenvalue of a matrix that is spread over the ranks, by power iteration.

    mpiexec -n 4 python examples/power_iteration.py

Each rank makes and keeps its rows of the matrix. A step multiplies them with the vector, which is
cut in the same way, and only vectors travel.
"""

import argparse

import numpy as np

import hpcdist as dist
import hpcdist.array as xp


def matrix_of(length, mesh):
    """Return a symmetric matrix, of which each rank makes its rows: 1 / (1 + distance)."""
    rows = xp.arange(length, mesh=mesh, placements=[dist.Shard(0)])
    return 1.0 / (1.0 + abs(rows[:, None] - np.arange(length)))


def largest_eigenvalue(matrix, tolerance, most_steps):
    """Return the eigenvalue, its vector, and how many steps it took."""
    vector = matrix.sum(axis=1)
    vector /= np.linalg.norm(vector)
    for step in range(1, most_steps + 1):
        product = matrix @ vector
        value = np.vdot(vector, product)
        if np.linalg.norm(product - value * vector) <= tolerance * abs(value):
            return float(value), vector, step
        vector = product / np.linalg.norm(product)
    raise SystemExit(f"no eigenvalue after {most_steps} steps; allow more of them by --steps")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--tolerance", type=float, default=1e-10)
    parser.add_argument("--steps", type=int, default=1000, help="at most")
    options = parser.parse_args()

    world = dist.init_parallel_env()
    matrix = matrix_of(options.length, dist.ProcessMesh(world.ranks))
    value, _, steps = largest_eigenvalue(matrix, options.tolerance, options.steps)
    if world.rank == 0:
        print(f"eigenvalue {value:.12g} after {steps} steps on {world.nranks} ranks", flush=True)


if __name__ == "__main__":
    main()
