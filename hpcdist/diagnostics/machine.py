"""What the operating system gives a rank on its node: cores, NUMA, memory, GPUs. Local."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.diagnostics.gpus import Gpus, find_gpus
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.process import my_cores
from hpcdist.text import read_short

_SHM = Path("/dev/shm")
_NODES = Path("/sys/devices/system/node")
_RDMA = Path("/sys/class/infiniband")
_SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")


class Machine(NamedTuple):
    """What one rank finds on its node.

    Attributes:
        host: the name of the node.
        cores: numbers of the cores left to this rank.
        numa: for each NUMA node of the machine the numbers of its cores.
        shm: bytes of /dev/shm, and bytes of it that are free; None if there is none.
        memlock: bytes that the rank may lock in memory; None for no limit.
        rdma: names of the RDMA devices.
        gpus: those it may use.
        visible: its ``CUDA_VISIBLE_DEVICES``.
        wanted: which of its GPUs it was told to take; usually by its rank on the node.

    """

    host: str
    cores: tuple[int, ...]
    numa: tuple[tuple[int, ...], ...] = ()
    shm: tuple[int, int] | None = None
    memlock: int | None = None
    rdma: tuple[str, ...] = ()
    gpus: Gpus = Gpus()
    visible: str | None = None
    wanted: int | None = None


def look_around(environ: Mapping[str, str], device: str | None = None) -> Machine:
    """Return what there is on this node for this rank; `device` names the GPU it was told to take.

    Example:
        >>> look_around({}, "gpu:1").wanted
        1

    """
    number = (device or "").rpartition(":")[2]
    host, cores = my_cores()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        host,
        cores,
        _numa(),
        _shm(),
        None if locked == resource.RLIM_INFINITY else locked,
        _rdma(),
        find_gpus(visible),
        visible,
        int(number) if number.isdigit() else None,
    )


def _numa() -> tuple[tuple[int, ...], ...]:
    found = sorted(_NODES.glob("node[0-9]*/cpulist"))
    return tuple(cores for cores in map(read_short, map(_read, found)) if cores)


def _shm() -> tuple[int, int] | None:
    try:
        state = os.statvfs(_SHM)
    except OSError:
        return None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _rdma() -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted(path.name for path in _RDMA.iterdir()))
    return ()


def system() -> Iterator[tuple[str, str]]:
    """Give what bears on ranks that share a node."""
    pages = _read(_SHARED_PAGES).partition("[")[2].partition("]")[0]
    if pages:
        yield "large pages for shared memory", f"{pages} ({_SHARED_PAGES})"
    scope = _read(_PTRACE)
    if scope not in ("", "0"):
        yield "reading other processes", f"{_PTRACE} is {scope}: MPI may copy twice in a node"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ---- how the ranks of a node share its cores; pure


def crowded(ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the cores to which more ranks of a node are bound than can run there.

    Args:
        ranks: the cores of each rank of one node.

    Returns:
        The cores; none where each rank has a core of its own, or where ranks that share cores
        have enough of them.

    Example:
        >>> crowded([(0, 1), (0, 1), (2,), (2,)])
        (2,)

    """
    allowed = sorted({frozenset(cores) for cores in ranks}, key=len)
    full: set[int] = set()
    for cores in allowed:  # all ranks that can run nowhere else
        bound = [each for each in ranks if cores.issuperset(each)]
        if len(bound) > len(cores) and not full & cores:
            full |= cores
    return tuple(sorted(full))


def named(hosts: Sequence[str]) -> str:
    """Return the names of nodes, of many the first ones.

    Example:
        >>> named(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'

    """
    if len(hosts) <= 4:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"


def across_numa(machine: Machine) -> bool:
    """Return whether the cores of a rank belong to several NUMA nodes.

    Example:
        >>> across_numa(Machine("a", (0, 1), ((0,), (1,))))
        True

    """
    return sum(bool(set(machine.cores) & set(cores)) for cores in machine.numa) > 1
