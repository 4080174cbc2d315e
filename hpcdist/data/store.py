"""`Store`: the rows of a dataset, spread over ranks, and those that are this rank's in an epoch.

`Whole` is for ranks of one node: the rows lie once in memory that they share, in the order of the
files, and an order of samples is one of rows: to arrange them moves nothing. `Parts` is for ranks
of several nodes: each node has some of the rows, which its ranks share, and `exchange` brings it
others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

import numpy as np

from hpcdist.comm.collectives import barrier
from hpcdist.comm.together import Together
from hpcdist.data.arrow import give_back_unused
from hpcdist.data.columns import Column, Columns, Schema, same_schema
from hpcdist.data.exchange import (
    CHUNK_NBYTES,
    Arrangement,
    Landing,
    Route,
    Source,
    exchange_rows,
)
from hpcdist.data.layout import (
    Extent,
    cut,
    extent_of,
    laid,
    nbytes_of,
    nothing,
    pour,
    runs_of,
    summed,
)
from hpcdist.data.nodes import Nodes
from hpcdist.data.order import Natural, Order
from hpcdist.data.shares import IndexArray, Shares
from hpcdist.data.spill import give_back, node_memory, private_memory
from hpcdist.named_tuple import NamedTuple

_LARGE_NBYTES = 1 << 20
"""Compact rows of this size and more stay in the memory that they came in."""
_AHEAD = 1 << 13
"""Rows whose places are computed at a time."""


# ---- what has been read


@final
class Hoard:
    """Rows as they come from a reader, in parts that are freed one by one.

    Args:
        kept: bytes that stay in memory; what is more goes to `folder`.
        folder: None for memory alone.
        compact: what comes keeps no more memory than its rows take, so large ones are not copied.

    """

    def __init__(self, kept: int = 0, folder: str | None = None, compact: bool = False) -> None:
        self._kept, self._folder, self._compact = kept, folder, compact
        self._waiting: list[Columns] = []
        self._waiting_nbytes = 0
        self._parts: list[Columns] = []
        self._nbytes = 0

    def add(self, rows: Columns) -> None:
        """Take rows of the same columns as those before."""
        if self._compact and rows.nbytes >= _LARGE_NBYTES and not self._is_full(rows.nbytes):
            self._lay()
            self._parts.append(rows)
            self._nbytes += rows.nbytes
        elif len(rows):
            self._waiting.append(rows)
            self._waiting_nbytes += rows.nbytes
            if self._waiting_nbytes >= CHUNK_NBYTES:
                self._lay()

    def parts(self) -> list[Columns]:
        """Return all rows, in the order in which they came."""
        self._lay()
        return self._parts

    def _lay(self) -> None:
        if not self._waiting:
            return
        schema = same_schema([rows.schema() for rows in self._waiting])
        extent = summed(schema, list(map(extent_of, self._waiting)))
        nbytes = nbytes_of(schema, extent)
        full = self._is_full(nbytes)
        self._nbytes += nbytes
        together = laid(private_memory(nbytes, self._folder if full else None), schema, extent)
        at = nothing(schema)
        for rows in self._waiting:
            at = pour(rows, together, at)
        self._parts.append(together)
        self._waiting, self._waiting_nbytes = [], 0

    def _is_full(self, nbytes: int) -> bool:
        return self._folder is not None and self._nbytes + nbytes > self._kept


@final
class Loaded(Source):
    """Rows as they were read: sample `first` and those that follow.

    `parts` is empty afterwards, so that each part is freed as soon as all of it is forgotten.
    """

    def __init__(self, parts: list[Columns], first: int) -> None:
        self._chunks: list[tuple[Columns, int] | None] = []
        for rows in parts:
            for start, stop in cut(rows, CHUNK_NBYTES):
                self._chunks.append((rows.slice(start, stop), first + start))
            first += len(rows)
        parts.clear()

    def __len__(self) -> int:
        return len(self._chunks)

    def chunk(self, index: int) -> tuple[Columns, IndexArray, IndexArray | None]:
        """See `Source`."""
        chunk = self._chunks[index]
        assert chunk is not None, "it was forgotten"
        rows, first = chunk
        return rows, np.arange(first, first + len(rows)), None

    def forget(self, index: int) -> None:
        """See `Source`."""
        self._chunks[index] = None
        give_back_unused()

    def select(self, names: Sequence[str]) -> Loaded:
        """Return the same rows with these columns only."""
        found = Loaded([], 0)
        found._chunks = [each and (each[0].select(names), each[1]) for each in self._chunks]
        return found


@final
class Arranged(Source):
    """Rows that came with `places`, as `where` says."""

    def __init__(self, rows: Columns, places: IndexArray, where: Arrangement) -> None:
        self.rows, self.places, self.where = rows, places, where
        self._chunks = cut(rows, CHUNK_NBYTES)

    def __len__(self) -> int:
        return len(self._chunks)

    def chunk(self, index: int) -> tuple[Columns, IndexArray, IndexArray | None]:
        """See `Source`; rows that are repeated are left behind."""
        start, stop = self._chunks[index]
        places = self.places[start:stop]
        which = np.flatnonzero(places < self.where.total)
        return self.rows.slice(start, stop), self.where.samples(places[which]), which

    def forget(self, index: int) -> None:
        """See `Source`."""
        give_back(runs_of(self.rows, *self._chunks[index]))

    def select(self, names: Sequence[str]) -> Arranged:
        """Return the same rows with these columns only."""
        return Arranged(self.rows.select(names), self.places, self.where)


# ---- where they are then


class Store(ABC):
    """The rows of a dataset. All ranks call its methods in the same order."""

    @abstractmethod
    def arrange(self, order: Order, shares: Shares, labels: Mapping[str, Order]) -> None:
        """Make the rows of this rank's share those of `order`. Collective.

        Args:
            order: of the samples.
            shares: which positions are whose.
            labels: columns whose values are shuffled among the samples, and how.

        """

    @abstractmethod
    def batch(self, first: int, stop: int) -> Columns:
        """Return rows `first` to `stop` of this rank's share, as copies. Local."""


