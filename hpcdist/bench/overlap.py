"""How much of an asynchronous operation computing hides: start it, compute, wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpcdist.bench.interleaved import Call, Interleaved, interleave
from hpcdist.bench.memory_kinds import Memory
from hpcdist.bench.unavailable import agree, complaint
from hpcdist.comm.group import Group
from hpcdist.named_tuple import NamedTuple

COMPUTE_SHARE = 1.5
"""How long to compute, in units of what the operation takes alone."""


class Place(NamedTuple):
    """Where computing takes place: the ranks, and the memory that they compute in."""

    comm: Any
    group: Group
    memory: Memory

    def interleave(self, candidates: Mapping[str, Call]) -> Interleaved:
        """Time the candidates, shortly. Collective."""
        return interleave(self.comm, candidates, rounds=5, wait=self.memory.waiter())


def sleeper(_: Place, seconds: float) -> Call:
    """Return what leaves the core alone, as a GPU kernel would."""
    return partial(time.sleep, seconds)


def numpy_work(place: Place, seconds: float) -> Call:
    """Return what keeps the core busy without the interpreter's lock, in calls of about 50 us."""
    block = np.linspace(1.0, 2.0, 1 << 15)
    return _repeated(place, partial(np.sqrt, block, out=block), seconds)


def python_work(place: Place, seconds: float) -> Call:
    """Return what keeps the core busy under the interpreter's lock."""
    return _repeated(place, lambda: sum(range(2000)), seconds)


def matrix_work(place: Place, seconds: float) -> Call:
    """Return what multiplies float32 matrices; on a device, on the current stream.

    Raises:
        Unavailable: the array library cannot multiply, on any of the ranks.

    """
    device = place.memory.device
    rows = 256 if device is None else device.matrix
    a, b, product = (
        place.memory.zeros(rows * rows, np.dtype(np.float32), place.group).reshape(rows, rows)
        for _ in range(3)
    )
    multiply = partial(np.matmul, a, b, out=product)
    agree(place.comm, complaint(multiply))
    return _repeated(place, multiply, seconds)


COMPUTING: Mapping[str, Callable[[Place, float], Call]] = {
    "sleep": sleeper,
    "NumPy": numpy_work,
    "Python": python_work,
    "matmul": matrix_work,
}
"""Kinds of computing: each makes, of a place and seconds, what computes so long. Collective."""


def _repeated(place: Place, step: Call, seconds: float) -> Call:
    alone = place.interleave({"step": step}).median("step")
    turns = range(max(1, round(seconds / alone)))

    def compute() -> None:
        for _ in turns:
            step()

    return compute


def both(begin: Call, compute: Call) -> Call:
    """Return the call that begins the operation, computes and waits."""

    def begin_compute_wait() -> None:
        work = begin()
        compute()
        work.wait()

    return begin_compute_wait


def hidden(found: Interleaved, name: str) -> float:
    """Return the share of the operation `name` that the candidate ``"compute"`` hid.

    It is what ``"<name> both"`` saves of the time the two take one after the other.
    """
    alone, compute = found.seconds[name], found.seconds["compute"]
    return float(np.median((alone + compute - found.seconds[f"{name} both"]) / alone))
