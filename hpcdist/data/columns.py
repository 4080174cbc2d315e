"""`Columns`: rows of several columns, each a few flat arrays, whatever the rows look like.

A `Fixed` column has rows of one shape, a `Ragged` one rows of different lengths: lists, text,
bytes. Slices are views; `take` copies rows in any order, with no Python per row. Offsets are
int64, so a column may be longer than 2^31 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcdist.compiled import load
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

NumpyArray = npt.NDArray[Any]
IndexArray = npt.NDArray[np.int64]

LIST, STRING, BYTES, FIXED = "list", "string", "bytes", "fixed"
_PIECE = 1 << 18
"""Elements that NumPy gathers at a time: their positions take eight bytes each."""


class Field(NamedTuple):
    """What all rows of a column have in common."""

    name: str
    kind: str
    """One of fixed, list, string, bytes."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of a row if it is fixed, of an element if it is a list."""


Schema = tuple[Field, ...]


@final
class Fixed:
    """A column whose rows have one shape: ``values[i]`` is row i.

    Args:
        values: an array, or what NumPy makes one of.

    Example:
        >>> from hpcdist.data.columns import Fixed
        >>> Fixed([[1, 2], [3, 4]]).row(1).tolist()
        [3, 4]

    """

    __slots__ = ("values",)
    kind = FIXED

    def __init__(self, values: Any) -> None:
        self.values: NumpyArray = np.asarray(values)
        if not self.values.ndim:
            raise UsageError(f"a column is an array with a row for each record, got {values!r}")

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Fixed({len(self)} rows of {_shown(self.values)})"

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.values.nbytes

    def slice(self, start: int, stop: int) -> Fixed:
        """Return rows `start` to `stop`, without copying.

        Args:
            start: the first row.
            stop: the row after the last one.

        """
        return Fixed(self.values[start:stop])

    def take(self, indices: IndexArray) -> Fixed:
        """Return copies of the rows at `indices`, in their order.

        Args:
            indices: integers.

        """
        return Fixed(self.values.take(indices, axis=0))

    def row(self, index: int) -> Any:
        """Return row `index`.

        Args:
            index: from 0; negative ones count backwards.

        """
        return self.values[index]

    def buffers(self) -> list[NumpyArray]:
        """Return the column as flat arrays; copied only if it is not contiguous."""
        return [np.ascontiguousarray(self.values).reshape(-1)]


