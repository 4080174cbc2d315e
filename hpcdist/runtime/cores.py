"""Which processor cores this process may use."""

from __future__ import annotations

import os
import socket


def my_cores() -> tuple[str, tuple[int, ...]]:
    """Return the node's name and the numbers of the cores the launcher left to this process."""
    return socket.gethostname(), tuple(sorted(os.sched_getaffinity(0)))
