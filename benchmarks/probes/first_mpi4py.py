"""The first all_reduce of a program that uses mpi4py alone."""

import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

x = np.ones(1)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
if MPI.COMM_WORLD.rank == 0:
    Path(sys.argv[1], "time").write_text(f"{time.time()}")
