"""What starting costs: importing in fresh interpreters, and the start of this job."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from typing import Any

from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.process import stat_of

IMPORTS = {
    "hpcdist": "import hpcdist",
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI",
    "torch": "import torch.distributed",
    "paddle": "import paddle.distributed",
}
"""What a program imports of each library; MPI is not started by it."""


class Started(NamedTuple):
    """How long `init_parallel_env` took on this rank, and from the start of its process to its end.

    In seconds; `process_s` is None where the system does not tell when the process began.
    """

    init_s: float
    process_s: float | None


def busy(comm: Any) -> list[str]:
    """Return what there is to say of nodes where other processes ran before. Collective."""
    load = max(comm.allgather(os.getloadavg()[0]))
    return [f"a node was busy before (load {load:.1f}): measure on idle nodes"] if load > 1 else []


def process_age() -> float | None:
    """Return the seconds since this process began; None where the system does not tell."""
    try:
        ticks = int(stat_of("self")[1][19])  # field 22: start, in clock ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _ticks_per_s()
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def import_s(name: str) -> float:
    """Return the seconds a fresh interpreter takes to import the library `name`."""
    timed = f"from time import perf_counter as now; a = now(); {IMPORTS[name]}; print(now() - a)"
    told = subprocess.run(
        [sys.executable, "-c", timed], check=True, capture_output=True, text=True, timeout=300
    )
    return float(told.stdout.split()[-1])


def importable(name: str) -> bool:
    """Return whether the library is installed."""
    return importlib.util.find_spec(name) is not None
