"""Tables of Arrow as `Columns`, and files of them: parquet and Arrow's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from hpcdist.data.bad_records import BadRecord, BadRecords
from hpcdist.data.columns import BYTES, STRING, Column, Columns, Fixed, NumpyArray, Ragged
from hpcdist.data.slots import Slot, as_asked
from hpcdist.data.source import Settings, Source
from hpcdist.errors import DatasetError, UsageError

_ROWS = 1 << 16
"""Rows that are decoded at a time, or a whole row group of no more than `_GROUP_NBYTES`."""
_GROUP_NBYTES = 16 << 20


def pyarrow() -> Any:
    """Return the package.

    Raises:
        UsageError: it is not installed.

    """
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            "parquet and Arrow files need pyarrow: pip install 'hpcdist[data]'"
        ) from error
    return pyarrow


def give_back_unused() -> None:
    """Give memory that pyarrow, if it is in use, keeps of freed arrays back to the system."""
    loaded = sys.modules.get("pyarrow")
    if loaded is not None:
        loaded.default_memory_pool().release_unused()


def read_parquet(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the rows of the row groups that begin in a piece."""
    pa = pyarrow()
    import pyarrow.parquet as parquet

    with _translated(source.name):
        file = parquet.ParquetFile(_python_file(pa, source))
        names = _names(file.schema_arrow.names, settings.slots, source.name)
        groups = [file.metadata.row_group(at) for at in range(file.num_row_groups)]
    yield from _rows(_of_groups(file, groups, names, source), names, source, settings, bad)


def _of_groups(
    file: Any, groups: Sequence[Any], names: Sequence[str], source: Source
) -> Iterator[Batch]:
    before = 0
    for at, group in enumerate(groups):
        if group.num_columns and source.has(_begin_of(group)):
            small = group.total_byte_size <= _GROUP_NBYTES
            rows, taken = max(_ROWS, group.num_rows) if small else _ROWS, before
            # the readers of a rank are the setting's: pyarrow adds none
            for batch in file.iter_batches(rows, row_groups=[at], columns=names, use_threads=False):
                yield batch, partial(int, taken)
                taken += batch.num_rows
        before += group.num_rows


def _begin_of(group: Any) -> int:
    column = group.column(0)
    pages = column.dictionary_page_offset, column.data_page_offset
    return min(int(page) for page in pages if page is not None)


