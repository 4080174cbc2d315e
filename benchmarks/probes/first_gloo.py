"""The first all_reduce of a program that uses torch's gloo, with a file to meet at."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])

meeting = Path(sys.argv[1], "meeting").as_uri()
dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=SIZE)
dist.all_reduce(torch.ones(1))
if RANK == 0:
    Path(sys.argv[1], "time").write_text(f"{time.time()}")
dist.destroy_process_group()
