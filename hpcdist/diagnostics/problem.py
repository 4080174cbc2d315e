"""`Problem`: something that is wrong or slow, what to do about it, and the line it belongs to."""

from __future__ import annotations

from enum import Enum

from hpcdist.named_tuple import NamedTuple


class Check(str, Enum):
    """The lines of the report that something can be the matter with."""

    LAUNCH = "launcher and MPI"
    ALIKE = "alike on all ranks"
    NUMERICS = "same bits"
    THREADS = "MPI threads"
    NODES = "transport"
    MEMORY = "shared memory"
    KERNEL = "compiled kernel"
    TUNING = "tuning file"
    CORES = "cores"
    BINDING = "binding to cores"
    NUMA = "NUMA"
    SHM = "/dev/shm"
    MEMLOCK = "locked memory"
    GPUS = "GPUs"
    CALLS = "calls (RPC)"
    CLOCKS = "clocks"
    LINKS = "bandwidth between nodes"


class Problem(NamedTuple):
    """Something to be put right; `stops` says that the job would be wrong or hang."""

    check: Check
    stops: bool
    what: str
    remedy: str


def refused(error: Exception | str, *, stops: bool = True) -> Problem:
    """Return the problem of a job that cannot even start, or not (`stops`) with other ranks."""
    text = str(error)
    what, _, remedy = text.partition(";" if ";" in text else ": ")
    if told := getattr(error, "remedy", ""):
        what, remedy = text.removesuffix(told).rstrip(": "), told
    return Problem(Check.LAUNCH, stops, what, remedy.strip() or "see above")
