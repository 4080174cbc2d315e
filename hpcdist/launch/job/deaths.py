"""Who died in a job that survives, and whether it came to its end all the same.

`Deaths` collects how each process ended, with the report that it left. `judge` says what the job
came to: it has ended well where some ranks came to their end, and they have recovered from every
death. `summary` tells who died when, and what it cost. Everything but `Deaths` is pure.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcdist.launch.job.outcome import Outcome, describe_exit
from hpcdist.launch.survival import Survive
from hpcdist.named_tuple import NamedTuple

_BY_FORCE = (-signal.SIGKILL, -signal.SIGTERM)


class End(NamedTuple):
    """How a process ended: its exit code (negative for a signal), when, and what it reported.

    `at_s` are seconds since the start of the job; `report` is empty where it left none.
    """

    process: int
    code: int
    at_s: float
    report: Mapping[str, Any] = {}

    @property
    def state(self) -> str:
        """How it ended: "ended", "parked", "failed", "absent", or "" for one that left no report.

        Absent is one that failed before MPI had started.
        """
        return str(self.report.get("state", ""))

    @property
    def rank(self) -> int:
        """The last rank it reported; -1 where it had none, or left no report."""
        return int(self.report.get("rank", -1))

    @property
    def recoveries(self) -> Sequence[Mapping[str, Any]]:
        """The recoveries it took part in."""
        return tuple(self.report.get("recoveries", ()))


class Death(NamedTuple):
    """The end of a process that died, the rank it was (-1: not known), and what came of it.

    `recovery_s` is how long the others needed to go on, None where they did not; `taken_by` is the
    process that took its place, -1 if none did; `was_needed` is False for a spare that had no
    place yet.
    """

    end: End
    rank: int
    recovery_s: float | None
    taken_by: int = -1
    was_needed: bool = True

    @property
    def is_open(self) -> bool:
        """Whether nobody has recovered from it, though it was needed."""
        return self.was_needed and self.recovery_s is None


class Deaths:
    """How the processes of a job have ended so far.

    Args:
        survive: what was asked for.
        size: how many processes there are, spares among them.
        now_s: a clock.

    """

    def __init__(self, survive: Survive, size: int, now_s: Callable[[], float]) -> None:
        self._survive = survive
        self._size = size
        self._now_s = now_s
        self._began_s = now_s()
        self.ends: list[End] = []

    def note(self, process: int, code: int, report: str) -> bool:
        """Note the end of a process.

        Args:
            process: its number.
            code: its exit code, negative for a signal.
            report: the text it left, "" for none.

        Returns:
            Whether too few processes are left to go on, now for the first time.

        """
        enough = self._enough()
        self.ends.append(End(process, code, self._now_s() - self._began_s, read_report(report)))
        return enough and not self._enough()

    def _enough(self) -> bool:
        alive = self._size - sum(end.code != 0 for end in self.ends)
        return alive >= self._survive.min_ranks

    def lacks_one(self) -> bool:
        """Return whether a process has failed for which the others wait in MPI_Init for ever."""
        return any(end.state == "absent" for end in self.ends)

    def only_spares_wait(self) -> bool:
        """Return whether all ranks have come to their end, and spares that had no place are left.

        As many have as the latest world had ranks, of which those that were in it tell.
        """
        worlds = [self._world_of(end) for end in self.ends if end.state == "ended"]
        latest = max((each for each in worlds if each), default=None)
        return (
            latest is not None and worlds.count(latest) >= latest[1] and len(self.ends) < self._size
        )

    def _world_of(self, end: End) -> tuple[int, int] | None:
        """Return the number of the last world of a process, and its size; None if unknown."""
        told = end.report.get("world")
        if told:
            return int(told[0]), int(told[1])
        return None if end.recoveries else (0, self._size - self._survive.spares)

    def outcome(self, launcher: int, interrupted: int) -> Outcome:
        """Return what the job came to; see `judge`."""
        return judge(self.ends, self._size, self._survive.spares, launcher, interrupted)

    def summary(self) -> list[str]:
        """Return lines about who died and what it cost; none where nobody died."""
        return summary(self.ends, self._size, self._survive.spares, self._now_s() - self._began_s)


def read_report(text: str) -> Mapping[str, Any]:
    """Return a report from its text, nothing for one that was cut off.

    Example:
        >>> read_report('{"rank":1}'), read_report('{"ra')
        ({'rank': 1}, {})

    """
    try:
        report = json.loads(text)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def judge(ends: Sequence[End], size: int, spares: int, launcher: int, interrupted: int) -> Outcome:
    """Return what a job that survives came to.

    A launcher is not believed: it may say 0 where it has lost a node.

    Args:
        ends: how processes ended, in the order in which that was heard.
        size: how many processes there were, spares among them.
        spares: how many of them, the last ones, waited at the start.
        launcher: the exit code of the launcher.
        interrupted: the signal that we were sent, 0 for none.

    Example:
        >>> well = {"state": "ended", "recoveries": [{"dead": [1], "seconds": 0.1}]}
        >>> ends = [End(1, -9, 1.0), End(0, 0, 2.0, well), End(2, 0, 2.0, well)]
        >>> judge(ends, 3, 0, 0, 0).code, judge(ends[:2], 3, 0, 0, 0).lost
        (0, (2,))

    """
    exits = {end.process: end.code for end in ends}
    lost = tuple(process for process in range(size) if process not in exits)
    left = [each.end for each in match_deaths(ends, size, spares) if each.is_open]
    first = (left[0].process, left[0].code) if left else None
    if interrupted in (signal.SIGINT, signal.SIGPIPE):
        return Outcome(128 + interrupted, first, exits, launcher, lost)
    shell = 128 - launcher if launcher < 0 else launcher
    by_force = all(end.code in _BY_FORCE and end.state != "absent" for end in left)
    if left and by_force and 0 < shell < 128:
        return Outcome(shell, None, exits, launcher)  # an abort ended them, with this code
    if first is not None:
        code = 128 - first[1] if first[1] < 0 else first[1] or 1
        return Outcome(code, first, exits, launcher, lost)
    arrived = any(end.code == 0 and end.state != "parked" for end in ends)
    return Outcome(0 if arrived and not lost else 1, None, exits, launcher, lost)


def match_deaths(ends: Sequence[End], size: int, spares: int) -> list[Death]:
    """Return who died, in the order in which that was heard, and what came of it.

    Where others leave reports, one that left none has not come to its end, whatever its exit code.
    The recoveries are those of the process that took part in most of them, at best to its end;
    where they do not tell which processes had died these are the first ones. A spare that has died
    and that no recovery missed had no place yet.

    Args:
        ends: how processes ended.
        size: how many processes there were, spares among them.
        spares: how many of them, the last ones, waited at the start.

    """
    told = any(end.report for end in ends)
    died = [end for end in ends if end.code != 0 or (told and not end.report)]
    fates = [fate for recovery in longest(ends) for fate in _fates(recovery)]
    known = {fate.process: fate for fate in fates if fate.process >= 0}
    missed = [fate for fate in fates if fate.process < 0]
    others = [end for end in died if end.process not in known]
    waiting = [end for end in others if end.process >= size - spares and end.rank < 0]
    in_place = max(0, len(missed) - (len(others) - len(waiting)))
    unneeded = {end.process for end in waiting[: len(waiting) - in_place]}
    in_turn = iter(missed)

    def fate_of(end: End) -> _Fate:
        return known.get(end.process) or next(in_turn, _Fate(-1, end.rank, None))

    return [
        Death(end, -1, None, was_needed=False)
        if end.process in unneeded
        else Death(end, *fate_of(end)[1:])
        for end in died
    ]


class _Fate(NamedTuple):
    """Which process died, as which rank, how long the recovery took, and who took its place."""

    process: int
    rank: int
    recovery_s: float | None
    taken_by: int = -1


def _fates(recovery: Mapping[str, Any]) -> list[_Fate]:
    """Return those of the dead of a recovery; their processes are -1 where it does not tell."""
    dead = recovery["dead"]
    unknown = [-1] * len(dead)
    told = zip(recovery.get("who") or unknown, dead, recovery.get("by") or unknown, strict=True)
    seconds = float(recovery["seconds"])
    return [_Fate(process, rank, seconds, by) for process, rank, by in told]


def longest(ends: Sequence[End]) -> Sequence[Mapping[str, Any]]:
    """Return the recoveries of the process that saw most deaths in them."""
    return max(
        (end.recoveries for end in ends),
        key=lambda each: sum(len(recovery["dead"]) for recovery in each),
        default=(),
    )


def summary(ends: Sequence[End], size: int, spares: int, seconds: float) -> list[str]:
    """Return a report of the deaths: who, when, of what, and the cost; nothing if nobody died.

    Args:
        ends: how processes ended, in the order in which that was heard.
        size: how many processes there were, spares among them.
        spares: how many of them waited at the start.
        seconds: how long the job took.

    """
    died = match_deaths(ends, size, spares)
    if not died:
        return []
    taken = longest(ends)
    waited = sum(each["seconds"] for each in taken)
    missing = sum(max(0.0, seconds - each.end.at_s) for each in died)
    columns = 6 if any(each.taken_by >= 0 for each in died) else 5
    heads = ("after", "process", "rank", "ended with", "recovery", "its place")
    rows = [each[:columns] for each in (heads, *map(_row, died))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{len(died)} of {size} processes died",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        f"of {seconds:.1f} s the job spent {waited:.2f} s in {len(taken)} "
        f"{'recovery' if len(taken) == 1 else 'recoveries'}; without the dead it went on for "
        f"{missing:.1f} s, summed over them",
    ]


def _row(death: Death) -> tuple[str, ...]:
    end = death.end
    return (
        f"{end.at_s:.1f} s",
        str(end.process),
        str(death.rank) if death.rank >= 0 else "?" if death.was_needed else "spare",
        describe_exit(end.code) if end.code else "exit code 0 in the middle",
        "none" if death.recovery_s is None else f"{death.recovery_s:.3f} s",
        f"taken by {death.taken_by}" if death.taken_by >= 0 else "",
    )
