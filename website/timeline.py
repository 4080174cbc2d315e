"""The timeline of a job that hangs, as `hpcdist dump` writes it; what it says is `hpcdist ps`'s."""

from __future__ import annotations

import textwrap

from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight import layout
from hpcdist.transport.flight.analysis import Subject, explain
from hpcdist.transport.flight.recording import GroupKey, Record, Recording
from website.svg import INK, PAPER, QUIET, RANKS, Picture

_WORLD = GroupKey(1, 0, "world", (0, 1, 2, 3))
_S = 10**9
_NOW_S = 8.0
_REDUCE, _BROADCAST = (Kind.ALL_REDUCE, "hang.py:7"), (Kind.BROADCAST, "hang.py:11")
_BEGINS_S = (0.1, 0.2, 0.02, 0.15)
"""When each rank comes to the first operation."""
_STEPS_S = (0.0, 1.1, 2.2)
_LATE = 2


def hanging() -> Picture:
    """Draw four ranks, one of which does not come to the last operation."""
    subjects = [_subject(rank) for rank in range(4)]
    found = explain(subjects, 4, int(_NOW_S * _S), range(4))
    picture = Picture(720, 292, "The timeline of a job that hangs: three ranks wait for the fourth")
    for subject in subjects:
        _row(picture, subject)
    picture.arrow(84, 204, 700, 204)
    picture.text(392, 218, "time", 11, fill=QUIET)
    lines = [part for line in found.verdict for part in textwrap.wrap(f"=> {line}", 92)]
    for number, line in enumerate(lines):
        picture.text(16, 236 + number * 15, line, 11, anchor="start", mono=True)
    return picture


def _row(picture: Picture, subject: Subject) -> None:
    top = 20 + subject.rank * 46
    picture.text(16, top + 15, f"rank {subject.rank}", 12, anchor="start")
    for record in subject.recording.records:
        left, right = _at(record.begin_ns), _at(record.end_ns or int(_NOW_S * _S))
        is_open = not record.end_ns
        picture.box(
            left,
            top,
            right - left,
            30,
            fill="#fee2e2" if is_open else RANKS[subject.rank],
            stroke="#b91c1c" if is_open else "none",
            dashed=is_open,
        )
        words = f"{record.name} #{record.sequence} at {record.site}" if is_open else record.name
        fill = INK if is_open else PAPER
        picture.text((left + right) / 2, top + 15, words, 10, fill=fill)
    if subject.rank == _LATE:
        outside = _at(subject.recording.records[-1].end_ns)
        picture.text((outside + _at(int(_NOW_S * _S))) / 2, top + 15, "outside", 12, fill=QUIET)


def _at(time_ns: int) -> float:
    return 84 + time_ns / _S * 76


def _subject(rank: int) -> Subject:
    """Return what a rank has recorded: three operations, and one more but on the late rank."""
    records = [_record(rank, number, *_REDUCE) for number in (1, 2, 3)]
    if rank != _LATE:
        records.append(_record(rank, 4, *_BROADCAST))
    latest = {_WORLD: records[-1].sequence}
    return Subject(Recording(100 + rank, 1, rank, 4, {}, records, [], latest, {}), "running")


def _record(rank: int, number: int, kind: Kind, site: str) -> Record:
    is_last = kind is _BROADCAST[0]
    steps = (*_STEPS_S, 3.3)
    begin_s = steps[number - 1] + _BEGINS_S[(rank + number) % 4]
    end_s = 0.0 if is_last else steps[number - 1] + 0.95
    peer = 0 if is_last else None
    return Record(
        number, layout.NAMES[kind], _WORLD, number, 4000, peer, site, round(begin_s * _S),
        round(end_s * _S), False, False, kind, 0, 0,
    )  # fmt: skip
