"""How the elements of a cut array of one dimension are divided anew among the ranks, by value.

[Note: division] The elements of sorted parts are in one order: by value, equal ones by part, and
within a part as they are there. So every boundary is between two elements, and an array of few
different values is divided as evenly as any other. To find a boundary every rank tells a few
elements of its part at equal distances, and all see between which two of them it is; then a few of
those between, until none is left. Then each part goes to where it belongs in one exchange. Ranks
of a node need not tell anything: they look into large parts of the others, and read what they need.

Where it need not be exact, every rank tells a sample of its part, in any order, and all choose the
same values, near the boundaries that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.exchanges import exchange
from hpcdist.comm.lending import lent
from hpcdist.comm.memory import empty
from hpcdist.mesh.agreement import key_of
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.room import SHARED_FROM
from hpcdist.mesh.rules.basis import line_of, of_all_parts, part_number, shapes_of
from hpcdist.transport.call.call import Give, Read

SAMPLES = 512
"""How many elements of its part a rank tells."""


def told(part: NumpyArray, layout: Layout) -> NumpyArray:
    """Return what all parts tell: arrays of one dimension and length, one in a row."""
    rows: NumpyArray = of_all_parts(np.ascontiguousarray(part).view(np.uint8), layout, 0)
    return rows.view(part.dtype)


def near(part: NumpyArray, layout: Layout, places: NumpyArray, lengths: NumpyArray) -> NumpyArray:
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


def boundaries(
    read: Callable[[NumpyArray], NumpyArray], lengths: NumpyArray, places: NumpyArray, count: int
) -> NumpyArray:
    """Return where each sorted part is cut, so that the first parts of all have `places` elements.

    See [Note: division].

    Args:
        read: returns the elements at places of the parts, of shape (parts, boundaries, count).
        lengths: of all parts.
        places: where the boundaries shall be in the whole, ascending.
        count: how many elements of each part are looked at at a time, for each boundary.

    Returns:
        A row for each part.

    """
    low, high = np.zeros((len(lengths), len(places)), np.int64), lengths[:, None] + 0 * places
    low[:, places == lengths.sum()] = lengths[:, None]
    while (wanted := np.flatnonzero(low.sum(0) < places)).size:
        steps = _steps(low[:, wanted], high[:, wanted], count)
        values = read(steps)
        for number, boundary in enumerate(wanted):
            low[:, boundary], high[:, boundary] = _narrowed(
                values[:, number],
                steps[:, number],
                low[:, boundary],
                high[:, boundary],
                places[boundary],
            )
    return low


def _steps(low: NumpyArray, high: NumpyArray, count: int) -> NumpyArray:
    """Return `count` places from the first between `low` and `high` to the last; 0 where none."""
    last = (high - low - 1)[..., None]
    return np.where(last < 0, 0, low[..., None] + np.arange(count) * last // (count - 1))


def _at(part: NumpyArray, places: NumpyArray) -> NumpyArray:
    return part[places] if part.size else np.zeros(places.shape, part.dtype)


def _narrowed(
    values: NumpyArray, places: NumpyArray, low: NumpyArray, high: NumpyArray, wanted: int
) -> tuple[NumpyArray, NumpyArray]:
    """Return nearer bounds of where each part is cut.

    Args:
        values: some elements of each part (a row), ascending; of any value in a row of none.
        places: where these are in the part, from its lower bound to its upper one.
        low: how many elements of each part are known to be before the boundary.
        high: how many of each part are not known to be behind it.
        wanted: how many elements of all parts are before it.

    """
    filled = np.flatnonzero(low < high)
    values, places = values[filled], places[filled]
    order = np.argsort(values.reshape(-1), kind="stable")
    part, place = np.repeat(filled, values.shape[1])[order], places.reshape(-1)[order]
    # How many elements of its part are between each of these and the one before, or behind.
    before, behind = np.ones_like(places), np.ones_like(places)
    before[:, 1:] = behind[:, :-1] = places[:, 1:] - places[:, :-1]
    # How many elements of the whole are before each of them, at least and at most.
    least = low.sum() - 1 + np.cumsum(before.reshape(-1)[order])
    behind = behind.reshape(-1)[order]
    most = low.sum() + np.cumsum(behind) - behind
    # The last one that is surely not behind the boundary, and the first that is not before it.
    last, first = most.searchsorted(wanted, "right") - 1, least.searchsorted(wanted)
    low, high = low.copy(), high.copy()
    low[part[:last]] = place[:last] + 1  # of equal parts the last one counts
    low[part[last]] = place[last]
    high[part[:first:-1]] = place[:first:-1]
    high[part[first]] = place[first] + 1
    return low, high


def counts_told(part: NumpyArray, layout: Layout, places: NumpyArray) -> NumpyArray:
    """Return how many elements of each sorted part (a row) go to each, by what they tell.

    Args:
        part: what this rank has.
        layout: its parts.
        places: where the boundaries between the new parts shall be in the whole.

    """
    lengths, here = np.diff(layout.cuts[0]), part_number(layout, 0)
    count = max(FEWEST, TOLD // max(1, len(lengths) * len(places)))

    def read(steps: NumpyArray) -> NumpyArray:
        values = told(_at(part, steps[here]).reshape(-1), layout)
        return np.reshape(values, steps.shape)

    return np.diff(between(boundaries(read, lengths, places, count), lengths))


FEWEST = 32
"""How many elements a rank tells at least of those between which a boundary is."""
TOLD = 1 << 10
"""How many elements all ranks tell together, if that is more."""


def between(inner: NumpyArray, lengths: NumpyArray) -> NumpyArray:
    """Return boundaries, a row for each part, with the ends of the parts around them."""
    return np.hstack([np.zeros_like(lengths)[:, None], inner, lengths[:, None]])


def traded(part: NumpyArray, counts: NumpyArray, layout: Layout) -> NumpyArray:
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
    ranks, taken = line_of(layout, 0), _ends(counts[:, here])
    reads = tuple(
        Read(ranks[other], (int(row.sum()),), (_ends(row)[here],), (taken[other],), False)
        for other, row in enumerate(counts)
    )
    gives = tuple(
        Give(rank, (place,)) for rank, place in zip(ranks, _ends(counts[here]), strict=True)
    )
    words = f"divide {layout!r} anew"  # other counts along the other axes of the mesh
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


@contextmanager
def divided(part: NumpyArray, layout: Layout, places: NumpyArray) -> Iterator[list[NumpyArray]]:
    """Give, for a block, what of each sorted part goes to this rank's, where it lies if it can.

    Collective, as is its end; nobody may write to `part` in the block. Arguments as of
    `counts_told`.
    """
    mesh, lengths, here = layout.mesh, np.diff(layout.cuts[0]), part_number(layout, 0)
    if int(lengths.max()) * part.dtype.itemsize >= SHARED_FROM and mesh.group.one_node:
        words, shapes = f"divide {layout!r} anew", shapes_of(layout)
        with lent(part, shapes, key=key_of(words, mesh), words=words, group=mesh.group) as parts:
            if parts is not None:
                line = [parts[rank] for rank in line_of(layout, 0)]
                ends = np.array([0, *places, layout.shape[0]])[here : here + 2]
                cuts = boundaries(partial(_all_at, line), lengths, ends, LOOKED_AT)
                yield [each[lo:hi] for each, (lo, hi) in zip(line, cuts, strict=True)]
                return
    counts = counts_told(part, layout, places)
    received = traded(part, counts, layout)
    yield [received[run] for run in _ends(counts[:, here])]


LOOKED_AT = 256
"""How many elements a rank looks at, of each part of others that it sees."""


def _all_at(parts: Sequence[NumpyArray], steps: NumpyArray) -> NumpyArray:
    return np.stack([_at(part, places) for part, places in zip(parts, steps, strict=True)])


def memory(length: int, dtype: np.dtype) -> NumpyArray:
    """Return new memory: what is large lies where the ranks of the node read it in place."""
    large = length * dtype.itemsize >= SHARED_FROM
    return empty(length, dtype) if large else np.empty(length, dtype)


def _ends(counts: NumpyArray) -> list[slice]:
    stops = np.cumsum(counts).tolist()
    return [slice(stop - count, stop) for stop, count in zip(stops, counts.tolist(), strict=True)]
