"""Random mixes of operations in each of which a rank dies: ``dying_mixes.py SEED``, until two live.

Each rank that is left prints how many have died, and what was wrong.
"""

import random
import sys

from interrupted_mixes import PATIENCE_S, death

import hpcdist as dist

world, draw = dist.init_parallel_env(timeout=PATIENCE_S), random.Random(sys.argv[1])
size, wrong = world.nranks, []
while world.nranks > 2:
    world, found = death(draw, world)
    wrong += found
sys.stdout.write(f"{size - world.nranks} died: {wrong}\n")
