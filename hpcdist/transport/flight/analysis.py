"""Who waits for whom: `stand_of` one rank, `explain` all of them; computed from their recordings.

A rank that is in an operation waits for the members of its group that have not come to it; in a
receive, a send or a call of a function, for its peer. Those that somebody waits for and that wait
for nobody are the cause, or ranks that wait for each other in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hpcdist.named_tuple import NamedTuple
from hpcdist.text import in_short
from hpcdist.transport.flight import layout
from hpcdist.transport.flight.recording import GroupKey, Record, Recording, Waiting


class Subject(NamedTuple):
    """A rank, what it has recorded, and how its process is: "running", "stopped" or "dead"."""

    recording: Recording
    condition: str

    @property
    def rank(self) -> int:
        """Its world rank; -1 before its world has begun."""
        return self.recording.rank


class Stand(NamedTuple):
    """What one rank does at a moment."""

    subject: Subject
    inside: Record | None
    """The operation that it is in, or whose end it waits for; None: it is outside."""
    wait: Waiting | None
    under_way: Sequence[Record]
    """Operations that it has started and not waited for."""
    last: Record | None
    """The last operation that it began."""

    @property
    def rank(self) -> int:
        """Its world rank."""
        return self.subject.rank


def stand_of(subject: Subject) -> Stand:
    """Return what a rank does, from what it has recorded."""
    records, waits = subject.recording.records, subject.recording.waits
    is_open = [record for record in records if not record.end_ns]
    blocking = [record for record in is_open if not record.started]
    started = [record for record in is_open if record.started]
    wait = min(waits, key=lambda each: each.since_ns) if waits else None
    inside = blocking[0] if blocking else _waited_for(started, wait)
    last = records[-1] if records else None
    return Stand(subject, inside, wait, [each for each in started if each is not inside], last)


def _waited_for(started: Sequence[Record], wait: Waiting | None) -> Record | None:
    """Return which of the operations under way a long wait is for: the first of its name."""
    if wait is None or not started:
        return None
    named = [record for record in started if wait.words.startswith(record.name)]
    return (named or started)[0]


class Need(NamedTuple):
    """An operation of a rank that cannot end before each of `ranks` has acted."""

    rank: int
    record: Record
    ranks: tuple[int, ...]


def needs_of(stand: Stand, stands: Mapping[int, Stand]) -> list[Need]:
    """Return what the operations of a rank that are under way wait for."""
    under_way = [*stand.under_way]
    if stand.inside is not None:
        under_way.insert(0, stand.inside)
    found = [Need(stand.rank, record, _awaited(stand.rank, record, stands)) for record in under_way]
    return [need for need in found if need.ranks]


def _awaited(rank: int, record: Record, stands: Mapping[int, Stand]) -> tuple[int, ...]:
    group = record.group
    if group is None:
        return ()
    if record.kind in _TO_PEER:
        return () if record.peer is None or record.peer == rank else (record.peer,)
    return tuple(
        member
        for member in group.ranks
        if member != rank and not _has_come(stands.get(member), record, group)
    )


def _has_come(stand: Stand | None, record: Record, group: GroupKey) -> bool:
    """Return whether a rank has begun the operation `record` of its group; False if unknown."""
    if stand is None:
        return False
    recording = stand.subject.recording
    if record.sequence:
        return recording.latest.get(group, 0) >= record.sequence
    return any(
        each.group == group and each.kind == record.kind and not each.end_ns
        for each in recording.records
    )


_TO_PEER = layout.SENDS | layout.RECEIVES | {layout.RPC}


class Explanation(NamedTuple):
    """What the ranks of a job do, and why they do not go on.

    `lines` has one for each rank; `verdict` what follows from them, empty if nobody waits; `causes`
    the ranks that have to act first.
    """

    lines: Sequence[str]
    verdict: Sequence[str]
    causes: Sequence[int]
    stands: Mapping[int, Stand]


def explain(
    subjects: Iterable[Subject], size: int, now_ns: int, here: Sequence[int]
) -> Explanation:
    """Return what the ranks of a job do, and who waits for whom.

    Args:
        subjects: the ranks that have a recording.
        size: how many ranks the job has; -1 if that is not known.
        now_ns: the wall clock.
        here: the ranks whose nodes were looked at; those among them that have no recording have
            ended.

    """
    stands = {stand.rank: stand for stand in map(stand_of, subjects)}
    needs = [need for stand in stands.values() for need in needs_of(stand, stands)]
    ranks = sorted({*stands, *range(max(size, 0))})
    lines = [f"rank {_name(rank)}: {_line(rank, stands, now_ns, here)}" for rank in ranks]
    first = _first_dead(needs, stands)
    causes = _causes(needs, stands) if first is None else [first.rank]
    verdict = [] if first is None else [f"rank {first.rank} died first{first.why}"]
    verdict += [*_differences(stands), *_waits(needs, stands), *_circle(needs, stands, causes)]
    verdict += [f"rank {rank} {_cause(rank, stands, now_ns, here)}" for rank in causes]
    return Explanation(lines, verdict or _stuck_together(stands), causes, stands)


def _name(rank: int) -> str:
    return str(rank) if rank >= 0 else "?"


# ---- a line for each rank


def _line(rank: int, stands: Mapping[int, Stand], now_ns: int, here: Sequence[int]) -> str:
    stand = stands.get(rank)
    if stand is None:
        return "has ended" if rank in here else "is on a node that was not looked at"
    state = {"running": "", "stopped": "stopped by a signal, ", "dead": "dead, "}
    end = stand.subject.recording.end
    of = f"of {end.why}, " if end is not None and stand.subject.condition == "dead" else ""
    return state[stand.subject.condition] + of + doing(stand, now_ns)


def doing(stand: Stand, now_ns: int) -> str:
    """Return what a rank does, in words."""
    if stand.inside is not None:
        return (
            f"in {describe_record(stand.inside)} {_since(stand.inside.begin_ns, now_ns)}"
            + _waited_at(stand.inside, stand.wait)
        )
    if stand.wait is not None:
        since = _since(stand.wait.since_ns, now_ns)
        return f"waits in {stand.wait.words} {since}, at {stand.wait.site}"
    if stand.last is None:
        return "outside of hpcdist, and has called nothing yet"
    last = stand.last
    since = _since(last.end_ns or last.begin_ns, now_ns)
    also = "" if not stand.under_way else f"; under way: {describe_record(stand.under_way[0])}"
    return f"outside of hpcdist {since}; its last call was {describe_record(last)}{also}"


def describe_record(record: Record) -> str:
    """Describe an operation: its name, number, size, group, peer and line."""
    number = f" #{record.sequence}" if record.sequence else ""
    parts = [f"{record.nbytes} B"] if record.nbytes else []
    if record.peer is not None:
        parts.append(_PREPOSITION.get(record.kind, "root") + f" rank {record.peer}")
    if record.kind in layout.SENDS | layout.RECEIVES:
        parts.append(f"tag {record.digest}")
    group = record.group
    if group is not None and record.kind not in (layout.RPC, layout.INIT):
        parts.append(f"ranks {in_short(group.ranks)}" if group.id < 0 else f"group {group.id}")
    inner = f" ({', '.join(parts)})" if parts else ""
    return f"{record.name}{number}{inner} at {record.site}"


_PREPOSITION = (
    dict.fromkeys(layout.SENDS, "to") | dict.fromkeys(layout.RECEIVES, "from") | {layout.RPC: "on"}
)


def _waited_at(record: Record, wait: Waiting | None) -> str:
    return "" if wait is None or wait.site == record.site else f", waited for at {wait.site}"


def _since(then_ns: int, now_ns: int) -> str:
    return f"for {max(0, now_ns - then_ns) / 1e9:.1f} s"


# ---- what follows


def _waits(needs: Sequence[Need], stands: Mapping[int, Stand]) -> list[str]:
    """Return a sentence for each operation that ranks wait in."""
    by_operation: dict[tuple[object, ...], list[Need]] = {}
    for need in needs:
        key = need.record.group, need.record.sequence, need.record.kind, need.ranks
        by_operation.setdefault(key, []).append(need)
    return [_sentence(alike, stands) for alike in by_operation.values()]


def _sentence(needs: Sequence[Need], stands: Mapping[int, Stand]) -> str:
    record, awaited = needs[0].record, needs[0].ranks
    waiting = [need.rank for need in needs]
    who = f"{_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for {_ranks(awaited)}"
    have = "have" if len(awaited) > 1 else "has"
    if record.kind in layout.RECEIVES:
        others = _instead(needs[0], stands)
        return f"{who}, whose message {describe_record(record)} is to take{others}"
    if record.kind in layout.SENDS:
        return f"{who}, which {have} not taken what {describe_record(record)} sends"
    if record.kind == layout.RPC:
        return f"{who}, which {have} not answered {describe_record(record)}"
    return f"{who}, which {have} not come to {describe_record(record)}"


_SHOWN = 3


def _instead(need: Need, stands: Mapping[int, Stand]) -> str:
    """Return what the sender has sent to a rank that waits for another message, and it not taken.

    As far as is recorded: messages match by tag, dtype and kind, in the order of their sending.
    """
    peer, record = need.record.peer, need.record
    if peer is None or peer not in stands or need.rank not in stands:
        return ""
    theirs, own = (stands[rank].subject.recording.records for rank in (peer, need.rank))
    since = own[0].begin_ns if own[0].number > 1 else 0  # of what was before, the records are gone
    taken = Counter(
        (layout.SENT_FOR[each.kind], each.dtype, each.digest)
        for each in own
        if each.kind in layout.RECEIVES
        and each.group == record.group
        and each.peer in (peer, None)
        and each.end_ns
        and not each.failed
    )
    waiting = []
    for each in theirs:
        if each.kind not in layout.SENDS or each.group != record.group or each.peer != need.rank:
            continue
        key = each.kind, each.dtype, each.digest
        if taken[key]:
            taken[key] -= 1
        elif each.begin_ns >= since and not each.failed:
            waiting.append(describe_record(each))
    if not waiting:
        return ""
    more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
    return f"; it has sent, and rank {need.rank} not taken, {', '.join(waiting[:_SHOWN])}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {_name(ranks[0])}"
    return f"ranks {in_short(ranks)}"


def _causes(needs: Sequence[Need], stands: Mapping[int, Stand]) -> list[int]:
    """Return the ranks that have to act first: those that wait for none, or are in a circle."""
    awaits: dict[int, set[int]] = {}
    for need in needs:
        stand = stands[need.rank]
        if need.record is stand.inside:
            awaits.setdefault(need.rank, set()).update(need.ranks)
    awaited = {rank for need in needs for rank in need.ranks}
    free = sorted(rank for rank in awaited if not awaits.get(rank) or _is_gone(stands.get(rank)))
    return free or sorted(rank for rank in awaited if _comes_back(rank, awaits))


class _FirstDead(NamedTuple):
    """Which rank of a job has died first, and how that is known."""

    rank: int
    why: str


def _first_dead(needs: Sequence[Need], stands: Mapping[int, Stand]) -> _FirstDead | None:
    """Return which of several dead ranks was the first, if anything tells."""
    dead = {rank: each for rank, each in stands.items() if each.subject.condition == "dead"}
    if len(dead) < 2:
        return None
    ends = {rank: each.subject.recording.end for rank, each in dead.items()}
    told = sorted((end.at_s, rank, end) for rank, end in ends.items() if end is not None)
    for _, rank, end in told:
        named = [each for each in end.dead if each in dead]
        if named:
            own = ends[named[0]]
            why = f": rank {rank} heard of it" if own is None else f", of {own.why}"
            return _FirstDead(named[0], why)
    if told:
        _, rank, end = told[0]
        return _FirstDead(rank, f", of {end.why}")
    waiting = {need.rank for need in needs if need.record is stands[need.rank].inside}
    awaited = {each for need in needs if need.rank in dead for each in need.ranks}
    idle = awaited - waiting
    if len(idle) == 1 and idle <= dead.keys():
        return _FirstDead(min(idle), ", most likely: others were waiting for it")
    return None


def _is_gone(stand: Stand | None) -> bool:
    return stand is None or stand.subject.condition != "running"


def _comes_back(rank: int, awaits: Mapping[int, set[int]]) -> bool:
    """Return whether a rank waits for itself, by way of others."""
    seen: set[int] = set()
    ahead = set(awaits.get(rank, ()))
    while ahead:
        if rank in ahead:
            return True
        seen |= ahead
        ahead = {after for each in ahead for after in awaits.get(each, ())} - seen
    return False


def _circle(needs: Sequence[Need], stands: Mapping[int, Stand], causes: Sequence[int]) -> list[str]:
    waiting = {need.rank for need in needs if need.record is stands[need.rank].inside}
    if len(causes) < 2 or not all(rank in waiting for rank in causes):
        return []
    if any(_is_gone(stands.get(rank)) for rank in causes):
        return []
    return [f"{_ranks(causes)} wait for each other in a circle: none of them will go on"]


def _cause(rank: int, stands: Mapping[int, Stand], now_ns: int, here: Sequence[int]) -> str:
    line = _line(rank, stands, now_ns, here)
    return line if rank not in stands else f"is {line}" if not line.startswith("waits") else line


def _differences(stands: Mapping[int, Stand]) -> list[str]:
    """Return where ranks are in different operations of the same number in a group."""
    calls: dict[tuple[GroupKey, int], dict[int, Record]] = {}
    for stand in stands.values():
        record = stand.inside
        if record is not None and record.sequence and record.group is not None:
            calls.setdefault((record.group, record.sequence), {})[stand.rank] = record
    return [
        "the ranks are in different operations of the same number: "
        + "; ".join(f"rank {rank} in {describe_record(record)}" for rank, record in found.items())
        for found in calls.values()
        if len({record.kind for record in found.values()}) > 1
    ]


def _stuck_together(stands: Mapping[int, Stand]) -> list[str]:
    """Return what there is to say where ranks are in an operation to which all have come."""
    inside = [stand for stand in stands.values() if stand.inside is not None]
    if len(inside) < 2 or any(stand.wait is None for stand in inside):
        return []
    return [
        f"{_ranks([stand.rank for stand in inside])} are in operations to which all have come: "
        "data are under way, or MPI or the network does not go on"
    ]
