"""`Failure`: the error of an operation that runs beside the program, until somebody hears of it.

`Work.wait` raises it. If the work goes away before, or the program ends, the error is written to
stderr with the line that began the operation, and the exit code becomes 1 where it would be 0: the
arrays hold something else than the program takes for granted.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import final
from weakref import WeakValueDictionary

from hpcdist.text import in_short
from hpcdist.transport.flight import recorder

_failures: WeakValueDictionary[int, Failure] = WeakValueDictionary()
"""Those that are still there."""
_warned: dict[str | tuple[str, type[Warning], int], int] = {}
"""What keeps Python from warning of a line twice."""
_has_failed: list[bool] = []
_FAILED = 1
_SHOWN = 8
"""So many operations are named."""
_HINT = "keep what the function returns, and call wait() on it before its arrays are used"


@final
class Failure:
    """An error that waits to be raised.

    Args:
        error: what went wrong.
        what: the operation.
        site: the line of the program that began it.

    """

    def __init__(self, error: BaseException, what: str, site: str) -> None:
        self.error = error
        self._what, self._site = what, site
        self._rank = recorder.rank()
        self._is_heard = False
        _failures[id(self)] = self

    def hear(self) -> BaseException:
        """Return the error to somebody who will deal with it."""
        self._is_heard = True
        return self.error

    def tell(self) -> None:
        """Write the error to stderr if nobody has heard of it, and have the program fail."""
        if self._is_heard:
            return
        self._is_heard = True
        _say(
            self._rank,
            f"{self._what}, called at {self._site}, failed, and nobody waited for it; {_HINT}. "
            f"It raised {type(self.error).__name__}: {self.error}",
        )
        _fail_at_exit()

    def __del__(self) -> None:
        self.tell()


def error_of(failure: Failure | None) -> BaseException | None:
    """Return the error of a failure, if there is one, without hearing of it."""
    return None if failure is None else failure.error


def _living() -> list[Failure]:
    return [failure for each in _failures.valuerefs() if (failure := each()) is not None]


def tell_all() -> bool:
    """Tell of all errors that nobody has heard of, as nobody will; return if any was ever told."""
    for failure in _living():
        failure.tell()
    return bool(_has_failed)


def forget_all() -> None:
    """Take all errors for heard of: they came of what the program has dealt with."""
    for failure in _living():
        failure.hear()


os.register_at_fork(after_in_child=forget_all)  # its parent tells


def tell_dropped(what: str, site: str) -> None:
    """Warn that an operation was under way when its work went away, with the line that began it."""
    file, _, line = site.rpartition(":")
    words = f"{what} had not ended when its work was dropped, and nobody waited for it; {_HINT}"
    if not line.isdigit():
        file, line = site, "0"
    try:
        warnings.warn_explicit(words, ResourceWarning, file, int(line), registry=_warned)
    except ResourceWarning as error:  # where warnings are errors; nobody could catch this one here
        _say(recorder.rank(), f"{site}: ResourceWarning: {error}")
        _fail_at_exit()


def tell_at_end(error: BaseException) -> None:
    """Write an error of which there is no operation left to raise it, and let the program fail."""
    _say(recorder.rank(), f"{type(error).__name__}: {error}")
    _fail_at_exit()


def tell_unfinished(ranks: Iterable[int], left: Iterable[str]) -> None:
    """Say which operations are under way when their group ends."""
    told = [*filter(None, left)]
    if told:
        shown = "; ".join(told[:_SHOWN])
        more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        _say(
            recorder.rank(),
            f"the group of ranks {in_short([*ranks])} ends before these operations of this rank "
            f"have ended: {shown}{more}; wait() for each before the group or the program ends",
        )


def _say(rank: int, words: str) -> None:
    mark = f"[rank {rank}] " if rank >= 0 else ""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
        sys.stderr.write(f"{mark}hpcdist: {words}\n")
        sys.stderr.flush()


def _fail_at_exit() -> None:
    """Have this process end with an exit code other than 0.

    Python knows no exit code before its end, but the C library calls what it is given then. In
    glibc such a function may call `exit` again, after which the others are called.
    """
    if _has_failed:
        return
    _has_failed.append(True)
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        end = libc.exit if hasattr(libc, "gnu_get_libc_version") else libc._exit
        libc.__cxa_atexit(end, ctypes.c_void_p(_FAILED), None)
