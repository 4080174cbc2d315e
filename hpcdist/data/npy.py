"""Files of one NumPy array: a record is a row, and a field of a structured array is a column."""

from __future__ import annotations

import tokenize
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdist.data.bad_records import BadRecords
from hpcdist.data.columns import Columns, Fixed, NumpyArray
from hpcdist.data.slots import Slot, as_asked
from hpcdist.data.source import Settings, Source
from hpcdist.errors import DatasetError


def read_npy(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the rows that begin in a piece; all rows are good."""
    try:
        shape, dtype = _header(source.file)
    except (ValueError, tokenize.TokenError) as error:
        raise DatasetError(f"{source.name}: {error}") from error
    begin = source.file.tell() if source.start or source.stop is not None else 0
    slots = _slots(dtype, settings.slots, source.name)
    nbytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    row, end = (_row_at(at, begin, nbytes, shape[0]) for at in (source.start, source.stop))
    if source.start:
        source.file.seek(begin + row * nbytes)
    while row < end:
        rows = min(max(1, settings.block_bytes // max(nbytes, 1)), end - row)
        data = source.file.read(rows * nbytes)
        if len(data) < rows * nbytes:
            raise DatasetError(
                f"{source.name}: the file ends in row {row + len(data) // nbytes} of {shape[0]}"
            )
        values = np.frombuffer(data, dtype).reshape(rows, *shape[1:])
        columns = {slot.name: _column(values, slot, source.name) for slot in slots}
        yield Columns(columns, rows)
        row += rows


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"files of version {version} cannot be read; write it with numpy.save")
    shape, fortran, dtype = readers[version](file)
    if fortran and len(shape) > 1:
        raise ValueError("the array is in Fortran order; save numpy.ascontiguousarray of it")
    if not shape or dtype.hasobject:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} has no rows of numbers")
    return shape, dtype


def _row_at(position: int | None, begin: int, nbytes: int, rows: int) -> int:
    """Return the first row that begins at a position or behind it."""
    if position is None or (not nbytes and position > begin):
        return rows
    return max(0, min(rows, -((begin - position) // max(nbytes, 1))))


def _slots(dtype: np.dtype[Any], asked: tuple[Slot, ...], file: str) -> list[Slot]:
    if dtype.names is None:
        if len(asked) > 1:
            raise DatasetError(
                f"{file}: is one array, so it has one column, not {len(asked)}: use_var names "
                f"{', '.join(slot.name for slot in asked)}"
            )
        return list(asked) or [Slot("data")]
    missing = [slot.name for slot in asked if slot.name not in dtype.names]
    if missing:
        raise DatasetError(
            f"{file}: there is no field {', '.join(map(repr, missing))}; the array has "
            f"{', '.join(dtype.names)}"
        )
    return list(asked) or [Slot(name) for name in dtype.names]


def _column(values: NumpyArray, slot: Slot, file: str) -> Fixed:
    if values.dtype.names is not None:
        values = np.ascontiguousarray(values[slot.name])
    if slot.is_text:
        raise DatasetError(f"{file}: column {slot.name!r} is {values.dtype}, not {slot.dtype}")
    try:
        values = as_asked(values, slot)
    except ValueError as error:
        raise DatasetError(f"{file}: column {error}") from error
    if slot.shape is not None:
        if int(np.prod(values.shape[1:])) != slot.width:
            raise DatasetError(
                f"{file}: rows of {slot.name!r} have shape {values.shape[1:]}, not {slot.shape}"
            )
        values = values.reshape(len(values), *slot.shape)
    return Fixed(values)
