"""One clock for the ranks of several nodes, from what they have done together.

Of an operation in which every rank waits for every other, none can end before the last one has
begun. So each that two nodes have done together bounds by how much their clocks differ, from both
sides; many of them leave little room. On one node all ranks read one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.recording import GroupKey, Record

_MEETINGS = frozenset(
    {Kind.BARRIER, Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALLTOALL, Kind.ALL_GATHER_OBJECT,
     Kind.ALL_TO_ALL_OBJECT}
)  # fmt: skip
"""Operations that end nowhere before they have begun everywhere."""


class Bounds(NamedTuple):
    """The bounds of the difference between two clocks, in nanoseconds."""

    least: float
    most: float

    @property
    def middle(self) -> int:
        """The best guess; 0 where nothing is known."""
        if self.least == -_ANY or self.most == _ANY:
            return 0
        return round((self.least + self.most) / 2)


_ANY = float("inf")


def ahead(one: Iterable[Record], other: Iterable[Record]) -> Bounds:
    """Return by how much the clock of `one` rank is ahead of that of the `other`."""
    theirs = _meetings(other)
    least, most = -_ANY, _ANY
    for key, mine in _meetings(one).items():
        if key in theirs:
            match = theirs[key]
            least = max(least, mine.begin_ns - match.end_ns)
            most = min(most, mine.end_ns - match.begin_ns)
    return Bounds(least, most)


def _meetings(records: Iterable[Record]) -> dict[tuple[GroupKey, int], Record]:
    return {
        (record.group, record.sequence): record
        for record in records
        if record.kind in _MEETINGS and record.sequence and record.end_ns and not record.failed
        if record.group is not None
    }


def corrections(
    records: Mapping[int, Sequence[Record]], hosts: Mapping[int, str]
) -> dict[str, int]:
    """Return what to take off the times of each node, to have those of the first rank's node.

    Args:
        records: of each rank.
        hosts: the node of each rank.

    """
    first = min(records)
    found = {hosts[first]: 0}
    for host in dict.fromkeys(hosts.values()):
        if host not in found:
            bounds = [
                ahead(records[rank], records[base])
                for rank in records
                if hosts[rank] == host
                for base in records
                if hosts[base] == hosts[first]
            ]
            least, most = max(each.least for each in bounds), min(each.most for each in bounds)
            found[host] = Bounds(least, most).middle
    return found
