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
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from hpcdist.runtime.reports import FOLDER, write_report
from hpcdist.runtime.survival import can_recover


def survives() -> bool:
    """Return whether this process is part of a job that goes on when a rank dies.

    `hpcdist run --survive` has started it, or Open MPI's ``mpirun --with-ft ulfm``.
    """
    return os.environ.get("HPCDIST_SURVIVE") == "1" or can_recover(os.environ)


def end_alone(code: int) -> NoReturn:
    """End this process, and tell the others of its death; in a job that survives.

    Args:
        code: its exit code, not 0.

    """
    write_report(code)
    if FOLDER not in os.environ:  # nobody stands between us and mpirun, which only notes signals
        import signal  # which takes time to import

        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


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


_listeners: list[Callable[[BaseException], None]] = []


def tell_of_failure(listener: Callable[[BaseException], None]) -> None:
    """From now on `listener` hears, before anybody else, of the exception that ends this rank."""
    if listener not in _listeners:
        _listeners.append(listener)


def note_failure(error: BaseException) -> None:
    """Tell those who want to hear of it which exception ends this rank."""
    for listener in _listeners:
        listener(error)
