"""`held_nbytes`: the memory that objects hold in arrays, counted and not estimated."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from hpcdist.comm.group import Group


def held_nbytes(*roots: Any) -> int:
    """Count the bytes of all arrays that can be reached from objects: each memory once."""
    seen: set[int] = set()
    memories: dict[int, int] = {}
    queue = list(roots)
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, Group)):
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            memories[id(value)] = value.nbytes
        else:
            queue += gc.get_referents(value)
    return sum(memories.values())
