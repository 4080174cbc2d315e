"""Ranks go on and on until something is wrong, which they tell in a folder: vanish.py FOLDER."""

import sys
import time
from pathlib import Path

import numpy as np

import hpcdist as dist

FOLDER, LIMIT_S = Path(sys.argv[1]), 4
world = dist.init_parallel_env(timeout=LIMIT_S)
data = np.ones(1 << 17)
last = time.monotonic()
try:
    while True:
        dist.all_reduce(data)
        data.fill(1)
        last = time.monotonic()
        (FOLDER / f"going.{world.rank}").touch()
except dist.HpcdistError as error:
    late = time.monotonic() - last > LIMIT_S + 4
    missing = getattr(error, "missing", ()) or getattr(error, "ranks", ())
    words = type(error).__name__, *missing, "late" if late else "in time"
    (FOLDER / f"told.{world.rank}").write_text(" ".join(map(str, words)))
    raise
