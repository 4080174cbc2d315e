"""One process: its environment (read at one door), memory, cores and the time it wanted.

Packages outside `hpcdist.runtime` take the environment as an argument; those that must begin
somewhere ask for `snapshot()`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def snapshot() -> dict[str, str]:
    """Return a copy of the environment variables of this process.

    Returns:
        A dictionary of its own: changing it changes nothing else.

    Example:
        >>> "PATH" in snapshot()
        True

    """
    return dict(os.environ)


def node_name() -> str:
    """Return the name of this node, as `socket.gethostname` does, without importing sockets.

    Example:
        >>> import socket
        >>> node_name() == socket.gethostname()
        True

    """
    return os.uname().nodename


def my_cores() -> tuple[str, tuple[int, ...]]:
    """Return the node's name and the numbers of the cores the launcher left to this process."""
    return node_name(), tuple(sorted(os.sched_getaffinity(0)))


def stat_of(pid: int | str) -> tuple[str, list[str]]:
    """Return the name of a process of this node, and what the system says of it from its state on.

    Returns:
        Both empty if there is no such process. A name is at most 15 bytes, so one that is not ASCII
        may end within a character.

    Reference: Linux, proc_pid_stat(5): `fields[n]` is its field n + 3.

    Example:
        >>> name, fields = stat_of(os.getpid())
        >>> int(fields[1]) == os.getppid()
        True

    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            before, _, after = stat.read().rpartition(b")")
    except OSError:
        return "", []
    return os.fsdecode(before.partition(b"(")[2]), after.decode().split()


def resident_bytes() -> tuple[int, int]:
    """Return how many bytes of host memory this process has, and the most it has had."""
    told = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line
    )
    now, most = (int(told[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


def demand_s() -> float:
    """Return for how many seconds threads of this process have run, or were ready to.

    Reference: Linux, Documentation/scheduler/sched-stats.rst; without it only those they ran.
    """
    waited_ns = 0
    with suppress(OSError):  # not every kernel tells
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError, ValueError):  # the thread may just have ended
                waited_ns += int((thread / "schedstat").read_text().split()[1])
    return time.process_time() + waited_ns * 1e-9
