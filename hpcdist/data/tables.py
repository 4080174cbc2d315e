"""`table_of`: columns as a table of pyarrow, which shares their memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.data.columns import LIST, STRING, Column, Columns, Fixed
from hpcdist.errors import UsageError


def table_of(rows: Columns) -> Any:
    """Return the rows as a ``pyarrow.Table``.

    Raises:
        UsageError: pyarrow is not installed.

    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise UsageError(
            "to_arrow needs pyarrow, which is not installed: pip install 'hpcdist[data]'"
        ) from error
    return pa.table({name: _array(pa, rows[name]) for name in rows.names})


def _array(pa: Any, column: Column) -> Any:
    if isinstance(column, Fixed):
        return _lists_of(pa, column.values)
    if column.kind == LIST:
        offsets = pa.array(column.offsets)
        return pa.LargeListArray.from_arrays(offsets, _lists_of(pa, column.values))
    kind = pa.large_string() if column.kind == STRING else pa.large_binary()
    buffers = [
        None,
        pa.py_buffer(column.offsets),
        pa.py_buffer(np.ascontiguousarray(column.values)),
    ]
    return pa.Array.from_buffers(kind, len(column), buffers)


def _lists_of(pa: Any, values: Any) -> Any:
    """Return an array of numbers, or of lists of so many where it has more axes."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat
