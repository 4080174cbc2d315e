"""The end of a process in a job that survives: without MPI_Finalize, which may hang after a death.

The ranks have met before, with a time limit, when their session ended. Then each leaves its report
and ends as the program wants it to, by the exit code of the program. Where the program has loaded
mpi4py.MPI before hpcdist, mpi4py calls MPI_Finalize all the same; whoever started the process ends
it when that hangs.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from contextlib import suppress

from hpcdist.runtime.reports import write_report


def survives() -> bool:
    """Return whether this process is part of a job that goes on when a rank dies."""
    return os.environ.get("HPCDIST_SURVIVE") == "1"


def end_without_mpi() -> None:
    """From now on the end of this process leaves its report, and does not wait for MPI. Local."""
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    write_report(None)
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # without it, libraries have their say at the exit
        # Only the C library knows the exit code: `on_exit` calls `_exit` with it, before others.
        libc.on_exit(libc._exit, None)
    libc.fflush(None)
