"""Ranks go on and on until something is wrong, which they tell in a folder: vanish.py FOLDER."""

import sys
from pathlib import Path

import numpy as np

import hpcdist as dist

FOLDER = Path(sys.argv[1])
world = dist.init_parallel_env(timeout=60)
data = np.ones(1 << 17)
dist.all_reduce(data)  # which makes the communicators that it needs
world.transport.set_timeout(4)
try:
    while True:
        dist.all_reduce(data)
        data.fill(1)
        (FOLDER / f"going.{world.rank}").touch()
except dist.HpcdistError as error:
    missing = getattr(error, "missing", ()) or getattr(error, "ranks", ())
    whole = FOLDER / f"whole.{world.rank}"
    whole.write_text(" ".join(map(str, [type(error).__name__, *missing])))
    whole.rename(FOLDER / f"told.{world.rank}")
    raise
