"""Let a hill of water run apart in a channel that turns with the earth, inside of one jitted loop.

    hpcdist run -n 4 examples/shallow_water.py

The channel is cut into strips of rows, one for each rank. It is periodic from west to east and has
walls in the south and in the north. All steps are one `fori_loop`, in which neighbours exchange the
rows at their borders. The result is the same to the last bit on any number of ranks.
"""

import argparse
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hpcdist as dist
import hpcdist.jax as hj

GRAVITY, DEPTH, TURN = 9.81, 100.0, 2e-4  # m/s2, m, 1/s
CELL = 5e3  # m
STEP = 0.4 * CELL / (GRAVITY * DEPTH) ** 0.5  # s


def with_borders(state):
    """Return the state with the rows of the neighbours around it: zeros beyond the walls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    south = rank - 1 if rank > 0 else dist.PROC_NULL
    north = rank + 1 if rank < size - 1 else dist.PROC_NULL
    from_south = hj.sendrecv(state[:, -1:], dst=north, src=south)
    from_north = hj.sendrecv(state[:, :1], dst=south, src=north)
    return jnp.concatenate([from_south, state, from_north], axis=1)


def east(field):
    return jnp.roll(field, -1, axis=1)


def west(field):
    return jnp.roll(field, 1, axis=1)


def advance(state, is_open):
    """Go a step: first the velocities at the sides of the cells, then the height of the water.

    What goes to the neighbours is the state alone: all else is computed on both sides of a border,
    in the same way, so that it has the same bits.
    """
    height, u, v = with_borders(state)
    # north[i] is the row behind own[i]; four velocities lie around each side of a cell
    own, north = slice(0, -1), slice(1, None)
    u_at_v = (u[own] + west(u[own]) + u[north] + west(u[north])) / 4
    slope = (height[north] - height[own]) / CELL
    new_v = (v[own] - STEP * (TURN * u_at_v + GRAVITY * slope)) * is_open
    flow_north = new_v * (DEPTH + (height[own] + height[north]) / 2)

    v_at_u = (v[own] + east(v[own]) + v[north] + east(v[north]))[:-1] / 4
    height, u = height[1:-1], u[1:-1]
    new_u = u + STEP * (TURN * v_at_u - GRAVITY * (east(height) - height) / CELL)
    flow_east = new_u * (DEPTH + (height + east(height)) / 2)

    leaving = flow_east - west(flow_east) + flow_north[1:] - flow_north[:-1]
    return jnp.stack([height - STEP * leaving / CELL, new_u, new_v[1:]])


def hill(rows, columns, first, count):
    """Return the rows from `first` on of the height of the water at the beginning."""
    y, x = np.mgrid[first : first + count, :columns]
    distance = ((y - rows / 3) ** 2 + (x - columns / 3) ** 2) / (min(rows, columns) / 10) ** 2
    return np.exp(-distance).astype("f4")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--columns", type=int, default=180)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", help="write the height of the water into this file of NumPy")
    options = parser.parse_args(words)

    world = dist.init_parallel_env()
    if options.rows % world.nranks:
        parser.error(f"{options.rows} rows cannot be cut into {world.nranks} equal strips")
    count = options.rows // world.nranks
    first = world.rank * count
    state = np.zeros((3, count, options.columns), "f4")
    state[0] = hill(options.rows, options.columns, first, count)
    rows = np.arange(first - 1, first + count)
    is_open = ((rows >= 0) & (rows < options.rows - 1)).astype("f4")[:, None]  # no wall north of it

    @jax.jit
    def run(state, steps):
        return lax.fori_loop(0, steps, lambda _, state: advance(state, is_open), state)

    run(state, 0)  # compiles
    dist.barrier()
    began = time.perf_counter()
    state = jax.block_until_ready(run(state, options.steps))
    took = time.perf_counter() - began
    whole = np.asarray(hj.gather(state[0])).reshape(options.rows, options.columns)
    if world.rank == 0:
        print(f"{options.steps} steps took {1e3 * took:.0f} ms; the water stands ", end="")
        print(f"from {whole.min():.4f} to {whole.max():.4f} m, bits {zlib.crc32(whole):08x}")
        if options.save:
            np.save(options.save, whole)
    return whole


if __name__ == "__main__":
    main()