@final
class Whole(Store):
    """All rows, in the order of the files, where all ranks see them."""

    def __init__(self, rows: Columns, rank: int) -> None:
        self._rows, self._rank = rows, rank
        natural = Natural(len(rows))
        self._by_label: list[tuple[Order, Columns]] = [(natural, rows)]
        self._where = Arrangement(natural, natural, Shares(0, len(rows), 1))
        self._ahead: tuple[int, IndexArray] = (0, np.empty(0, np.int64))

    def arrange(self, order: Order, shares: Shares, labels: Mapping[str, Order]) -> None:
        """See `Store`; moves nothing."""
        natural = Natural(len(self._rows))
        self._where = Arrangement(order, natural, shares)
        self._ahead = 0, np.empty(0, np.int64)
        others = [name for name in self._rows.names if name not in labels]
        self._by_label = [(natural, self._rows.select(others))] * bool(others)
        self._by_label += [(labels[name], self._rows.select([name])) for name in labels]

    def batch(self, first: int, stop: int) -> Columns:
        """See `Store`."""
        samples = self._samples(first, stop)
        taken = [rows.take(label.samples(samples)) for label, rows in self._by_label]
        return _merged(taken, self._rows.names)

    def _samples(self, first: int, stop: int) -> IndexArray:
        begin, ahead = self._ahead
        if first < begin or stop > begin + len(ahead):
            shares = self._where.shares
            places = shares.positions(self._rank)[first : max(stop, first + _AHEAD)]
            begin = first
            ahead = self._where.samples(np.arange(places.start, places.stop, places.step))
            self._ahead = begin, ahead
        return ahead[first - begin : stop - begin]


