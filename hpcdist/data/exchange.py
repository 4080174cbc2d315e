"""How rows change their ranks: a plan in plain numbers, and chunks of rows that follow it.

An `Arrangement` says where every sample belongs. Each rank cuts the rows that it holds into chunks,
partitions a chunk by the ranks it goes to, frees it, and sends; what it receives lands in its
final place, in the order of rounds and ranks. Which row is which sample is sent along as a number,
so rows are never sorted: the order of a rank is a list of indices.

Ranks of a node may keep their rows together. A row goes then to any rank of the node at which it
is wanted, a pair of ranks for each two nodes, and all ranks of the node find it there.

Read in this order: `Arrangement`, `sizes_of` and `Incoming` (pure), `Source`, `exchange_rows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_reduce, alltoall_single
from hpcdist.comm.group import Group
from hpcdist.data.columns import FIXED, Columns, Ragged, Schema
from hpcdist.data.layout import Extent, ragged_fields, row_nbytes
from hpcdist.data.order import Order
from hpcdist.data.shares import IndexArray, Shares
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import Work

CHUNK_NBYTES = 8 << 20
"""Bytes of rows that leave a rank at a time; twice as many are under way."""
_IN_FLIGHT = 2
_PLACES = 1 << 18
"""Places that are looked through at a time."""

Sizes = npt.NDArray[np.int64]
"""Of a chunk: for each peer the rows, and the values of each `Ragged` column."""


class Arrangement(NamedTuple):
    """Where samples belong: the sample at a position, and the rank that works on the position.

    `labels` tells which sample's value stands for a sample's; the natural order but for slots that
    are shuffled among the samples.
    """

    order: Order
    labels: Order
    shares: Shares

    @property
    def total(self) -> int:
        """How many samples there are."""
        return self.order.total

    def samples(self, places: IndexArray) -> IndexArray:
        """Return the samples at `places`; after the last place the order begins again."""
        return self.labels.samples(self.order.samples(places % max(self.total, 1)))

    def homes(self, samples: IndexArray) -> Homes:
        """Return where these samples go.

        Each sample has one home, whether it is worked on or not. One that is repeated so that the
        ranks have equally many has more.
        """
        start, stop, size = self.shares
        first = self.order.positions(self.labels.positions(samples))
        rows, places = [np.arange(len(samples))], [first]
        repeats = range(self.total, stop, max(self.total, 1))
        for begin in repeats:
            again = np.flatnonzero(first < stop - begin)
            rows.append(again)
            places.append(first[again] + begin)
        all_places = np.concatenate(places) if repeats else first
        ranks = (all_places - start) % size
        return Homes(np.concatenate(rows) if repeats else rows[0], all_places, ranks)

    def indices(self, places: IndexArray, rank: int) -> IndexArray:
        """Return in which order `rank` works on the rows that have come with `places`.

        All of its rows are among them, and maybe others.
        """
        start, stop, size = self.shares
        indices = np.empty(len(self.shares.positions(rank)), np.int64)
        for first in range(0, len(places), _PLACES):
            some = places[first : first + _PLACES]
            steps, ranks = np.divmod(some - start, size)
            own = np.flatnonzero((some >= start) & (some < stop) & (ranks == rank))
            indices[steps[own]] = own + first
        return indices


class Homes(NamedTuple):
    """Row ``rows[i]`` goes to rank ``ranks[i]``, as what stands at ``places[i]``."""

    rows: IndexArray
    places: IndexArray
    ranks: IndexArray


def sizes_of(columns: Columns, homes: Homes, ranks: int) -> Sizes:
    """Return how much of a chunk goes to each rank."""
    sizes = [np.bincount(homes.ranks, minlength=ranks)]
    for column in (columns[name] for name in columns.names):
        if isinstance(column, Ragged):
            lengths = column.lengths.take(homes.rows)
            sizes.append(np.bincount(homes.ranks, lengths, ranks))  # exact up to 2^53
    return np.stack(sizes, axis=1).astype(np.int64)


def partitioned(homes: Homes, ranks: int) -> Homes:
    """Sort the rows of a chunk by where they go; those that go to one rank keep their order."""
    small = homes.ranks.astype(np.uint16) if ranks <= 1 << 16 else homes.ranks
    by_rank = np.argsort(small, kind="stable")
    return Homes(*(each.take(by_rank) for each in homes))


class Incoming:
    """What comes to this rank: for each round and each peer the rows and values."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        """By round, peer, and number: rows first."""
        of_rounds = sizes.sum(axis=1)
        self._starts = np.zeros((len(sizes) + 1, sizes.shape[2]), np.int64)
        np.cumsum(of_rounds, axis=0, out=self._starts[1:])

    @property
    def extent(self) -> Extent:
        """All that comes."""
        rows, *counts = self._starts[-1].tolist()
        return Extent(rows, tuple(counts))

    def run(self, round_: int, which: int) -> tuple[int, int]:
        """Return from where to where what comes in a round goes: rows, or values of a column."""
        return int(self._starts[round_, which]), int(self._starts[round_ + 1, which])


# ---- chunks under way


class Source(ABC):
    """The rows that a rank holds, chunk by chunk."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of chunks."""

    @abstractmethod
    def chunk(self, index: int) -> tuple[Columns, IndexArray, IndexArray | None]:
        """Return rows and their samples; of which rows, if not of all."""

    @abstractmethod
    def forget(self, index: int) -> None:
        """Free the memory of a chunk."""


class Route(NamedTuple):
    """Where rows go: the arrangement, and for each rank who takes what this rank sends to it."""

    where: Arrangement
    receivers: IndexArray


