"""How a job ended: `Outcome`, and `conclude`, which finds its one exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from hpcdist.named_tuple import NamedTuple

# srun's words for the end of a rank, and the system's for a signal.
_SRUN_FAILURE = re.compile(
    r"srun: error: \S+ tasks? (\d+)[^:]*: (?:Exited with exit code (\d+)|([^(\n]*))"
)
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


class Outcome(NamedTuple):
    """How a job ended.

    `code` is an exit code as shells count, 128 + n for signal n. `first` is the first rank that
    failed and how (negative for a signal), None where no rank is known to have failed by itself.
    `exits` has the ranks that are known to have ended; `launcher` is the launcher's exit code.
    `lost` are the ranks of which nobody heard that they ended well, though the launcher says so.
    `left` are those that ended with code 0, but without ending MPI, for which the launcher ended
    the others. `killed` are those that had not ended long after SIGTERM, empty where they are not
    known, and None where there were none.
    """

    code: int
    first: tuple[int, int] | None
    exits: Mapping[int, int]
    launcher: int
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    killed: tuple[int, ...] | None = None


def conclude(
    first: tuple[int, int] | None,
    exits: Mapping[int, int],
    launcher: int,
    interrupted: int,
    told_of: int = 0,
    stopped: bool = False,
) -> Outcome:
    """Return what a job came to.

    Args:
        first: the rank that ended badly first, and its exit code, negative for a signal.
        exits: the exit codes of all ranks that are known to have ended.
        launcher: the exit code of the launcher, which carries the code of an `MPI.Abort`.
        interrupted: the signal that we were sent, or that our reader's end amounts to; 0 for none.
        told_of: how many ranks there are whose ends we are told of.
        stopped: we ended the job, without a signal.

    Example:
        >>> conclude((1, 7), {}, 1, 0).code, conclude((1, -9), {}, 137, 0).code
        (7, 137)
        >>> conclude((1, -15), {}, 3, 0)
        Outcome(code=3, first=None, exits={}, launcher=3, lost=(), left=(), killed=None)
        >>> conclude(None, {0: 0}, 0, 0, told_of=3).lost
        (1, 2)
        >>> conclude((0, -15), {0: -15, 1: 0}, 1, 0, told_of=2).left
        (1,)

    """
    shell = 128 - launcher if launcher < 0 else launcher
    if first is not None and first[1] < 0:
        # An abort ends the ranks by a signal, while the launcher tells the code it was given.
        ended_by = {-first[1], signal.SIGKILL, signal.SIGTERM}
        if 0 < shell < 128 and shell not in ended_by and not interrupted:
            first = None
    if interrupted in (signal.SIGINT, signal.SIGPIPE):
        return Outcome(128 + interrupted, first, exits, launcher)
    if first is None and shell == 0:
        lost = tuple(rank for rank in range(told_of) if exits.get(rank) != 0)
        return Outcome(int(bool(lost)), None, exits, launcher, lost)
    if first is None:
        known = shell == 1 and len(exits) == told_of and not interrupted and not stopped
        return Outcome(shell, None, exits, launcher, left=_left(exits) if known else ())
    code = first[1] if first[1] > 0 else 128 - first[1]
    return Outcome(code, first, exits, launcher)


def _left(exits: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks that ended with code 0 where a launcher has ended all others.

    A rank that ends MPI does not end before the others do so, too.
    """
    by_force = (0, -signal.SIGTERM, -signal.SIGKILL)
    if not all(code in by_force for code in exits.values()):
        return ()
    return tuple(sorted(rank for rank, code in exits.items() if code == 0))


def read_failure(said: str) -> tuple[int, int] | None:
    """Return the rank and exit code, negative for a signal, where srun says that a rank failed.

    Args:
        said: a line that srun printed.

    Example:
        >>> read_failure("srun: error: n1: task 3: Exited with exit code 7")
        (3, 7)
        >>> read_failure("srun: error: n2: tasks 4-5: Killed")
        (4, -9)

    """
    match = _SRUN_FAILURE.match(said)
    if match is None:
        return None
    code = int(match[2]) if match[2] else -_SIGNALS.get(match[3].strip(), 0)
    return (int(match[1]), code) if code else None


def describe_exit(code: int) -> str:
    """Return words for an exit code, negative for a signal.

    Args:
        code: as `subprocess` counts.

    Example:
        >>> describe_exit(7), describe_exit(-9)
        ('exit code 7', 'signal SIGKILL')

    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
