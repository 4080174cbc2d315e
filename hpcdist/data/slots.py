"""`Slot`: a column that a dataset is asked for, as ``use_var`` tells it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

TEXT = {"str": "string", "string": "string", "bytes": "bytes", "binary": "bytes"}
"""What may be written for columns of text and of bytes."""

TRUTH = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}
"""What may be written for a bool."""


class Slot(NamedTuple):
    """A column by its name, and what its rows are to be."""

    name: str
    dtype: np.dtype[Any] | str | None = None
    """Of the numbers; "string" or "bytes"; None: what the file says."""
    shape: tuple[int, ...] | None = None
    """Of each row, () for one number; None: any number of elements, or what the file says."""

    @property
    def width(self) -> int:
        """How many elements each row has, or -1."""
        return -1 if self.shape is None else prod(self.shape)

    @property
    def is_text(self) -> bool:
        """Whether rows are text or bytes."""
        return isinstance(self.dtype, str)


def slots_of(use_var: Any) -> tuple[Slot, ...]:
    """Return the columns named by `use_var`.

    Args:
        use_var: names, pairs (name, dtype), triples (name, dtype, shape), a schema of pyarrow, or
            what has a name and a dtype, such as Paddle's variables and torch tensors: their shape
            without its first dimension is that of a row, unless ``lod_level`` is more than 0.

    Raises:
        UsageError: an entry is none of these, or a name comes twice. It is a `ValueError`.

    Example:
        >>> from hpcdist.data.slots import slots_of
        >>> [slot.name for slot in slots_of(["words", ("label", "float32")])]
        ['words', 'label']

    """
    if isinstance(use_var, (str, bytes)) or not isinstance(use_var, Iterable):
        raise UsageError(
            f"use_var must be a list of names, of (name, dtype) or of tensors, got {use_var!r}"
        )
    slots = tuple(map(_slot_of, use_var))
    names = [slot.name for slot in slots]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"use_var has {', '.join(map(repr, twice))} more than once")
    return slots


def _slot_of(entry: Any) -> Slot:
    if isinstance(entry, Slot):
        return entry
    if isinstance(entry, str):
        return Slot(entry)
    if isinstance(entry, (tuple, list)) and len(entry) in (2, 3) and isinstance(entry[0], str):
        shape = entry[2] if len(entry) == 3 else None
        return Slot(entry[0], dtype_of(entry[1], entry[0]), _shape_of(shape, entry[0]))
    name = getattr(entry, "name", None)
    if isinstance(name, str) and hasattr(entry, "type") and hasattr(entry, "nullable"):
        return _slot_of_arrow(name, entry.type)
    if isinstance(name, str) and hasattr(entry, "dtype"):
        return Slot(name, dtype_of(entry.dtype, name), _row_shape(entry))
    if hasattr(entry, "dtype"):
        raise UsageError(
            "a tensor of use_var has no name, by which its column could be found; pass "
            '(name, dtype), such as ("label", "int64")'
        )
    raise UsageError(
        "each entry of use_var is a name, (name, dtype), (name, dtype, shape), or what has a name "
        f"and a dtype, got {entry!r}"
    )


def as_asked(values: npt.NDArray[Any], slot: Slot) -> npt.NDArray[Any]:
    """Return numbers in the dtype that a slot asks for.

    Raises:
        ValueError: not all of them are such numbers.

    """
    wanted = values.dtype if slot.dtype is None else np.dtype(slot.dtype)
    whole = values.dtype.kind in "iu" and wanted.kind in "iu"
    if not whole and not np.can_cast(values.dtype, wanted, "same_kind"):
        raise ValueError(f"{slot.name!r} is {values.dtype} in the file, and not {wanted}")
    with np.errstate(over="ignore"):
        found = values.astype(wanted, copy=False)
    if found is not values and wanted.kind == "f":
        lost = np.isinf(found)
        lost &= np.isfinite(values)
        if lost.any():
            raise ValueError(
                f"{slot.name!r} has {values[lost][0]}, which is too large for {wanted}"
            )
    if whole and wanted != values.dtype and not np.array_equal(found, values):
        raise ValueError(f"{slot.name!r} has numbers that are not {wanted}")
    return found


def float_of(text: str, dtype: Any, name: str = "") -> float:
    """Return the float that a text is, which is an infinity only if that is written.

    Raises:
        ValueError: it is no float, or too large for `dtype`.

    """
    value = float(text)
    if is_too_large(value, dtype) and (math.isfinite(value) or _DIGIT.search(text)):
        shown = f"{text[:40]!r}{'...' * (len(text) > 40)}"
        raise ValueError(f"{name!r}: " * bool(name) + f"{shown} is too large for {dtype}")
    return value


_DIGIT = re.compile("[0-9]")


def is_too_large(value: float, dtype: Any) -> bool:
    """Return whether a float is an infinity of `dtype`."""
    with np.errstate(over="ignore"):
        return bool(np.isinf(np.float64(value).astype(dtype)))


def dtype_of(dtype: Any, name: str) -> np.dtype[Any] | str | None:
    """Return a dtype that NumPy knows, "string", "bytes", or None.

    Raises:
        UsageError: there is none such. It is a `ValueError`.

    """
    if dtype is None:
        return None
    name_of = dtype.__name__ if dtype in (str, bytes) else str(dtype)
    text = name_of.rsplit(".", 1)[-1].lower()  # "torch.float32", "VarType.FP32"
    if text in TEXT:
        return TEXT[text]
    try:
        found = np.dtype(_PADDLE.get(text, text if isinstance(dtype, str) else _plain(dtype, text)))
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufM":
        raise UsageError(
            f"use_var: {name!r} has dtype {dtype}; a dataset has columns of integers, floats, "
            'bool, "string" and "bytes", and in multislot files of float32, int32 and int64'
        )
    return found


_PADDLE = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _plain(dtype: Any, text: str) -> Any:
    """Return what NumPy takes for a dtype: torch's have only their names."""
    try:
        return np.dtype(dtype)
    except TypeError:
        return text


def _shape_of(shape: Any, name: str) -> tuple[int, ...] | None:
    if shape is None:
        return None
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
        raise UsageError(f"use_var: the shape of a row of {name!r} is whole numbers, got {shape!r}")
    return tuple(map(int, sizes))


def _row_shape(variable: Any) -> tuple[int, ...] | None:
    """Return the shape of a row of what has dimension 0 for the batch; None if rows differ."""
    shape = tuple(getattr(variable, "shape", ()))[1:]
    ragged = getattr(variable, "lod_level", 0) or any(size is None or size < 0 for size in shape)
    return None if ragged else tuple(map(int, shape))


def _slot_of_arrow(name: str, kind: Any) -> Slot:
    text = str(kind)
    shape: tuple[int, ...] | None = ()
    if hasattr(kind, "value_type"):
        size = getattr(kind, "list_size", None)
        text, shape = str(kind.value_type), None if size is None else (int(size),)
    return Slot(name, dtype_of(_ARROW.get(text, text), name), shape)


_ARROW = {
    "double": "float64",
    "float": "float32",
    "halffloat": "float16",
    "large_string": "string",
    "large_binary": "bytes",
}
