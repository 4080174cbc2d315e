"""How this process of a job that survives ended: a report for whoever started the job.

The launcher names a folder on this node in ``HPCDIST_REPORT_DIR``. Each process leaves
``rank-<process>.json`` there: its number among the processes that were started, its last rank, how
it ended and which recoveries it took part in. Without that folder nothing happens here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from hpcdist.runtime.place import read_place, world_place
from hpcdist.runtime.process import snapshot

FOLDER = "HPCDIST_REPORT_DIR"
"""The variable that names the folder."""
_MOST = 20
"""Recoveries that a report tells apart, the last ones: it travels as one line."""
_MOST_DEAD = 200
"""So many ranks it names for the others."""
_noted: dict[str, Any] = {}
"""What there is to be told of this process so far."""


def note_rank(rank: int, *, parked: bool = False) -> None:
    """Remember which rank this process is from now on, or that it waits to become one. Local.

    Until then the last ``HPCDIST_SPARES`` processes wait, and the others are ranks by their number.
    It leaves a sign that MPI has started: who dies before has the others wait in MPI_Init for ever.

    Args:
        rank: its rank in the world; -1 for a process that is parked.
        parked: whether it is a spare that waits for a place.

    """
    folder = os.environ.get(FOLDER)
    if folder:
        _noted.update(rank=rank, parked=parked)
        with suppress(OSError):
            open(f"{folder}/rank-{read_place(snapshot()).rank}.started", "w").close()


def note_world(generation: int, size: int) -> None:
    """Remember which world this process is in: after how many recoveries, and its size. Local."""
    if FOLDER in os.environ:
        _noted["world"] = [generation, size]


def note_recovery(
    dead: Iterable[int],
    seconds: float,
    who: Sequence[int] = (),
    taken: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Remember that this process has gone on after deaths. Local; each that goes on calls it.

    Args:
        dead: world ranks that died, as they were numbered before the recovery, in ascending order.
        seconds: how long the recovery took here.
        who: the numbers of their processes, among those that were started; () if unknown.
        taken: for each of them whose place a spare has taken the number of that process.

    """
    if FOLDER in os.environ:
        ranks = sorted(dead)
        by = [taken.get(rank, -1) for rank in ranks] if taken else []
        more = {name: each for name, each in (("who", [*who]), ("by", by)) if each}
        recovery = {"dead": ranks, "seconds": round(seconds, 4), **more}
        _noted["recoveries"] = shortened([*_noted.get("recoveries", ()), recovery], _MOST)


def shortened(recoveries: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return so many recoveries at most, and all who died in them; the first ones become one.

    Those in which nobody had died are left out.

    Example:
        >>> told = [{"dead": [rank], "seconds": 0.5} for rank in range(3)]
        >>> shortened(told, 2)
        [{'dead': [0, 1], 'seconds': 1.0}, {'dead': [2], 'seconds': 0.5}]

    """
    found = [each for each in recoveries if each["dead"]]
    while len(found) > most:
        first, second, *others = found
        dead, seconds = [*first["dead"], *second["dead"]], first["seconds"] + second["seconds"]
        found = [{"dead": dead[-_MOST_DEAD:], "seconds": round(seconds, 4)}, *others]
    return found


def write_report(code: int | None) -> None:
    """Leave the report of this process, once it ends. Local.

    Args:
        code: its exit code; None where the program has come to its end, and the code is not
            known here.

    """
    environ = snapshot()
    folder = environ.get(FOLDER)
    if not folder:
        return
    process = read_place(environ).rank
    is_spare = process >= world_place(environ).size
    noted = {"rank": -1 if is_spare else process, "parked": is_spare, **_noted}
    text = json.dumps(plan_report(process, code, noted), separators=(",", ":"))
    path = f"{folder}/rank-{process}.json"
    with suppress(OSError):  # nobody may wait for it any more
        with open(f"{path}.part", "w") as file:
            file.write(text)
        os.replace(f"{path}.part", path)


def plan_report(process: int, code: int | None, noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report says.

    Args:
        process: the number of the process among those that were started.
        code: its exit code, None for one that has come to its end.
        noted: what was noted before.

    Example:
        >>> plan_report(3, None, {"rank": 2})["state"], plan_report(3, 1, {})["state"]
        ('ended', 'failed')

    """
    parked = bool(noted.get("parked"))
    report = {
        "process": process,
        "rank": noted.get("rank", process),
        "state": "failed" if code else "parked" if parked else "ended",
        "code": code or 0,
        "recoveries": list(noted.get("recoveries", ())),
    }
    return {**report, "world": noted["world"]} if "world" in noted else report