@final
class Ragged:
    """A column whose rows differ in length: row i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: the elements of all rows, one row after the other. uint8 for text and bytes.
        offsets: int64, one more than there are rows, and ascending; the first need not be 0.
        kind: "list"; "string", UTF-8; or "bytes".

    Example:
        >>> import numpy as np
        >>> from hpcdist.data.columns import Ragged
        >>> Ragged(np.array([1, 2, 3]), np.array([0, 2, 3])).row(0).tolist()
        [1, 2]

    """

    __slots__ = ("kind", "offsets", "values")

    def __init__(self, values: Any, offsets: Any, kind: str = LIST) -> None:
        self.values: NumpyArray = np.asarray(values)
        self.offsets: IndexArray = np.asarray(offsets, np.int64)
        self.kind = kind
        if kind not in (LIST, STRING, BYTES):
            raise UsageError(f"kind must be 'list', 'string' or 'bytes', got {kind!r}")
        if kind != LIST and self.values.dtype != np.uint8:
            raise UsageError(f"text is kept as uint8, got values of {self.values.dtype}")
        if self.offsets.ndim != 1 or not self.offsets.size or not self.values.ndim:
            raise UsageError("offsets have one entry more than there are rows, so at least one")
        if self.offsets[0] < 0 or self.offsets[-1] > len(self.values):
            raise UsageError(
                f"offsets go from {self.offsets[0]} to {self.offsets[-1]}, but there are "
                f"{len(self.values)} values"
            )

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: Any = None) -> Ragged:
        """Return a column of lists, of `str` or of `bytes`, as the rows are.

        Args:
            rows: lists or arrays, texts, or bytes.
            dtype: of the elements; None: NumPy's choice.

        """
        if rows and isinstance(rows[0], (str, bytes)):
            kind = STRING if isinstance(rows[0], str) else BYTES
            parts = [row.encode() if isinstance(row, str) else row for row in rows]
            values: NumpyArray = np.frombuffer(b"".join(parts), np.uint8)
        else:
            kind, parts = LIST, [np.asarray(row, dtype) for row in rows]
            values = np.concatenate(parts) if parts else np.empty(0, dtype)
        return cls(values, offsets_of([len(part) for part in parts]), kind)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        what = _shown(self.values) if self.kind == LIST else self.kind
        return f"Ragged({len(self)} rows of {what}, {self._stop - self._start} in all)"

    @property
    def _start(self) -> int:
        return int(self.offsets[0])

    @property
    def _stop(self) -> int:
        return int(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and offsets."""
        return self.values[self._start : self._stop].nbytes + self.offsets.nbytes

    @property
    def lengths(self) -> IndexArray:
        """The number of elements in each row."""
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows `start` to `stop`, without copying.

        Args:
            start: the first row.
            stop: the row after the last one.

        """
        start, stop, _ = slice(start, stop).indices(len(self))
        return Ragged(self.values, self.offsets[start : max(start, stop) + 1], self.kind)

    def take(self, indices: IndexArray) -> Ragged:
        """Return copies of the rows at `indices`, in their order.

        Args:
            indices: integers, from 0.

        """
        starts = self.offsets.take(indices)
        lengths = self.offsets[1:].take(indices) - starts
        return Ragged(*gathered(self.values, starts, lengths), self.kind)

    def row(self, index: int) -> Any:
        """Return row `index`: an array, `str` or `bytes`.

        Args:
            index: from 0; negative ones count backwards.

        """
        start, stop = self.offsets[range(len(self))[index] :][:2]
        found = self.values[start:stop]
        if self.kind == LIST:
            return found
        return found.tobytes().decode() if self.kind == STRING else found.tobytes()

    def buffers(self) -> list[NumpyArray]:
        """Return lengths and values as flat arrays; copied only if they are not contiguous."""
        values = np.ascontiguousarray(self.values[self._start : self._stop])
        return [self.lengths, values.reshape(-1)]


Column = Fixed | Ragged


@final
class Columns:
    """Rows of several columns, by their names; all columns have the same number of rows.

    Args:
        columns: `Fixed` and `Ragged` columns by name.
        rows: how many rows there are; needed only where there is no column.

    Example:
        >>> import numpy as np
        >>> from hpcdist.data.columns import Columns, Fixed, Ragged
        >>> rows = Columns({"label": Fixed(np.arange(3)), "words": Ragged([5, 6, 7], [0, 2, 2, 3])})
        >>> rows.take([2, 0])["words"].values
        array([7, 5, 6])

    """

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: Mapping[str, Column], rows: int | None = None) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values()) | ({rows} - {None})) > 1:
            raise UsageError(f"columns must have equally many rows, got {lengths}")
        self._columns = dict(columns)
        self._rows = next(iter(lengths.values()), rows or 0)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the rows, one after the other; see `items` for the columns."""
        return map(self.row, range(self._rows))

    def __len__(self) -> int:
        """Return the number of rows; of columns there are ``len(columns.names)``."""
        return self._rows

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        return f"Columns({self._rows} rows, {self._columns})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def items(self) -> Iterable[tuple[str, Column]]:
        """Return the columns with their names."""
        return self._columns.items()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(column.nbytes for column in self._columns.values())

    def schema(self) -> Schema:
        """Return the dtype and the shape of the rows of each column."""
        return tuple(
            Field(name, column.kind, column.values.dtype, column.values.shape[1:])
            for name, column in self._columns.items()
        )

    def slice(self, start: int, stop: int) -> Columns:
        """Return rows `start` to `stop`, as views.

        Args:
            start: the first row.
            stop: the row after the last one.

        """
        return self._each(lambda column: column.slice(start, stop))

    def take(self, indices: Any) -> Columns:
        """Return copies of the rows at `indices`, in their order; negative ones count backwards.

        Args:
            indices: integers, or a mask of all rows.

        Raises:
            IndexError: there is no such row.

        """
        positions = _positions(indices, self._rows)
        taken = self._each(lambda column: column.take(positions))
        return taken if self._columns else Columns({}, len(positions))

    def select(self, names: Sequence[str]) -> Columns:
        """Return some of the columns, in the order of `names`.

        Args:
            names: of columns.

        """
        return Columns({name: self._columns[name] for name in names}, self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`: arrays, numbers, `str` and `bytes` by name.

        Args:
            index: from 0; negative ones count backwards.

        """
        return {name: column.row(index) for name, column in self._columns.items()}

    def buffers(self) -> list[NumpyArray]:
        """Return all rows as flat contiguous arrays; a `Ragged` column gives lengths and values."""
        return [buffer for column in self._columns.values() for buffer in column.buffers()]

    @staticmethod
    def from_buffers(schema: Schema, rows: int, buffers: Sequence[NumpyArray]) -> Columns:
        """Build columns from the arrays of `buffers`, which are not copied.

        Args:
            schema: of the rows, as `schema` returned it.
            rows: how many there are.
            buffers: flat arrays, in the order of `buffers`.

        Raises:
            UsageError: the buffers do not fit to the schema.

        """
        left = iter(buffers)
        try:
            columns = {field.name: _from_buffers(field, rows, left) for field in schema}
        except (StopIteration, ValueError) as error:
            raise UsageError(
                f"buffers of {[buffer.size for buffer in buffers]} elements are not {rows} rows "
                f"of {schema}: {error}"
            ) from error
        return Columns(columns, rows)

    @staticmethod
    def empty_like(schema: Schema) -> Columns:
        """Return columns of this kind without rows.

        Args:
            schema: of the columns.

        """
        buffers: list[NumpyArray] = []
        for field in schema:
            buffers += [np.empty(0, np.int64)] * (field.kind != FIXED)
            buffers.append(np.empty(0, field.dtype))
        return Columns.from_buffers(schema, 0, buffers)

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Columns:
        """Return the rows of all parts, one after the other, as copies where there are several.

        Args:
            parts: of equal columns.

        Raises:
            UsageError: there is no part, or their columns differ.

        """
        if not parts:
            raise UsageError("there is nothing to join; Columns.empty_like(schema) has no rows")
        schema = parts[0].schema()
        for part in parts[1:]:
            if part.schema() != schema:
                raise UsageError(f"{difference(schema, part.schema())}, so they cannot be joined")
        if len(parts) == 1:
            return parts[0]
        rows = sum(map(len, parts))
        joined = {name: _joined([part[name] for part in parts]) for name in parts[0].names}
        return Columns(joined, rows)

    def _each(self, function: Callable[[Column], Column]) -> Columns:
        columns = {name: function(column) for name, column in self._columns.items()}
        return Columns(columns, None if columns else self._rows)


