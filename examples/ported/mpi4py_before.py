"""Heat along a rod, with mpi4py."""

import numpy as np
from mpi4py import MPI

CELLS, STEPS = 1001, 2000

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
counts = [len(part) for part in np.array_split(np.arange(CELLS), size)]
first = sum(counts[:rank])
u = np.zeros(counts[rank] + 2)  # a cell more at both ends: the neighbours'
u[1:-1] = np.arange(first, first + counts[rank]) == CELLS // 2
left = rank - 1 if rank > 0 else MPI.PROC_NULL
right = rank + 1 if rank < size - 1 else MPI.PROC_NULL

for _ in range(STEPS):
    comm.Sendrecv(u[1:2], dest=left, recvbuf=u[-1:], source=right)
    comm.Sendrecv(u[-2:-1], dest=right, recvbuf=u[:1], source=left)
    u[1:-1] += 0.25 * (u[:-2] - 2 * u[1:-1] + u[2:])

heat = np.array([u[1:-1].sum()])
comm.Allreduce(MPI.IN_PLACE, heat, op=MPI.SUM)
rod = np.empty(CELLS) if rank == 0 else None
comm.Gatherv(u[1:-1].copy(), [rod, counts] if rank == 0 else None, root=0)
if rank == 0:
    print(f"heat {heat[0]:.9f}, at most {rod.max():.9f} in cell {rod.argmax()}")