def routed(source: Source, index: int, route: Route) -> tuple[Columns, Homes]:
    """Return a chunk of a source, and which ranks take its rows."""
    columns, samples, which = source.chunk(index)
    homes = route.where.homes(samples)
    homes = homes._replace(ranks=route.receivers.take(homes.ranks))
    if which is not None:
        homes = homes._replace(rows=which[homes.rows])
    return columns, homes


class Landing(NamedTuple):
    """Where what comes to a rank lands.

    Attributes:
        rows: those of all ranks of the node.
        places: theirs.
        at: how much the ranks before this one have of them.
        extent: how much this rank has.

    """

    rows: Columns
    places: IndexArray
    at: Extent
    extent: Extent

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        return slice(self.at.rows, self.at.rows + self.extent.rows)


def exchange_rows(
    source: Source,
    schema: Schema,
    route: Route,
    group: Group,
    land: Callable[[Extent], Landing],
) -> Landing:
    """Send all rows of `source` where they belong; return where lies what has come. Collective.

    Args:
        source: this rank's rows; it has none afterwards.
        schema: of the rows, the same on all ranks.
        route: where rows go.
        group: the ranks.
        land: makes room for what comes, of bytes that are zero. Collective.

    """
    outgoing = _sizes_to_send(source, schema, route, group)
    incoming = Incoming(_told(outgoing, group))
    landing = land(incoming.extent)
    runs = _runs_to_fill(landing)
    under_way: deque[Work] = deque()
    try:
        for round_ in range(len(incoming.sizes)):
            arrays = _packed(source, round_, schema, route)
            under_way += _send(arrays, outgoing[round_], runs, incoming, round_, group)
            _wait(under_way, (_IN_FLIGHT - 1) * len(runs))
        _wait(under_way, 0)
    except BaseException:  # which is raised for all of them
        for work in under_way:
            work.detach()
        raise
    for ends, before in _ends_of_rows(landing):
        np.cumsum(ends, out=ends)
        ends += before
    return landing


def _sizes_to_send(source: Source, schema: Schema, route: Route, group: Group) -> Sizes:
    """Return by round what this rank sends to each; every rank has as many rounds."""
    most = np.array([len(source)])
    all_reduce(most, ReduceOp.MAX, group)
    sizes = np.zeros((int(most[0]), group.nranks, 1 + len(ragged_fields(schema))), np.int64)
    for index in range(len(source)):
        sizes[index] = sizes_of(*routed(source, index, route), group.nranks)
    return sizes


def _told(outgoing: Sizes, group: Group) -> Sizes:
    """Exchange the sizes of all rounds; return by round what comes here from each rank."""
    sent = np.ascontiguousarray(outgoing.swapaxes(0, 1))
    received = np.empty_like(sent)
    if sent.size:
        alltoall_single(received, sent, group)
    return np.ascontiguousarray(received.swapaxes(0, 1))


class _Run(NamedTuple):
    """An array that is filled, in bytes; what is counted in `which` is `item` bytes long."""

    memory: NumpyArray
    which: int
    item: int


def _runs_to_fill(landing: Landing) -> list[_Run]:
    rows, own, which = landing.rows, landing.own, 0
    runs, ends = [_Run(_raw(landing.places[own]), 0, 8)], iter(_ends_of_rows(landing))
    for field in rows.schema():
        values = rows[field.name].values
        if field.kind == FIXED:
            runs.append(_Run(_raw(values[own]), 0, row_nbytes(field)))
            continue
        lengths, before = next(ends)  # lengths, until all are here
        count = landing.extent.counts[which]
        which += 1
        runs.append(_Run(_raw(lengths), 0, 8))
        runs.append(_Run(_raw(values[before : before + count]), which, row_nbytes(field)))
    return runs


def _ends_of_rows(landing: Landing) -> list[tuple[IndexArray, int]]:
    """Return for each `Ragged` column where this rank's rows end, and its values before them."""
    columns = [landing.rows[name] for name in landing.rows.names]
    ends = [each.offsets[1:][landing.own] for each in columns if isinstance(each, Ragged)]
    return list(zip(ends, landing.at.counts, strict=True))


def _packed(source: Source, index: int, schema: Schema, route: Route) -> list[NumpyArray]:
    """Return copies of the rows of a chunk and their places, partitioned, and free the chunk."""
    if index >= len(source):
        return [np.empty(0, np.uint8)] * (1 + len(schema) + len(ragged_fields(schema)))
    columns, homes = routed(source, index, route)
    homes = partitioned(homes, len(route.receivers))
    taken = columns.take(homes.rows)
    source.forget(index)
    return [_raw(each) for each in (homes.places, *taken.buffers())]


def _send(
    arrays: Sequence[NumpyArray],
    sizes: Sizes,
    runs: Sequence[_Run],
    incoming: Incoming,
    round_: int,
    group: Group,
) -> list[Work]:
    works = []
    for array, run in zip(arrays, runs, strict=True):
        start, stop = incoming.run(round_, run.which)
        works.append(
            alltoall_single(
                run.memory[start * run.item : stop * run.item],
                array,
                group,
                sync_op=False,
                in_split_sizes=(sizes[:, run.which] * run.item).tolist(),
                out_split_sizes=(incoming.sizes[round_, :, run.which] * run.item).tolist(),
            )
        )
    return works


def _wait(under_way: deque[Work], left: int) -> None:
    """Wait for the first of the operations under way, until so many are left."""
    while len(under_way) > left:
        under_way[0].wait()
        under_way.popleft()


def _raw(array: NumpyArray) -> NumpyArray:
    return array.reshape(-1).view(np.uint8)