def offsets_of(lengths: Any) -> IndexArray:
    """Return where rows of these lengths begin, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gathered(
    values: NumpyArray, starts: IndexArray, lengths: IndexArray
) -> tuple[NumpyArray, IndexArray]:
    """Return copies of runs of `values`, one after the other, and their offsets."""
    offsets = offsets_of(lengths)
    if offsets[-1] == len(lengths) and (lengths == 1).all():
        return values.take(starts, axis=0), offsets
    found = np.empty((int(offsets[-1]), *values.shape[1:]), values.dtype)
    _copy_runs(found, offsets, values, starts)
    return found, offsets


def difference(one: Schema, other: Schema) -> str:
    """Return in words how two schemas differ."""
    names, others = [field.name for field in one], [field.name for field in other]
    if names != others:
        return f"the columns are {', '.join(names)} here and {', '.join(others)} there"
    here, there = next(pair for pair in zip(one, other, strict=True) if pair[0] != pair[1])
    return f"column {here.name!r} is {_in_words(here)} here and {_in_words(there)} there"


def same_schema(schemas: Sequence[Schema]) -> Schema:
    """Return the schema that all of these are.

    Raises:
        UsageError: two of them differ.

    """
    for schema in schemas:
        if schema != schemas[0]:
            raise UsageError(
                f"{difference(schemas[0], schema)}: files of one dataset have the same columns"
            )
    return schemas[0]


def _in_words(field: Field) -> str:
    shape = "x".join(map(str, field.shape))
    return f"{field.kind} of {field.dtype}" + f" {shape}" * bool(shape)


def _shown(values: NumpyArray) -> str:
    return f"{values.dtype}{list(values.shape[1:]) if values.ndim > 1 else ''}"


def _positions(indices: Any, rows: int) -> IndexArray:
    positions = np.asarray(indices)
    if positions.dtype == bool:
        if positions.shape != (rows,):
            raise IndexError(f"a mask of {rows} rows is needed, got shape {positions.shape}")
        return np.flatnonzero(positions)
    if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
        raise UsageError(
            f"indices must be whole numbers in one dimension, got {positions.dtype} of shape "
            f"{positions.shape}"
        )
    positions = positions.astype(np.int64, copy=False)
    least, most = (positions.min(), positions.max()) if positions.size else (0, -1)
    if least < -rows or most >= rows:
        wrong = positions[(positions < -rows) | (positions >= rows)][0]
        raise IndexError(f"there is no row {wrong}: there are {rows}")
    return np.where(positions < 0, positions + rows, positions) if least < 0 else positions


def _from_buffers(field: Field, rows: int, left: Iterator[NumpyArray]) -> Column:
    if field.kind == FIXED:
        return Fixed(_viewed(next(left), field.dtype).reshape(rows, *field.shape))
    offsets = offsets_of(_viewed(next(left), np.dtype(np.int64)))
    if len(offsets) != rows + 1:
        raise ValueError(f"{field.name} has {len(offsets) - 1} lengths")
    values = _viewed(next(left), field.dtype)
    return Ragged(values.reshape(int(offsets[-1]), *field.shape), offsets, field.kind)


def _viewed(buffer: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    return buffer if buffer.dtype == dtype else buffer.view(dtype)


def _joined(parts: Sequence[Any]) -> Column:
    if isinstance(parts[0], Fixed):
        return Fixed(np.concatenate([part.values for part in parts]))
    lengths, starts = zip(*((part.lengths, part.offsets) for part in parts), strict=True)
    values = [
        part.values[offsets[0] : offsets[-1]] for part, offsets in zip(parts, starts, strict=True)
    ]
    return Ragged(np.concatenate(values), offsets_of(np.concatenate(lengths)), parts[0].kind)


def _copy_runs(to: NumpyArray, offsets: IndexArray, values: NumpyArray, starts: IndexArray) -> None:
    """Copy for each row i what begins at ``starts[i]`` in `values` to ``to[offsets[i]:]``."""
    if _compiled_runs is not None and values.flags.c_contiguous and not values.dtype.hasobject:
        item = values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
        _compiled_runs(_raw(to), offsets, _raw(values), np.ascontiguousarray(starts), item)
        return
    shift = starts - offsets[:-1]
    row = 0
    while row < len(starts):
        stop = int(np.searchsorted(offsets, offsets[row] + _PIECE, side="right")) - 1
        begin, end = int(offsets[row]), int(offsets[max(stop, row + 1)])
        if stop <= row:  # a long one, alone
            stop = row + 1
            to[begin:end] = values[starts[row] : starts[row] + end - begin]
        else:
            lengths = np.diff(offsets[row : stop + 1])
            to[begin:end] = values.take(
                np.arange(begin, end) + np.repeat(shift[row:stop], lengths), axis=0
            )
        row = stop


def _raw(array: NumpyArray) -> NumpyArray:
    """Return the bytes of a contiguous array; not every dtype has a buffer."""
    return array.reshape(-1).view(np.uint8)


_compiled_runs: Any = getattr(load("hpcdist.data._native"), "copy_runs", None)
