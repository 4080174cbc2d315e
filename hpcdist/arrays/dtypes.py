"""The dtype table: what can be sent, and as what it is reduced.

`dtype_row` finds the row of a NumPy dtype. Every fixed-size dtype can be moved; the ones
that have no row of their own travel as bytes and cannot be reduced, except times and pairs.
"""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Family = Literal["bool", "int", "float", "complex", "time", "pair", "bytes"]
"""`time` is datetime64 and timedelta64; a `pair` is a structured dtype of a number and an index."""

CODE_BITS = 7
"""Low bits of the tag of a message that hold the code of its dtype: `code_in_tag`."""

BYTES_CODE = 31
"""Codes from here on belong to dtypes without a row."""

OBJECT_CODE = BYTES_CODE - 1
"""Stands for the dtype in the tag of a message of objects."""


class Dtype(NamedTuple):
    """One row of the table.

    `plain` rows are in native byte order and need no carrier. `code` is the same on every
    rank; `carrier` has the bytes where NumPy's buffer protocol cannot say the dtype itself;
    `wide` is the dtype in which sums are accumulated.
    """

    name: str
    code: int
    family: Family
    numpy: np.dtype
    carrier: np.dtype | None = None
    wide: np.dtype | None = None
    plain: bool = True


_F4 = np.dtype("f4")
_I4 = np.dtype("i4")
_NAMED: tuple[tuple[str, Family, str | None, np.dtype | None], ...] = (
    # name, family, carrier, wide
    ("bool", "bool", None, None),
    ("int8", "int", None, _I4),
    ("int16", "int", None, _I4),
    ("int32", "int", None, None),
    ("int64", "int", None, None),
    ("uint8", "int", None, _I4),
    ("uint16", "int", None, _I4),
    ("uint32", "int", None, None),
    ("uint64", "int", None, None),
    ("float16", "float", None, _F4),
    ("bfloat16", "float", "u2", _F4),
    ("float32", "float", None, None),
    ("float64", "float", None, None),
    ("complex64", "complex", None, None),
    ("complex128", "complex", None, None),
    ("float8_e4m3fn", "bytes", "u1", None),
    ("float8_e5m2", "bytes", "u1", None),
    ("float8_e4m3fnuz", "bytes", "u1", None),
    ("float8_e5m2fnuz", "bytes", "u1", None),
    (np.dtype("longdouble").name, "float", None, None),
    (np.dtype("clongdouble").name, "complex", None, None),
)
_BY_NAME = {row[0]: (code, *row) for code, row in reversed(list(enumerate(_NAMED)))}
ROWS: dict[np.dtype, Dtype] = {}
"""The rows met so far; use `dtype_row`."""


def dtype_row(dtype: np.dtype) -> Dtype:
    """Return the row of `dtype`; raise `UsageError` for dtypes without a fixed size."""
    return ROWS.get(dtype) or _learn(dtype)


def code_in_tag(dtype: Dtype) -> int:
    """Return what stands for a dtype in a tag; all but a few dtypes without a row differ in it."""
    if dtype.code < BYTES_CODE:
        return dtype.code
    return BYTES_CODE + dtype.code % ((1 << CODE_BITS) - BYTES_CODE)


def name_of_code(code: int) -> str:
    """Return the dtype name behind a code below `BYTES_CODE`, for messages."""
    return _NAMED[code][0] if code < len(_NAMED) else "a structured or other dtype"


def _learn(dtype: np.dtype) -> Dtype:
    if dtype.hasobject:
        raise UsageError(
            f"an array of dtype {dtype} holds Python objects, which have no fixed size; send it "
            "with all_gather_object, broadcast_object_list or another object collective, or "
            "convert it with .astype(...)"
        )
    if dtype.itemsize == 0:
        raise UsageError(f"dtype {dtype} has no size; give the array a dtype with a fixed size")
    native, own = dtype.newbyteorder("="), np.dtype(dtype.type)
    native = own if own == native else native  # NumPy's own object is found by its identity
    known = _BY_NAME.get(native.name)
    if known is None:
        row = _unnamed_row(native)
    else:
        code, name, family, carrier, wide = known
        row = Dtype(name, code, family, native, np.dtype(carrier) if carrier else None, wide)
    row = row._replace(plain=row.carrier is None and dtype.isnative)
    return ROWS.setdefault(dtype, row)


def _unnamed_row(dtype: np.dtype) -> Dtype:
    code = BYTES_CODE + zlib.crc32(str(dtype).encode())
    if dtype.kind in "mM":
        return Dtype(str(dtype), code, "time", dtype, np.dtype("i8"))
    if _is_pair(dtype):
        return Dtype(str(dtype), code, "pair", dtype)
    return Dtype(str(dtype), code, "bytes", dtype, np.dtype("u1"))


def _is_pair(dtype: np.dtype) -> bool:
    """Return whether `dtype` has two fields: a real number, and an integer behind it."""
    if dtype.fields is None or len(dtype.fields) != 2:
        return False
    (value, start), (index, after) = (dtype.fields[name][:2] for name in dtype.names or ())
    return value.kind in "iuf" and index.kind in "iu" and after >= start + value.itemsize
