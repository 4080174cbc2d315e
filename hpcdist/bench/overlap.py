"""How much of an asynchronous operation computing hides: start it, compute, wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpcdist.bench.race import Call, Race, race

COMPUTE_SHARE = 1.5
"""How long to compute, in units of what the operation takes alone."""


def sleeper(_: Any, seconds: float) -> Call:
    """Return what leaves the core alone, as a GPU kernel would."""
    return partial(time.sleep, seconds)


def numpy_work(comm: Any, seconds: float) -> Call:
    """Return what keeps the core busy without the interpreter's lock, in calls of about 50 us."""
    block = np.linspace(1.0, 2.0, 1 << 15)
    return _repeated(comm, partial(np.sqrt, block, out=block), seconds)


def python_work(comm: Any, seconds: float) -> Call:
    """Return what keeps the core busy under the interpreter's lock."""
    return _repeated(comm, lambda: sum(range(2000)), seconds)


COMPUTING: Mapping[str, Callable[[Any, float], Call]] = {
    "sleep": sleeper,
    "NumPy": numpy_work,
    "Python": python_work,
}
"""Kinds of computing: each makes, of a communicator and seconds, what computes so long."""


def _repeated(comm: Any, step: Call, seconds: float) -> Call:
    alone = race(comm, {"step": step}, rounds=5).median("step")
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


def hidden(found: Race, name: str) -> float:
    """Return the share of the operation `name` that the contestant ``"compute"`` hid.

    It is what ``"<name> both"`` saves of the time the two take one after the other.
    """
    alone, compute = found.seconds[name], found.seconds["compute"]
    return float(np.median((alone + compute - found.seconds[f"{name} both"]) / alone))
