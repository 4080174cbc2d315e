"""Heat spreads over a plate: an array across the ranks, of which only the seams travel.

    hpcdist run -n 4 examples/heat.py

Each rank has a block of the plate. In every step it takes the rows and columns around its block
from the ranks that have them, and computes with NumPy. The result is the same to the last bit on
any number of ranks.
"""

import argparse

import numpy as np

import hpcdist as dist

RATE = 0.2  # of the difference to a neighbour, in each step; up to 0.25 it is stable


def plate(rows, columns):
    """Return a cold plate with a hot disc."""
    y, x = np.ogrid[:rows, :columns]
    disc = (y - rows * 0.4) ** 2 + (x - columns * 0.3) ** 2 < (min(rows, columns) / 5) ** 2
    return np.where(disc, 100.0, 0.0)


def grid_of_ranks():
    """Return a mesh of all ranks, as square as their number allows."""
    ranks = dist.get_world_size()
    across = max(each for each in range(1, ranks + 1) if ranks % each == 0 and each**2 <= ranks)
    return dist.ProcessMesh(np.arange(ranks).reshape(-1, across), dim_names=["y", "x"])


def step(u):
    """Return the temperatures after a step: of all places but the outermost."""
    here = u[1:-1, 1:-1]
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return here + RATE * (around - 4 * here)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--columns", type=int, default=600)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args(words)

    dist.init_parallel_env()
    mesh, blocks = grid_of_ranks(), [dist.Shard(0), dist.Shard(1)]
    heat = dist.dtensor_from_fn(plate, mesh, blocks, args.rows, args.columns)
    before = float(heat.mean())
    for _ in range(args.steps):
        # Nothing flows over the edges: beyond them it is as warm as at them.
        heat = dist.map_overlap(step, heat, depth=1, boundary="nearest")
    hottest, after = float(heat.max()), float(heat.mean())  # all ranks compute them
    if dist.get_rank() == 0:
        print(f"{args.steps} steps on {mesh}: at most {hottest:.2f} degrees")
        print(f"{before:.6f} degrees on average before, {after:.6f} after")
    return heat


if __name__ == "__main__":
    main()
