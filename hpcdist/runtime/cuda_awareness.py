"""Whether MPI takes pointers to GPU memory, asked of the library that is loaded."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.mpi import load_mpi

_LIBMPI = re.compile(r"/libmpi(ch)?(\.so|_\w+\.so|-[\w.]+\.so)[\d.]*$")
_KINDS = "mpi_memory_alloc_kinds"
_QUERY = "MPIX_Query_cuda_support"


class Awareness(NamedTuple):
    """Whether MPI takes pointers to GPU memory; None if it cannot be asked. And who says so."""

    aware: bool | None
    source: str


def cuda_awareness() -> Awareness:
    """Ask the MPI library whether it takes pointers to GPU memory.

    The memory kinds of the world are believed from MPI 4.1 on: before that, Open MPI returns what
    was asked for. Reference: MPI 4.1, chapter 12.4.3; Open MPI, MPIX_Query_cuda_support(3).
    """
    mpi = load_mpi()
    kinds = mpi.COMM_WORLD.Get_info().get(_KINDS) if mpi.Get_version() >= (4, 1) else None
    if kinds:
        return Awareness("cuda" in kinds, f"{_KINDS} is {kinds}")
    query = _query(*loaded(_LIBMPI))
    if query is None:
        return Awareness(None, f"the library has no {_QUERY}")
    vendor, numbers = mpi.get_vendor()
    built = vendor == "Open MPI" and numbers[0] < 5
    return Awareness(bool(query()), f"{_QUERY}{', of its build' if built else ''}")


def loaded(pattern: re.Pattern[str]) -> list[str]:
    """Return the paths of the shared libraries in this process that a pattern fits."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return [path for path in paths if pattern.search(path)]


def _query(*paths: str) -> Any:
    for path in paths:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if hasattr(library, _QUERY):
            return getattr(library, _QUERY)
    return None
