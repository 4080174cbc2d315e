"""How the elements of a cut array of one dimension are divided anew among the ranks, by value.

[Note: division] Every rank tells a sample of its part, and all choose the same values, near the
boundaries that are wanted. Of elements equal to such a value as many go before the boundary as
bring it to where it is wanted, those of the first parts first; so an array of few different values
is divided as evenly as any other, and equal elements stay in their order. Then each part goes to
where it belongs in one exchange.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.comm.exchanges import exchange
from hpcdist.comm.memory import empty
from hpcdist.mesh.agreement import key_of
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.rules.basis import of_all_parts, part_number
from hpcdist.transport.call import Give, Read

SAMPLES = 512
"""How many elements of its part a rank tells."""


def told(part: Any, layout: Layout) -> Any:
    """Return what all parts tell: arrays of one dimension and length, one in a row."""
    return of_all_parts(np.ascontiguousarray(part).view(np.uint8), layout, 0).view(part.dtype)


def near(part: Any, layout: Layout, places: Any, lengths: Any) -> Any:
    """Return values that are near these places of the sorted array, ascending.

    Args:
        part: what this rank has of it, in any order.
        layout: its parts.
        places: ascending.
        lengths: of all parts.

    """
    chosen = np.random.default_rng(0).integers(max(part.size, 1), size=SAMPLES)
    own = part[chosen] if part.size else np.zeros(SAMPLES, part.dtype)
    values = told(own, layout).reshape(-1)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.repeat(lengths / SAMPLES, SAMPLES)[order])
    return values[order[np.minimum(np.searchsorted(reached, places), values.size - 1)]]


def boundaries(below: Any, upto: Any, layout: Layout, places: Any, lengths: Any) -> Any:
    """Return where each part is cut; see [Note: division].

    Args:
        below: how many elements of this rank's part are less than each of the values chosen.
        upto: how many are less or equal.
        layout: the parts.
        places: where the boundaries between parts should be.
        lengths: of all parts.

    Returns:
        A row for each part, from 0 to its length.

    """
    lows, highs = np.split(told(np.concatenate([below, upto]).astype(np.int64), layout), 2, axis=1)
    equal = highs - lows
    wanted = np.clip(places, lows.sum(0), highs.sum(0)) - lows.sum(0)
    before = np.cumsum(equal, axis=0) - equal
    return between(lows + np.clip(wanted - before, 0, equal), lengths)


def between(inner: Any, lengths: Any) -> Any:
    """Return boundaries, a row for each part, with the ends of the parts around them."""
    return np.hstack([np.zeros_like(lengths)[:, None], inner, lengths[:, None]])


def traded(part: Any, counts: Any, layout: Layout) -> Any:
    """Return what all parts send to this rank's, one after the other.

    Args:
        part: what this rank sends: to the first part, to the second, and so on.
        counts: how many elements each part (a row) sends to each.
        layout: the parts; ranks that have the same send among those that differ from them as they
            themselves do.

    """
    mesh, here = layout.mesh, part_number(layout, 0)
    received = memory(int(counts[:, here].sum()), part.dtype)
    if mesh.coordinate is None:
        return received
    ranks, taken = _line(layout), _ends(counts[:, here])
    reads = tuple(
        Read(ranks[other], (int(row.sum()),), (_ends(row)[here],), (taken[other],), False)
        for other, row in enumerate(counts)
    )
    gives = tuple(
        Give(rank, (place,)) for rank, place in zip(ranks, _ends(counts[here]), strict=True)
    )
    words = f"divide {layout!r} anew: {counts.tolist() if counts.size <= 64 else counts.shape}"
    exchange(
        np.ascontiguousarray(part),
        received,
        reads,
        gives,
        rule_op=None,
        key=key_of(words, mesh),
        words=words,
        group=mesh.group,
    )
    return received


def memory(length: int, dtype: Any) -> Any:
    """Return new memory: what is large lies where the ranks of the node read it in place."""
    large = length * dtype.itemsize >= 1 << 18
    return empty(length, dtype) if large else np.empty(length, dtype)


def _ends(counts: Any) -> list[slice]:
    stops = np.cumsum(counts).tolist()
    return [slice(stop - count, stop) for stop, count in zip(stops, counts.tolist(), strict=True)]


def _line(layout: Layout) -> list[int]:
    """Return which ranks of the mesh's group have the parts that go with this rank's."""
    mesh, axes = layout.mesh, layout.axes[0]
    here, ranks = mesh.coordinate, sorted(mesh.process_ids)
    line = []
    for digits in np.ndindex(*[mesh.shape[axis] for axis in axes]):
        place = list(here or ())
        for axis, digit in zip(axes, digits, strict=True):
            place[axis] = digit
        line.append(ranks.index(mesh.rank_at(tuple(place))))
    return line
