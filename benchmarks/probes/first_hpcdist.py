"""The first all_reduce of a program that uses hpcdist."""

import sys
import time
from pathlib import Path

import numpy as np

import hpcdist as dist

dist.init_parallel_env()
x = np.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    Path(sys.argv[1], "time").write_text(f"{time.time()}")
