"""What `hpcdist top` shows: what has been done between two looks, and what each rank does."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from hpcdist.diagnostics.flight.jobs import Job
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import bandwidth, duration, percent, rate
from hpcdist.transport.flight.recording import Total

_NOTHING = Total(0, 0, 0.0)


class Activity(NamedTuple):
    """What all ranks of a job did of one operation in a second."""

    name: str
    per_s: float
    bytes_per_s: float
    each_s: float
    """How long one took."""
    share: float
    """Of the time of the ranks."""


def activities(before: Job, after: Job, span_s: float) -> list[Activity]:
    """Return the operations between two snapshots, the longest ones first.

    Args:
        before: the job then.
        after: the job now.
        span_s: the seconds between.

    """
    then = {each.rank: each.recording.totals for each in before.subjects}
    done: dict[str, list[Total]] = {}
    for subject in after.subjects:
        for name, total in _since(then.get(subject.rank, {}), subject.recording.totals).items():
            done.setdefault(name, []).append(total)
    found = [_of_all(name, totals, span_s, len(after.subjects)) for name, totals in done.items()]
    return sorted(found, key=lambda each: -each.share)


def _since(before: Mapping[str, Total], after: Mapping[str, Total]) -> dict[str, Total]:
    found = {}
    for name, now in after.items():
        then = before.get(name, _NOTHING)
        if now.ended > then.ended:
            found[name] = Total(
                now.ended - then.ended, now.nbytes - then.nbytes, now.busy_s - then.busy_s
            )
    return found


def _of_all(name: str, totals: list[Total], span_s: float, ranks: int) -> Activity:
    ended = sum(each.ended for each in totals)
    nbytes = sum(each.nbytes for each in totals)
    busy_s = sum(each.busy_s for each in totals)
    share = busy_s / (span_s * ranks)
    return Activity(name, ended / span_s, nbytes / span_s, busy_s / ended, share)


def between(before: Job, after: Job, span_s: float) -> str:
    """Return a table of the operations between two snapshots."""
    table = Table(title=f"job {after.in_words()}", title_justify="left")
    for heading in ("operation", "ended", "bytes", "each", "of the time"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for each in activities(before, after, span_s):
        table.add_row(
            each.name,
            rate(each.per_s),
            bandwidth(each.bytes_per_s),
            duration(each.each_s),
            percent(each.share),
        )
    out = io.StringIO()
    Console(file=out, width=100, highlight=False).print(table)
    return out.getvalue()