class _Held(NamedTuple):
    """Some of the columns: this rank's `source` of them, the node's `rows`, this rank's order."""

    schema: Schema
    source: Loaded | Arranged
    rows: Columns
    indices: IndexArray

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.schema]

    def select(self, names: Sequence[str]) -> _Held:
        schema = tuple(field for field in self.schema if field.name in names)
        return _Held(schema, self.source.select(names), self.rows.select(names), self.indices)


@final
class Parts(Store):
    """Of all rows those that this node holds: as they were read, then as they are arranged.

    Args:
        source: the rows of this rank.
        schema: theirs.
        ranks: the ranks.
        nodes: the ranks that keep what comes together.
        folder: where rows go instead of memory, None for memory.

    """

    def __init__(
        self,
        source: Loaded,
        schema: Schema,
        ranks: Together,
        nodes: Nodes,
        folder: str | None = None,
    ) -> None:
        self._held = [_Held(schema, source, Columns.empty_like(schema), np.empty(0, np.int64))]
        self._names = [field.name for field in schema]
        self._ranks, self._nodes, self._folder = ranks, nodes, folder

    def arrange(self, order: Order, shares: Shares, labels: Mapping[str, Order]) -> None:
        """See `Store`."""
        held: list[_Held] = []
        for each in self._held:
            apart = [[name] for name in each.names if name in labels]
            rest = [name for name in each.names if name not in labels]
            groups = apart + [rest] * bool(rest)
            held += [each] if len(groups) < 2 else [each.select(names) for names in groups]
        self._held = held
        for number, each in enumerate(held):
            label = labels.get((each.names or [""])[0], Natural(order.total))
            where = Arrangement(order, label, shares)
            if not isinstance(each.source, Arranged) or each.source.where != where:
                self._held[number] = self._exchanged(each, where)

    def _exchanged(self, held: _Held, where: Arrangement) -> _Held:
        ranks, land = self._ranks, partial(self._land, held.schema)
        assert ranks.group is not None
        route = Route(where, self._nodes.receivers(ranks.rank))
        landing = exchange_rows(held.source, held.schema, route, ranks.group, land)
        if self._nodes.most > 1:
            barrier(ranks.group)  # what came to the other ranks of the node is here, too
        own = landing.own
        rows = landing.rows.slice(own.start, own.stop)
        source = Arranged(rows, landing.places[own], where)
        indices = where.indices(landing.places, ranks.rank)
        return _Held(held.schema, source, landing.rows, indices)

    def _land(self, schema: Schema, extent: Extent) -> Landing:
        """Make room for what comes to the ranks of this node. Collective."""
        ranks, nodes = self._ranks, self._nodes
        if nodes.most == 1:
            before, whole = nothing(schema), extent
            memory = private_memory(_landing_nbytes(schema, whole), self._folder)
        else:
            extents = ranks.share(lambda: extent)
            members = nodes.members[ranks.rank]
            before = summed(schema, [extents[each] for each in members if each < ranks.rank])
            whole = summed(schema, [extents[each] for each in members])
            nbytes = _landing_nbytes(schema, whole)
            found = node_memory(nbytes, ranks, nodes, self._folder)
            if isinstance(found, str):
                raise OSError(f"the ranks of a node cannot share their rows any more: {found}")
            memory = found
        rows = laid(memory, schema, whole)
        return Landing(rows, memory[nbytes_of(schema, whole) :].view(np.int64), before, extent)

    def batch(self, first: int, stop: int) -> Columns:
        """See `Store`."""
        taken = [held.rows.take(held.indices[first:stop]) for held in self._held]
        return _merged(taken, self._names)


def _landing_nbytes(schema: Schema, extent: Extent) -> int:
    """Return the bytes of rows and their places."""
    return nbytes_of(schema, extent) + 8 * extent.rows


def _merged(parts: Sequence[Columns], names: Sequence[str]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Column] = {}
    for part in parts:
        columns.update((name, part[name]) for name in part.names)
    return Columns({name: columns[name] for name in names})
