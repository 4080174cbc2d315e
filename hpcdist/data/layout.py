"""`laid`: rows of columns in one run of memory, wherever that is: shared, in a file, received.

A `Ragged` column takes two sections of it, offsets and values; a `Fixed` one its values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.data.columns import FIXED, Column, Columns, Field, Fixed, Ragged, Schema
from hpcdist.named_tuple import NamedTuple

_LINE = 64
"""Sections begin at multiples of this many bytes."""


class Extent(NamedTuple):
    """How much there is of some rows: their number, and for each `Ragged` column of its values."""

    rows: int
    counts: tuple[int, ...]

    def plus(self, other: Extent) -> Extent:
        """Return how much both are."""
        counts = (one + more for one, more in zip(self.counts, other.counts, strict=True))
        return Extent(self.rows + other.rows, tuple(counts))


def ragged_fields(schema: Schema) -> list[Field]:
    """Return the columns whose rows differ in length."""
    return [field for field in schema if field.kind != FIXED]


def row_nbytes(field: Field) -> int:
    """Return the bytes of a row of a `Fixed` column, of an element of a `Ragged` one."""
    return field.dtype.itemsize * int(np.prod(field.shape, dtype=np.int64))


def nothing(schema: Schema) -> Extent:
    """Return the extent of no rows."""
    return Extent(0, (0,) * len(ragged_fields(schema)))


def summed(schema: Schema, extents: Sequence[Extent]) -> Extent:
    """Return how much all of them are."""
    return reduce(Extent.plus, extents, nothing(schema))


def extent_of(columns: Columns) -> Extent:
    """Return how much `columns` are."""
    ragged = [
        column for column in (columns[name] for name in columns.names) if isinstance(column, Ragged)
    ]
    counts = (int(column.offsets[-1]) - int(column.offsets[0]) for column in ragged)
    return Extent(len(columns), tuple(counts))


def nbytes_of(schema: Schema, extent: Extent) -> int:
    """Return the bytes of memory that rows take when they are `laid`."""
    return sum(-(-size // _LINE) * _LINE for size in _sections(schema, extent))


def laid(memory: NumpyArray, schema: Schema, extent: Extent) -> Columns:
    """Return rows whose arrays are views of `memory`, flat bytes that were zero."""
    parts, start = [], 0
    for size in _sections(schema, extent):
        parts.append(memory[start : start + size])
        start += -(-size // _LINE) * _LINE
    left, counts = iter(parts), iter(extent.counts)
    columns: dict[str, Column] = {}
    for field in schema:
        if field.kind == FIXED:
            values = next(left).view(field.dtype).reshape(extent.rows, *field.shape)
            columns[field.name] = Fixed(values)
        else:
            offsets, count = next(left).view(np.int64), next(counts)
            values = next(left).view(field.dtype).reshape(count, *field.shape)
            columns[field.name] = Ragged(values, offsets, field.kind)
    return Columns(columns, extent.rows)


def _sections(schema: Schema, extent: Extent) -> list[int]:
    counts = iter(extent.counts)
    sizes: list[int] = []
    for field in schema:
        if field.kind == FIXED:
            sizes.append(extent.rows * row_nbytes(field))
        else:
            sizes += [8 * (extent.rows + 1), next(counts) * row_nbytes(field)]
    return sizes


def pour(part: Columns, target: Columns, at: Extent) -> Extent:
    """Copy the rows of `part` to where in `target` so much has been poured; return what is then."""
    counts = iter(at.counts)
    for name, column in ((name, part[name]) for name in part.names):
        to = target[name]
        if isinstance(column, Fixed) or isinstance(to, Fixed):
            to.values[at.rows : at.rows + len(part)] = column.values
            continue
        first, last, count = int(column.offsets[0]), int(column.offsets[-1]), next(counts)
        to.values[count : count + last - first] = column.values[first:last]
        np.add(
            column.offsets[1:],
            count - first,
            out=to.offsets[at.rows + 1 : at.rows + 1 + len(part)],
        )
    return at.plus(extent_of(part))


def cut(columns: Columns, nbytes: int) -> list[tuple[int, int]]:
    """Return runs of rows of about `nbytes` each, at least one row."""
    if len(columns) and _nbytes_until(columns, len(columns)) <= nbytes:
        return [(0, len(columns))]
    rows, first, runs = range(len(columns) + 1), 0, []
    while first < len(columns):
        goal = _nbytes_until(columns, first) + nbytes
        stop = bisect_right(rows, goal, first + 1, key=lambda row: _nbytes_until(columns, row)) - 1
        runs.append((first, max(stop, first + 1)))
        first = runs[-1][1]
    return runs


def _nbytes_until(columns: Columns, row: int) -> int:
    """Return the bytes of the rows before `row`."""
    total = 0
    for column in (columns[name] for name in columns.names):
        if isinstance(column, Fixed):
            total += row * (column.values.nbytes // max(len(column), 1))
        else:
            item = column.values.itemsize * int(np.prod(column.values.shape[1:], dtype=np.int64))
            total += 8 * row + int(column.offsets[row] - column.offsets[0]) * item
    return total


def runs_of(columns: Columns, start: int, stop: int) -> Sequence[NumpyArray]:
    """Return the memory of rows `start` to `stop`: flat bytes, as views."""
    found = []
    for column in (columns[name] for name in columns.names):
        values = column.values
        if isinstance(column, Fixed):
            found.append(values[start:stop])
        else:
            found.append(column.offsets[start + 1 : stop])  # the first also ends the row before
            found.append(values[int(column.offsets[start]) : int(column.offsets[stop])])
    return [array.reshape(-1).view(np.uint8) for array in found if array.size]
