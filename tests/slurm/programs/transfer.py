"""A cable is cut in the middle of a large transfer: transfer.py FOLDER OPERATION WAY.

WAY is "now" or "later": whether the operation is waited for where it is called. Ranks tell what
they notice in files of the folder, as what they print may have to go through the cable.
"""

import sys
import threading
import time
from pathlib import Path

import numpy as np

import hpcdist as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from switch import ask

FOLDER, OPERATION, WAY = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
SWITCH = FOLDER / "switch"
LIMIT_S = 3
world = dist.init_parallel_env(timeout=LIMIT_S)
data = np.ones(4 << 20)
found: list[object] = []


def tell(*words):
    with (FOLDER / f"told.{world.rank}").open("a") as file:
        print(*words, file=file)


OPERATIONS = {
    "all_reduce": lambda **how: dist.all_reduce(data, **how),
    "broadcast": lambda **how: dist.broadcast(data, 0, **how),
    "all_gather_object": lambda **how: dist.all_gather_object(found, data),
}
small = np.ones(1)
dist.all_reduce(small)
ask(SWITCH, set={"rate": 12.5e6})
if world.rank == 0:
    cut = threading.Timer(0.7, ask, [SWITCH], {"hosts": ["n2"], "set": {"is_up": False}})
    cut.start()
began = time.monotonic()
try:
    if WAY == "later":
        OPERATIONS[OPERATION](sync_op=False).wait()
    else:
        OPERATIONS[OPERATION]()
except dist.CollectiveTimeout as error:
    took = time.monotonic() - began
    tell("misses", *error.missing, "in time" if took < LIMIT_S + 4 else f"after {took:.1f} s")
try:
    dist.all_reduce(small)
except dist.TransportError:
    tell("cannot go on")
    time.sleep(2)  # the others notice it as late as that
    if world.rank == 0:  # the job is ended by this cable, too
        ask(SWITCH, set={"is_up": True})
    raise
