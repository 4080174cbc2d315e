"""The processes of one rank of a job on this machine: `Rank` sends them signals, safely.

A process is known by its number and the time of its birth, so that a signal never reaches another
process that has got the number of a dead one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from hpcdist.launch.job import shim
from hpcdist.runtime.process import stat_of


class Rank:
    """One rank's processes: the rank itself and the shim that waits for it."""

    def __init__(self, pid: int, shim_pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._born = {each: _birth(each) for each in (pid, shim_pid)}
        self._shim_pid = shim_pid

    def send(self, number: int) -> None:
        """Send a signal to the rank if it is still there."""
        if self.code is None and _birth(self.pid) == self._born[self.pid]:
            quietly(os.kill, self.pid, number)

    def kill(self) -> None:
        """End the rank, what it started, and its shim by force."""
        if self.code is None and _birth(self.pid) == self._born[self.pid]:
            quietly(os.killpg, self.pid, signal.SIGKILL)
        if _birth(self._shim_pid) == self._born[self._shim_pid]:
            quietly(os.kill, self._shim_pid, signal.SIGKILL)


def shim_program(directory: str, program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the argv that runs a program as a rank under the shim.

    Args:
        directory: where the job's named pipes are.
        program: the argv of the rank.

    """
    return (sys.executable, "-I", "-S", shim.__file__, "rank", directory, *program)


def placed_program(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the argv that tells a program of Python its place, as torchrun would, and runs it."""
    if program[0] != sys.executable:
        return program
    return (sys.executable, "-I", "-S", shim.__file__, "place", *program)


def reporting_program(word: str, program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the argv that runs a program on another machine and tells how it ended.

    Args:
        word: what the line that tells it begins with.
        program: the argv of the rank.

    """
    return (sys.executable, "-I", "-S", shim.__file__, "report", word, *program)


def quietly(function: Callable[..., object], *arguments: object) -> None:
    """Call, and let it be where the process or pipe is gone."""
    with contextlib.suppress(ProcessLookupError, BlockingIOError, BrokenPipeError):
        function(*arguments)


def _birth(pid: int) -> str:
    """Return when a process began, "" if there is none (or a dead one nobody has waited for)."""
    _, fields = stat_of(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]
