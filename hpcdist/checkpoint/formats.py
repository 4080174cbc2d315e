"""How arrays are named in files: dtypes, and the header of the safetensors format.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the length of the
header, the header in JSON, then the bytes of all tensors, without gaps. hpcdist writes it itself,
since the package of that name first copies every array.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from hpcdist.arrays.dtypes import BYTES_CODE, dtype_row
from hpcdist.comm.alarms import is_alarm
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.named_tuple import NamedTuple

DtypeName = Any
"""A name of the table of dtypes, or the description of a structured or other dtype."""

_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What safetensors calls a dtype; the bytes of others are kept as U8."""

_TENSORS = {*_CODES, "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"}
"""The dtypes that torch and JAX have."""

_ALIGNMENT = 4096
"""The data of a file begin at a multiple of this: whole pages go to disk."""


class Tensor(NamedTuple):
    """An entry of a file: `offset` counts from the file's first byte."""

    name: str
    dtype: DtypeName
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0


def name_of_dtype(dtype: np.dtype[Any]) -> DtypeName:
    """Return the manifest's name of `dtype`.

    Raises:
        UsageError: it has no fixed size, or none that a manifest can describe.

    """
    row = dtype_row(dtype)
    if row.name in _CODES or row.code < BYTES_CODE:
        return row.name
    if getattr(ml_dtypes, dtype.name, None) is dtype.type:
        return str(dtype.name)
    try:
        described = np.lib.format.dtype_to_descr(dtype)
        is_whole = np.lib.format.descr_to_dtype(described) == dtype
    except ValueError:  # fields in another order than they lie in
        is_whole = False
    if not is_whole:
        raise UsageError(
            f"a checkpoint cannot describe the dtype {dtype}; save its fields one by one"
        )
    return _as_json(described)


def dtype_of_name(name: DtypeName) -> np.dtype[Any]:
    """Return the dtype that `name_of_dtype` has described.

    Raises:
        CheckpointError: there is no such dtype.

    """
    try:
        own = getattr(ml_dtypes, name, None) if isinstance(name, str) else None
        return np.dtype(own or np.lib.format.descr_to_dtype(_from_json(name)))
    except Exception as error:  # NumPy's parser has errors of many kinds
        if is_alarm(error):
            raise
        raise CheckpointError(f"the checkpoint has arrays of an unknown dtype, {name!r}") from error


def is_tensor_dtype(name: DtypeName) -> bool:
    """Return whether torch and JAX have this dtype."""
    return isinstance(name, str) and name in _TENSORS


def lay_out(
    tensors: Iterable[Tensor], notes: dict[str, str] | None = None
) -> tuple[bytes, list[Tensor]]:
    """Return the first bytes of a file, and its entries in the order in which they follow.

    Entries of the largest elements come first, so that each begins at a multiple of its size.
    """
    ordered = sorted(tensors, key=lambda each: -dtype_of_name(each.dtype).alignment)
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    position, placed = 0, []
    for tensor in ordered:
        code = _CODES.get(tensor.dtype) if isinstance(tensor.dtype, str) else None
        header[tensor.name] = {
            "dtype": code or "U8",
            "shape": list(tensor.shape) if code else [tensor.nbytes],
            "data_offsets": [position, position + tensor.nbytes],
        }
        placed.append(tensor._replace(offset=position))
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = len(text) + 8
    first = len(text).to_bytes(8, "little") + text
    return first, [each._replace(offset=start + each.offset) for each in placed]


def _as_json(description: Any) -> Any:
    if isinstance(description, (list, tuple)):
        return [_as_json(each) for each in description]
    return description


def _from_json(description: Any) -> Any:
    """Undo what JSON does to a description: a field is a tuple, and so is its shape."""
    if not isinstance(description, list):
        return description
    if description and all(isinstance(each, list) for each in description):
        return [_field(each) for each in description]
    return tuple(_from_json(each) for each in description)  # a subarray: (dtype, shape)


def _field(field: list[Any]) -> tuple[Any, ...]:
    title, dtype, *shape = field
    name = tuple(title) if isinstance(title, list) else title
    return (name, _from_json(dtype), *(tuple(each) for each in shape))
