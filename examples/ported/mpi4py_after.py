"""Heat along a rod, with hpcdist."""

import numpy as np

import hpcdist as dist

CELLS, STEPS = 1001, 2000

world = dist.init_parallel_env()
rank, size = world.rank, world.nranks
mine = np.array_split(np.arange(CELLS), size)[rank]
u = np.zeros(len(mine) + 2)  # a cell more at both ends: the neighbours'
u[1:-1] = mine == CELLS // 2
grid = world.grid((size,))

for _ in range(STEPS):
    grid.neighbor_alltoall([u[:1], u[-1:]], [u[1:2], u[-2:-1]])
    u[1:-1] += 0.25 * (u[:-2] - 2 * u[1:-1] + u[2:])

heat = dist.all_reduced(float(u[1:-1].sum()))
parts = []
dist.gather(u[1:-1], parts, dst=0)
if rank == 0:
    rod = np.concatenate(parts)
    print(f"heat {heat:.9f}, at most {rod.max():.9f} in cell {rod.argmax()}")
