"""What `hpcdist dump` writes: all records as JSON, and a timeline in Chrome's trace format.

Reference: "Trace Event Format", which chrome://tracing and https://ui.perfetto.dev read.
"""

from __future__ import annotations

import time
from typing import Any

from hpcdist.diagnostics.flight.clocks import corrections
from hpcdist.diagnostics.flight.jobs import Job, explained
from hpcdist.text import in_short
from hpcdist.transport.flight.analysis import doing
from hpcdist.transport.flight.recording import GroupKey, Record


def as_json(job: Job) -> dict[str, Any]:
    """Return all that was read of a job, with times in seconds of the first rank's node."""
    off, found, now_ns = _corrections(job), explained(job), time.time_ns()
    return {
        "job": job.name,
        "slurm": job.slurm,
        "size": job.size,
        "verdict": list(found.verdict),
        "causes": list(found.causes),
        "ranks": [
            {
                "rank": subject.rank,
                "pid": subject.recording.pid,
                "host": subject.recording.about.get("host", ""),
                "condition": subject.condition,
                "does": doing(found.stands[subject.rank], now_ns),
                "records": [
                    _as_row(record, off[subject.rank]) for record in subject.recording.records
                ],
            }
            for subject in job.subjects
        ],
    }


def _corrections(job: Job) -> dict[int, int]:
    """Return what to take off the times of each rank."""
    records = {each.rank: each.recording.records for each in job.subjects}
    hosts = {each.rank: str(each.recording.about.get("host", "")) for each in job.subjects}
    by_host = corrections(records, hosts)
    return {rank: by_host[host] for rank, host in hosts.items()}


def _as_row(record: Record, off_ns: int) -> dict[str, Any]:
    return {
        "operation": record.name,
        "sequence": record.sequence or None,
        "group": _group(record.group),
        "nbytes": record.nbytes,
        "peer": record.peer,
        "call_site": record.site,
        "begin_s": (record.begin_ns - off_ns) / 1e9,
        "end_s": (record.end_ns - off_ns) / 1e9 if record.end_ns else None,
        "failed": record.failed,
        "asynchronous": record.started,
    }


def _group(group: GroupKey | None) -> dict[str, Any] | None:
    if group is None:
        return None
    return {"id": group.id, "name": group.name, "ranks": in_short(group.ranks)}


def as_trace(job: Job) -> dict[str, Any]:
    """Return a timeline with a row for each rank, and one below for what ran beside it.

    What is under way reaches to now.
    """
    off, events = _corrections(job), []
    now_ns = time.time_ns()
    for subject in job.subjects:
        rank, host = subject.rank, subject.recording.about.get("host", "")
        events += _names(rank, f"rank {rank} on {host}, {subject.condition}")
        events += [_event(rank, record, off[rank], now_ns) for record in subject.recording.records]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": job.name}}


def _names(rank: int, words: str) -> list[dict[str, Any]]:
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": words}),
        ("process_sort_index", 0, {"sort_index": rank}),
        ("thread_name", 0, {"name": "calls"}),
        ("thread_name", 1, {"name": "asynchronous"}),
    ]
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": lane, "args": args}
        for name, lane, args in named
    ]


def _event(rank: int, record: Record, off_ns: int, now_ns: int) -> dict[str, Any]:
    state = "failed" if record.failed else "ended" if record.end_ns else "under way"
    end_ns = record.end_ns or now_ns
    return {
        "ph": "X",
        "name": record.name,
        "cat": state,
        "pid": rank,
        "tid": int(record.started),
        "ts": (record.begin_ns - off_ns) / 1e3,
        "dur": max(0, end_ns - record.begin_ns) / 1e3,
        "args": {
            "state": state,
            "sequence": record.sequence,
            "group": _group(record.group),
            "nbytes": record.nbytes,
            "peer": record.peer,
            "call_site": record.site,
        },
    }
