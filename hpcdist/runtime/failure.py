"""What happens when a rank fails: its traceback appears once, and the whole job ends.

Without this a rank that dies in plain Python sits in ``MPI_Finalize`` while the others wait
for it, with every MPI library.

[Note: last words] A launcher that ends a job because one rank has failed (``mpiexec``,
``srun --kill-on-bad-exit``) closes the output of all ranks at once, and drops what it has not
passed on, the reason of the failure too. A rank that is about to fail therefore waits until its
words have been taken, `wait_for_output`.

In a job that survives a failing rank ends alone, without MPI, and the others go on.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import stat
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TextIO

from hpcdist.errors import HpcdistError
from hpcdist.runtime.ending import end_alone, note_failure, survives
from hpcdist.runtime.mpi import abort, is_only_process
from hpcdist.runtime.place import read_place
from hpcdist.runtime.reports import note_rank

_INTERRUPTED = 130
_TAKEN_S = 2.0
"""How long a launcher may take to read what this rank wrote."""
_TOLD_S = 0.2
"""What it is given to pass on what it has read."""
LABELLED = "HPCDIST_LABELLED"
"""Set by `hpcdist run` where it begins each line with the rank itself."""
_installed = False


def tell_in_short(rank: int | None = None) -> None:
    """From now on an uncaught exception is told by `account_of`, each line with the rank. Local.

    Interactive sessions are left alone, and programs that have a hook of their own.

    Args:
        rank: in the world; None before hpcdist has started: what the launcher says.

    """
    if _is_interactive() or sys.excepthook is not sys.__excepthook__:
        return
    place = read_place(os.environ)
    is_alone = rank is None and place.size == 1
    mark = "" if is_alone else _mark(place.rank if rank is None else rank)
    write = _say if rank is None else _write
    in_full = os.environ.get("HPCDIST_TRACEBACK") == "full"

    def hook(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
        prefix = "" if is_only_process() else mark
        write("".join(f"{prefix}{line}\n" for line in account_of(error, in_full=in_full)))

    sys.excepthook = hook


def end_job_on_failure(rank: int) -> None:
    """From now on an uncaught exception on this rank ends all ranks; in a job that survives, this.

    Interactive sessions are left alone: there an exception is part of the work.

    Args:
        rank: in the world.

    """
    global _installed
    note_rank(rank)
    if _installed or _is_interactive():
        return
    _installed = True
    tell_in_short(rank)
    previous, pid, mark = sys.excepthook, os.getpid(), _mark(rank)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:  # a forked child is no rank, and must not end MPI
            previous(kind, error, trace)
            _say("")
            os._exit(1)
        note_failure(error)
        if issubclass(kind, KeyboardInterrupt):
            _say(f"{mark}interrupted\n")
            _end(_INTERRUPTED)
        previous(kind, error, trace)
        if survives() or not is_only_process():
            _say("")
            _end(1)
        wait_for_output()

    sys.excepthook = hook


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _mark(rank: int) -> str:
    """Return what begins each line of this rank; nothing where the launcher writes it."""
    return "" if _is_labelled() else f"[rank {rank}] "


@cache
def _is_labelled() -> bool:
    """Return whether `hpcdist run` says it, of this process; not of those that it starts itself."""
    return os.environ.pop(LABELLED, None) is not None


def account_of(error: BaseException, *, in_full: bool = False) -> list[str]:
    """Return the lines that tell of an uncaught exception: one of hpcdist first, then where it was.

    Args:
        error: what nobody has caught.
        in_full: as Python tells it, with the lines of hpcdist.

    """
    import traceback

    taken = traceback.extract_tb(error.__traceback__)
    frames = [each for each in taken if not each.filename.startswith(_OURS)]
    if in_full or not frames or not isinstance(error, HpcdistError):
        lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
        said = _said(error)
        return lines + [hint for words, hint in _HINTS.items() if words in said]
    words = [f"hpcdist.{type(error).__name__}: {error}"]
    cause = error.__cause__
    while cause is not None:
        if _said(cause) not in str(error):  # else it has been said
            words += [f"caused by {each}" for each in traceback.format_exception_only(cause)]
        cause = cause.__cause__
    told = "".join([*(f"{each.rstrip()}\n" for each in words), *traceback.format_list(frames)])
    return [*told.rstrip().split("\n"), _LEFT_OUT]


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own; Python shows it without words, too
        return f"<{type(error).__name__}>"


_HINTS = {
    "unexpected keyword argument 'async_op'": (
        "async_op=True of torch.distributed is sync_op=False here, as in Paddle"
    ),
    "unexpected keyword argument 'lr'": "lr of torch.optim is learning_rate here",
    "all_gather() missing": (
        "all_gather(arrays, x) fills its first argument, an empty list for example; "
        "it returns no arrays"
    ),
    "recv() missing": "recv(x, src) fills the array that it is given; it returns no array",
    "'Done'": (
        "Done is the work of an operation that has ended: the result is in the array that was "
        "passed, as in dist.all_reduce(x); dist.all_reduced(x) returns it"
    ),
    "'Group' object has no attribute 'size'": "The number of ranks of a group is group.nranks",
}
"""What to do about errors that Python itself raises, by words in them."""

_OURS = str(Path(__file__).parents[1]) + os.sep, contextlib.__file__
"""The files of hpcdist; what `contextlib` calls between them is of no more help."""
_LEFT_OUT = "(HPCDIST_TRACEBACK=full shows the lines of hpcdist, too)"


def _end(code: int) -> NoReturn:
    """End this rank, and the others with it unless the job survives."""
    if survives():
        end_alone(code)
    abort(code)


def wait_for_output_at_exit() -> None:
    """Register `wait_for_output` for the exit of this process, so that its error is not lost."""
    atexit.unregister(wait_for_output)
    atexit.register(wait_for_output)


def wait_for_output() -> None:
    """Wait until the launcher has read the output of this rank; see [Note: last words]."""
    _flush(sys.stdout)
    _flush(sys.stderr)
    deadline = time.monotonic() + _TAKEN_S
    while any(map(_unread, (1, 2))) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(_TOLD_S)


def _unread(file: int) -> int:
    """Return how many bytes written to a pipe have not been read; 0 where that is not known."""
    import fcntl
    import termios

    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            waiting = fcntl.ioctl(file, termios.FIONREAD, bytes(4))
            return int.from_bytes(waiting, sys.byteorder)
    return 0


def _say(text: str) -> None:
    target = sys.stderr
    if isinstance(target, io.StringIO):  # torch's hook around ours holds everything back
        text, target = target.getvalue() + text, sys.__stderr__ or target
    _write(text, target)
    wait_for_output()


def _write(text: str, target: TextIO | None = None) -> None:
    target = target or sys.stderr
    _flush(sys.stdout)
    with suppress(OSError, ValueError, AttributeError):
        target.write(text)
    _flush(target)


def _flush(stream: TextIO) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        stream.flush()