def read_arrow(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the rows of the record batches of a piece, of Arrow's files and of its streams."""
    pa = pyarrow()
    with _translated(source.name):
        is_file = source.file.read(6) == b"ARROW1"
        source.file.seek(0)
        opened = pa.PythonFile(source.file, mode="r")
        reader = pa.ipc.open_file(opened) if is_file else pa.ipc.open_stream(opened)
        names = _names(reader.schema.names, settings.slots, source.name)
    batches = (_of_file if is_file else _of_stream)(reader, source)
    yield from _rows(_validated(batches, names), names, source, settings, bad)


def _validated(batches: Iterator[Batch], names: Sequence[str]) -> Iterator[Batch]:
    """Return the columns that are wanted; Arrow itself reads what a damaged file says."""
    for batch, before in batches:
        wanted = batch.select(names)
        wanted.validate(full=True)
        yield wanted, before


Batch = tuple[Any, Callable[[], int]]
"""A record batch, and what counts the rows before it."""


def _of_file(reader: Any, source: Source) -> Iterator[Batch]:
    """Return the batches of a piece, as if all were of one length: where they begin is hidden."""
    count = reader.num_record_batches
    size = source.file.seek(0, 2)
    for at in range(count):
        if source.has(size * at // count):
            yield reader.get_batch(at), partial(_rows_before, reader, at)


def _rows_before(reader: Any, at: int) -> int:
    return sum(reader.get_batch(each).num_rows for each in range(at))


def _of_stream(reader: Any, source: Source) -> Iterator[Batch]:
    before = 0
    while source.stop is None or source.file.tell() < source.stop:
        begin = source.file.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        if source.has(begin):
            yield batch, partial(int, before)
        before += batch.num_rows


def _rows(
    batches: Iterator[Batch],
    names: Sequence[str],
    source: Source,
    settings: Settings,
    bad: BadRecords,
) -> Iterator[Columns]:
    slots = {slot.name: slot for slot in settings.slots}
    wanted = [slots.get(name, Slot(name)) for name in names]
    while True:
        with _translated(source.name):
            batch, before = next(batches, (None, int))
            if batch is None:
                return
            columns, wrong = columns_of(batch, wanted)
        for row, reason in wrong:
            bad.add(BadRecord(source.name, before() + row + 1, reason))
        if len(columns):
            yield columns


def columns_of(table: Any, slots: Sequence[Slot]) -> tuple[Columns, list[tuple[int, str]]]:
    """Return the rows of a table or batch of Arrow, and which are left out, and why.

    Raises:
        DatasetError: a column is of a type that datasets do not have.

    """
    arrays = {slot.name: _whole(table.column(slot.name)) for slot in slots}
    wrong: dict[int, str] = {}
    for name, array in arrays.items():
        for row in np.flatnonzero(_nulls(array)).tolist():
            wrong.setdefault(row, f"column {name!r} has a null")
    if wrong:
        keep = np.ones(table.num_rows, bool)
        keep[list(wrong)] = False
        left = np.flatnonzero(keep)
        arrays = {name: array.take(pyarrow().array(left)) for name, array in arrays.items()}
    else:
        left = np.arange(table.num_rows)
    columns: dict[str, Column] = {}
    good = np.ones(len(left), bool)
    for slot in slots:
        column = _as_asked(_column_of(arrays[slot.name], slot.name), slot)
        if isinstance(column, Ragged) and slot.shape is not None and not slot.is_text:
            fits = column.lengths == slot.width
            for row in np.flatnonzero(~fits).tolist():
                wrong.setdefault(
                    int(left[row]),
                    f"column {slot.name!r} has {column.lengths[row]} values, not {slot.width}",
                )
            good &= fits
        columns[slot.name] = column
    rows = Columns(columns, len(left))
    if not good.all():
        rows = rows.take(good)
    shaped = {slot.name: _in_shape(rows[slot.name], slot) for slot in slots}
    return Columns(shaped, len(rows)), sorted(wrong.items())


def _whole(array: Any) -> Any:
    array = array.combine_chunks() if hasattr(array, "combine_chunks") else array
    if hasattr(array, "num_chunks"):  # some versions leave one chunk of it
        pa = pyarrow()
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    if hasattr(array, "dictionary"):
        array = array.dictionary_decode()
    return array


def _nulls(array: Any) -> NumpyArray:
    """Return which rows are null, or hold one."""
    nulls: NumpyArray = np.zeros(len(array), bool)
    if array.null_count:
        nulls |= np.asarray(array.is_null())
    if _is_list(array) and array.flatten().null_count:
        inner = np.append(0, np.cumsum(np.asarray(array.flatten().is_null())))
        lengths = np.asarray(array.value_lengths().fill_null(0))
        ends = np.cumsum(lengths)
        nulls |= inner[ends] > inner[ends - lengths]
    return nulls


def _is_list(array: Any) -> bool:
    return hasattr(array, "value_lengths")


def _column_of(array: Any, name: str) -> Column:
    kind = str(array.type)
    if hasattr(array, "to_numpy_ndarray"):  # tensors of a fixed shape
        return Fixed(array.to_numpy_ndarray())
    if kind in _TEXTS:
        return _text_of(array, *_TEXTS[kind])
    if hasattr(array.type, "list_size") and _is_list(array):
        flat = _numbers_of(array.flatten(), name)
        return Fixed(flat.reshape(len(array), array.type.list_size))
    if kind.startswith(("list<", "large_list<")):
        return Ragged(_numbers_of(array.values, name), np.asarray(array.offsets, np.int64))
    return Fixed(_numbers_of(array, name))


_TEXTS = {
    "string": (STRING, np.int32),
    "large_string": (STRING, np.int64),
    "binary": (BYTES, np.int32),
    "large_binary": (BYTES, np.int64),
}


def _text_of(array: Any, kind: str, offset: Any) -> Ragged:
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return Ragged(np.empty(0, np.uint8), [0], kind)
    where = np.frombuffer(offsets, offset)[array.offset : array.offset + len(array) + 1]
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Ragged(values, where, kind)


def _numbers_of(array: Any, name: str) -> NumpyArray:
    values: NumpyArray = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "biufM":
        raise DatasetError(
            f"column {name!r} is of Arrow's type {array.type}, which a dataset does not have; "
            "leave it out of use_var, or write it as numbers, text, or lists of numbers"
        )
    return values


def _as_asked(column: Column, slot: Slot) -> Column:
    """Return a column with the dtype that its slot has."""
    have: Any = column.kind if column.kind in (STRING, BYTES) else column.values.dtype
    if slot.dtype is None or slot.dtype == have:
        return column
    if isinstance(column, Ragged) and {slot.dtype, have} == {STRING, BYTES}:
        return Ragged(column.values, column.offsets, str(slot.dtype))
    if isinstance(have, str) or slot.is_text:
        raise DatasetError(f"column {slot.name!r} is {have} in the file, not {slot.dtype}")
    try:
        values = as_asked(column.values, slot)
    except ValueError as error:
        raise DatasetError(f"column {error}") from error
    return Fixed(values) if isinstance(column, Fixed) else Ragged(values, column.offsets)


def _in_shape(column: Column, slot: Slot) -> Column:
    """Return a column with rows of the shape that its slot has."""
    if slot.shape is None or slot.is_text or column.kind in (STRING, BYTES):
        return column
    if isinstance(column, Ragged):
        start, stop = column.offsets[0], column.offsets[-1]
        return Fixed(column.values[start:stop].reshape(len(column), *slot.shape))
    if column.values[:1].size not in (slot.width, 0):
        raise DatasetError(
            f"column {slot.name!r} has rows of shape {column.values.shape[1:]}, not {slot.shape}"
        )
    return Fixed(column.values.reshape(len(column), *slot.shape))


def _names(names: Sequence[str], slots: Sequence[Slot], file: str) -> list[str]:
    missing = [slot.name for slot in slots if slot.name not in names]
    if missing:
        raise DatasetError(
            f"{file}: there is no column {', '.join(map(repr, missing))}; the file has "
            f"{', '.join(names)}"
        )
    return [slot.name for slot in slots] or list(names)


def _python_file(pa: Any, source: Source) -> Any:
    if source.path is not None:
        return pa.memory_map(source.path)
    return pa.PythonFile(source.file, mode="r")


@contextmanager
def _translated(file: str) -> Iterator[None]:
    pa = pyarrow()
    try:
        yield
    except DatasetError as error:
        if str(error).startswith(file):
            raise
        raise DatasetError(f"{file}: {error}") from error
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise DatasetError(f"{file}: {type(error).__name__}: {error}") from error
