"""A cable is cut in the middle of an operation: transfer.py FOLDER OPERATION WAY.

The network is so slow that the operation is under way then. WAY is "now" or "later": whether the
operation is waited for where it is called. Ranks tell what they notice in files of the folder, as
what they print may have to go through the cable.
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
world = dist.init_parallel_env(timeout=60)
data, few = np.ones(4 << 20), np.ones(25_000)
found: list[object] = []


def tell(*words):
    with (FOLDER / f"told.{world.rank}").open("a") as file:
        print(*words, file=file)


OPERATIONS = {
    "all_reduce": lambda **how: dist.all_reduce(data, **how),
    "broadcast": lambda **how: dist.broadcast(data, 0, **how),
    "all_gather_object": lambda **how: dist.all_gather_object(found, data),
    "small all_reduce": lambda **how: dist.all_reduce(few, **how),
    "small all_gather": lambda **how: dist.all_gather([], few, **how),
    "new_group": lambda **how: dist.new_group([0, 1, 2], timeout=world.transport.timeout_s),
}
SLOW = {"rate": 12.5e6}, 0.7
SLOWER = {"rate": 1e5}, 0.7
LATE = {"delay": 1.0}, 2.5  # the members have met, and MPI makes the communicator
HOW = {"small all_reduce": SLOWER, "small all_gather": SLOWER, "new_group": LATE}
MENDED = {"rate": float("inf"), "delay": 0.0}
small = np.ones(1)
OPERATIONS[OPERATION]()  # which makes the communicators that it needs
world.transport.set_timeout(3)
slow, cut_after_s = HOW.get(OPERATION, SLOW)


def cut():
    ask(SWITCH, hosts=["n2"], set={"is_up": False})
    ask(SWITCH, set=MENDED)


ask(SWITCH, set=slow)
if world.rank == 0:
    threading.Timer(cut_after_s, cut).start()
try:
    if WAY == "later":
        OPERATIONS[OPERATION](sync_op=False).wait()
    else:
        OPERATIONS[OPERATION]()
except dist.CollectiveTimeout as error:
    tell("misses", *error.missing)
try:
    dist.all_reduce(small)
except dist.TransportError:
    tell("cannot go on")
    time.sleep(2)  # the others notice it as late as that
    if world.rank == 0:  # the job is ended by this cable, too
        ask(SWITCH, set={"is_up": True})
    raise
