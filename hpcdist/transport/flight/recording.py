"""`Recording`: what the file of one rank says, read at one moment; computed from its bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpcdist.named_tuple import NamedTuple
from hpcdist.text import read_short
from hpcdist.transport.flight import layout
from hpcdist.transport.flight.rings import about_of


class GroupKey(NamedTuple):
    """What tells groups apart; of all members the same.

    `epoch` counts the worlds that the process has been in, for the ids of groups begin anew with
    each; `name` and `ranks` tell apart groups that have no rank in common.
    """

    epoch: int
    id: int
    name: str
    ranks: tuple[int, ...]


class Record(NamedTuple):
    """One operation of one rank. Times are nanoseconds of the wall clock of its node."""

    number: int
    name: str
    group: GroupKey | None
    sequence: int
    """Its number in the group; 0 of what has none, such as messages."""
    nbytes: int
    peer: int | None
    """The world rank of the root, or at the other end of a message; None: any, or none."""
    site: str
    begin_ns: int
    end_ns: int
    """0 while it is under way."""
    failed: bool
    started: bool
    """Whether the caller went on while it was under way."""
    kind: int
    dtype: int
    digest: int
    """Of the shape; of a message its tag."""


class Waiting(NamedTuple):
    """What a thread of a rank waits for, once that is long."""

    words: str
    site: str
    since_ns: int


class Total(NamedTuple):
    """All operations of a kind that have ended on a rank."""

    ended: int
    nbytes: int
    busy_s: float


class End(NamedTuple):
    """The exception that has ended a rank; `dead` are the ranks of whose death it tells."""

    at_s: float
    why: str
    dead: tuple[int, ...]


class Recording(NamedTuple):
    """What one rank has done last.

    `rank` and `size` are what the launcher says until its world has begun; `latest` is the number
    of the last operation that it issued in each group; `records` are in the order of their
    begin.
    """

    pid: int
    born: int
    rank: int
    size: int
    about: dict[str, Any]
    records: Sequence[Record]
    waits: Sequence[Waiting]
    latest: dict[GroupKey, int]
    totals: dict[str, Total]

    @property
    def end(self) -> End | None:
        """How it has ended, if it could tell."""
        told = self.about.get("ended")
        return told and End(told["at"], told["why"], tuple(told["dead"]))


def read_recording(raw: bytes, offset_ns: int, newest: int = layout.CAPACITY) -> Recording:
    """Return what a ring says.

    Args:
        raw: its bytes, from `rings.read_ring`.
        offset_ns: what turns the monotonic clock of its node into the wall clock.
        newest: how many records are read.

    """
    header = layout.HEADER.unpack_from(raw)
    _, pid, born, rank, size, _, head, _, _, _, _, _, groups_at = header
    reader = _Reader(raw, offset_ns)
    first = max(1, head - newest + 1)
    found = [reader.record(number) for number in range(first, head + 1)]
    records = [each for each in found if each is not None]
    about = about_of(raw)
    waits = [wait for slot in range(layout.WAITS) for wait in reader.wait(slot)]
    if rank < 0:  # what the launcher says
        rank, size = about.get("rank", -1), about.get("size", -1)
    return Recording(
        pid, born, rank, size, about, records, waits, reader.latest(groups_at), reader.totals()
    )  # fmt: skip


class _Reader:
    """Reads parts of one ring; a part that is being written is left out."""

    def __init__(self, raw: bytes, offset_ns: int) -> None:
        self._raw, self._offset_ns = raw, offset_ns
        self._files: dict[int, str] = {}
        self._groups: dict[int, GroupKey | None] = {}

    def text(self, place: int, nbytes: int) -> bytes:
        start = layout.TEXT_AT + place
        return self._raw[start : start + nbytes]

    def record(self, number: int) -> Record | None:
        at = layout.RECORDS_AT + (number & (layout.CAPACITY - 1)) * layout.RECORD.size
        (
            found, begin, end, nbytes, file, line, sequence, place, peer, digest, kind, dtype,
            state, flags, _,
        ) = layout.RECORD.unpack_from(self._raw, at)  # fmt: skip
        if found != number:
            return None
        group = self.group(place)
        members = group.ranks if group is not None else ()
        return Record(
            number,
            layout.NAMES.get(kind, f"operation {kind}"),
            group,
            sequence,
            nbytes,
            members[peer] if kind in layout.WITH_PEER and 0 <= peer < len(members) else None,
            f"{self._file(file)}:{line}" if file else "an unknown line",
            begin + self._offset_ns,
            end + self._offset_ns if state != layout.BEGUN else 0,
            state == layout.FAILED,
            bool(flags & layout.STARTED),
            kind,
            dtype,
            digest,
        )

    def _file(self, place: int) -> str:
        if place not in self._files:
            start = layout.TEXT_AT + place
            end = self._raw.index(b"\0", start)
            self._files[place] = self._raw[start:end].decode(errors="replace")
        return self._files[place]

    def group(self, place: int) -> GroupKey | None:
        if place not in self._groups:
            self._groups[place] = self._read_group(place)
        return self._groups[place]

    def _read_group(self, place: int) -> GroupKey | None:
        _, nbytes, _ = layout.GROUP.unpack_from(self._raw, layout.TEXT_AT + place)
        try:
            told = json.loads(self.text(place + layout.GROUP.size, nbytes))
        except ValueError:
            return None
        ranks = told["ranks"]
        members = read_short(ranks) if isinstance(ranks, str) else tuple(ranks)
        return GroupKey(told["epoch"], told["id"], told["name"], members)

    def latest(self, place: int) -> dict[GroupKey, int]:
        """Return the last number in each group, the newest of which is at `place`."""
        found: dict[GroupKey, int] = {}
        while place:
            number, _, before = layout.GROUP.unpack_from(self._raw, layout.TEXT_AT + place)
            group = self.group(place)
            if group is not None:
                found[group] = number
            place = before if before < place else 0
        return found

    def wait(self, slot: int) -> list[Waiting]:
        at = layout.WAITS_AT + slot * layout.WAIT_BYTES
        is_there, since, _, of_site, of_words = layout.WAIT.unpack_from(self._raw, at)
        if not is_there:
            return []
        start = at + layout.WAIT.size
        site = self._raw[start : start + of_site].decode(errors="replace")
        words = self._raw[start + of_site : start + of_site + of_words].decode(errors="replace")
        return [Waiting(words, site, since + self._offset_ns)]

    def totals(self) -> dict[str, Total]:
        found = {}
        for kind, name in layout.NAMES.items():
            at = layout.COUNTERS_AT + kind * layout.COUNTER.size
            count, nbytes, busy_ns = layout.COUNTER.unpack_from(self._raw, at)
            if count:
                found[name] = Total(count, nbytes, busy_ns / 1e9)
        return found
