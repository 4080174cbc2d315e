"""Functions of dtypes: those of NumPy, for which an array stands for its dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.mesh.rules.basis import is_dist
from hpcdist.mesh.rules.table import rule


def _dtype(value: Any) -> Any:
    return value.dtype if is_dist(value) else value


@rule("result_type")
def result_type(*arrays_and_dtypes: Any) -> Any:
    """Return the dtype that arrays, dtypes and numbers together give."""
    return np.result_type(*map(_dtype, arrays_and_dtypes))


@rule("can_cast")
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    """Return whether values of a dtype can become those of another."""
    return np.can_cast(_dtype(from_), _dtype(to), casting)


def finfo(type: Any, /) -> Any:
    """Return the limits of a floating-point dtype."""
    return np.finfo(_dtype(type))


def iinfo(type: Any, /) -> Any:
    """Return the limits of an integer dtype."""
    return np.iinfo(_dtype(type))


_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}


def isdtype(dtype: Any, kind: Any) -> bool:
    """Return whether a dtype is of a kind, or of one of several."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, each) for each in kind)
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        return np.dtype(dtype).kind in _KINDS[kind]
    return bool(np.dtype(dtype) == np.dtype(kind))


@rule("shape")
def shape(a: Any) -> tuple[int, ...]:
    """Return the lengths of an array."""
    return a.shape  # type: ignore[no-any-return]


@rule("ndim")
def ndim(a: Any) -> int:
    """Return the number of dimensions of an array."""
    return a.ndim  # type: ignore[no-any-return]


@rule("size")
def size(a: Any, axis: int | None = None) -> int:
    """Return the number of elements of an array, or its length along a dimension."""
    return a.size if axis is None else a.shape[axis]  # type: ignore[no-any-return]


@rule("iscomplexobj")
def iscomplexobj(x: Any) -> bool:
    """Return whether the elements are complex numbers."""
    return x.dtype.kind == "c"  # type: ignore[no-any-return]


@rule("isrealobj")
def isrealobj(x: Any) -> bool:
    """Return whether the elements are no complex numbers."""
    return not iscomplexobj(x)
