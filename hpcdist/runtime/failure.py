"""What happens when a rank fails: its traceback appears once, and the whole job ends.

Without this a rank that dies in plain Python sits in ``MPI_Finalize`` while the others wait
for it, with every MPI library.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from types import TracebackType

from hpcdist.runtime.mpi import abort

_INTERRUPTED = 130
_TOLD_S = 0.2
"""What a launcher is given to pass on the last words: MPICH's drops them when it ends the job."""
_installed = False


def end_job_on_failure(rank: int) -> None:
    """From now on an uncaught exception on this rank ends all ranks.

    Interactive sessions are left alone: there an exception is part of the work.
    """
    global _installed
    if _installed or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    _installed = True
    previous, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:  # a forked child is no rank, and must not end MPI
            previous(kind, error, trace)
            _say("")
            os._exit(1)
        if issubclass(kind, KeyboardInterrupt):
            _say(f"[rank {rank}] interrupted\n")
            abort(_INTERRUPTED)
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)
            _say("")
        else:
            lines = "".join(traceback.format_exception(kind, error, trace)).rstrip().split("\n")
            _say("\n".join(f"[rank {rank}] {line}" for line in lines) + "\n")
        abort(1)

    sys.excepthook = hook


def _say(text: str) -> None:
    target = sys.stderr
    if isinstance(target, io.StringIO):  # torch's hook around ours holds everything back
        text, target = target.getvalue() + text, sys.__stderr__ or target
    for stream in (sys.stdout, target):
        try:
            if stream is target:
                stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            continue
    time.sleep(_TOLD_S)
