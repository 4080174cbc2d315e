"""What the other ranks of this job do that run on this node: read from their flight recorders.

For messages, once something has gone wrong or takes long: it takes milliseconds, and no rank helps.
What reads recordings is imported then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

from hpcdist.runtime.process import node_name
from hpcdist.transport.flight import recorder, rings

if TYPE_CHECKING:
    from hpcdist.transport.flight.analysis import Explanation

_NEWEST = 128
"""So many records of each rank are looked at."""


def explanation() -> Explanation | None:
    """Return what the ranks of this node do, and who waits for whom; None without a recorder."""
    from hpcdist.transport.flight.analysis import Subject, explain
    from hpcdist.transport.flight.recording import read_recording

    own = recorder.job()
    if own is None:
        return None
    offset_ns, host = time.time_ns() - time.monotonic_ns(), node_name()
    mine = [raw for raw in map(rings.read_ring, rings.find_rings()) if _is_of(raw, own.name, host)]
    found = [read_recording(raw, offset_ns, _NEWEST) for raw in mine]
    subjects = [Subject(each, rings.condition(each.pid, each.born)) for each in found]
    here = [*own.here, *(each.rank for each in subjects)]
    return explain(subjects, own.size, time.time_ns(), here)


def _is_of(raw: bytes | None, job: str, host: str) -> TypeGuard[bytes]:
    """Return whether a ring is of a job, and of this node: nodes may share the folder."""
    if raw is None:
        return False
    about = rings.about_of(raw)
    return about.get("job") == job and about.get("host") == host


def call_sites(ranks: Iterable[int]) -> dict[int, str]:
    """Return the line at which each of `ranks` is, or has last called hpcdist, where known."""
    found = explanation()
    if found is None:
        return {}
    stands = {rank: found.stands[rank] for rank in ranks if rank in found.stands}
    at = {rank: stand.inside or stand.last for rank, stand in stands.items()}
    return {rank: record.site for rank, record in at.items() if record is not None}


def last_line(rank: int) -> str:
    """Return what a rank of this node does, as the end of a sentence; nothing where unknown."""
    from hpcdist.transport.flight.analysis import doing

    found = explanation()
    stand = None if found is None else found.stands.get(rank)
    if stand is None or stand.subject.condition == "dead":
        return ""
    stopped = "stopped by a signal, " if stand.subject.condition == "stopped" else ""
    words = stopped + doing(stand, time.time_ns())
    return words if words.startswith("waits") else f"is {words}"
