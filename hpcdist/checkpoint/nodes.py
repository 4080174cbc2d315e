"""A state as plain data: its nodes, what a leaf of each kind is, and how it is built anew.

A node is a dict with one entry, the kind and its content: ``{"dict": [[key, node], ...]}``,
``{"list": [node, ...]}``, ``{"tuple": ...}``, or a leaf. Arrays are leaves that say a name;
their numbers lie elsewhere. An array is named by its path, joined by dots:
``model.layers.0.weight``.
"""

from __future__ import annotations

import base64
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdist.checkpoint.formats import DtypeName, is_tensor_dtype
from hpcdist.named_tuple import NamedTuple

Node = Any
"""A part of a description, in what JSON has."""

Path = tuple[Any, ...]

DEPTH = 100
"""So many containers may lie in each other."""

CONTAINERS = ("dict", "list", "tuple")

NOWHERE: Node = {"elsewhere": None}
"""What a rank has to say of something that another rank describes."""

_WIDE = 1 << 63
"""Integers from here on are written in hexadecimal: decimal numbers may have 4300 digits only."""


# ---- arrays


class _Library(NamedTuple):
    """Who makes the arrays of a kind: the module that has its row, and its class, by names."""

    cls: tuple[str, str] | None = None
    module: str | None = None


ARRAYS = {
    "array": _Library(),
    "scalar": _Library(),
    "tensor": _Library(("torch", "Tensor"), "hpcdist.arrays.torch"),
    "jax": _Library(("jaxlib", "ArrayImpl"), "hpcdist.arrays.jax"),
}
"""By kind: NumPy's arrays, and those of all other libraries; NumPy's scalars; torch's; JAX's."""


def kind_of(array: Any, dtype: DtypeName) -> str:
    """Return the kind under which an array comes back as what it was."""
    if isinstance(array, np.generic):
        return "scalar"
    classes = {(each.__module__.partition(".")[0], each.__name__) for each in type(array).__mro__}
    found = (kind for kind, library in ARRAYS.items() if library.cls in classes)
    return next(found, "array") if is_tensor_dtype(dtype) else "array"


def wrap(kind: str, array: Any) -> Any:
    """Turn a new NumPy array into what was saved; where that library is not there, leave it."""
    if kind == "scalar":
        return array[()]
    module = ARRAYS[kind].module
    if module is None:
        return array
    try:
        library = importlib.import_module(module).LIBRARY
    except ImportError:
        return array
    return library.wrap(array)


# ---- values


class _Value(NamedTuple):
    """How a kind of value is written, and read back; `read` raises `ValueError` at nonsense."""

    fits: Callable[[Any], bool]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _read_bytes(text: Any) -> bytes:
    return base64.b64decode(_string(text), validate=True)


def _read_complex(parts: Any) -> complex:
    if type(parts) is not list or len(parts) != 2:
        raise ValueError("a complex number has two parts")
    return complex(*(float(_string(each)) for each in parts))


def _read_plain(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, float, str):
        raise ValueError("no plain value")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("no text")
    return value


_VALUES = {
    "bytes": _Value(
        lambda value: isinstance(value, bytes),
        lambda value: base64.b64encode(value).decode(),
        _read_bytes,
    ),
    "complex": _Value(
        lambda value: type(value) is complex,
        lambda value: [repr(value.real), repr(value.imag)],
        _read_complex,
    ),
    "float": _Value(
        lambda value: type(value) is float and not math.isfinite(value),
        repr,
        lambda text: float(_string(text)),
    ),
    "int": _Value(
        lambda value: type(value) is int and not -_WIDE <= value < _WIDE,
        hex,
        lambda text: int(_string(text), 16),
    ),
    "value": _Value(
        lambda value: value is None or isinstance(value, (bool, int, float, str)),
        lambda value: str(value) if isinstance(value, str) else value,
        _read_plain,
    ),
}
"""By kind, the first that fits; ``value`` is what JSON has."""


def is_value(value: Any) -> bool:
    """Return whether `value` is a number, text, bytes or None, and no scalar of NumPy's."""
    if isinstance(value, np.generic):
        return value.itemsize == 0  # empty text
    return (
        value is None or isinstance(value, str) or type(value) in (bool, int, float, complex, bytes)
    )


def encode(value: Any) -> Node:
    """Return the leaf for a value."""
    kind = next(kind for kind, each in _VALUES.items() if each.fits(value))
    return {kind: _VALUES[kind].write(value)}


def decode(kind: str, content: Any) -> Any:
    """Return the value of a leaf.

    Raises:
        ValueError: there is no such kind, or it is not written so.

    """
    if kind not in _VALUES:
        raise ValueError(f"no kind of value {kind!r}")
    return _VALUES[kind].read(content)


# ---- trees


def children(node: Node) -> list[tuple[Any, Node]]:
    """Return the keys and the nodes in a container; none in a leaf."""
    ((kind, content),) = node.items()
    if kind == "dict":
        return [(key, child) for key, child in content]
    return list(enumerate(content)) if kind in CONTAINERS else []


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Give the leaves in a node, and containers in which nothing is, by path."""
    inside = children(node)
    for key, child in inside:
        yield from leaves(child, (*path, key))
    if not inside:
        yield path, node


def build(node: Node, array: Callable[[str, str], Any]) -> Any:
    """Return a new state as described, with ``array(kind, name)`` for every array."""
    ((kind, content),) = node.items()
    if kind in ARRAYS:
        return array(kind, content)
    if kind == "dict":
        return {key: build(child, array) for key, child in content}
    if kind in CONTAINERS:
        made = [build(child, array) for child in content]
        return made if kind == "list" else tuple(made)
    return decode(kind, content)


def name_of(path: Path) -> str:
    """Return the name of the entry at a path; ``state`` for the root."""
    return ".".join(map(str, path)) or "state"


def noun(node: Node) -> str:
    """Describe a node, for a message."""
    (kind,) = node
    return "an array" if kind in ARRAYS else f"a {kind}"


def shown(node: Node) -> str:
    """Return a node in a few words."""
    ((kind, content),) = node.items()
    text = f"{kind} {content!r}"
    return text if len(text) < 60 else f"{text[:57]}..."


def topmost(node: Node, wanted: set[Path], path: Path = ()) -> list[Path]:
    """Return the highest paths of which all leaves are `wanted`, those below the root at most."""
    inside = children(node)
    if not inside:
        return [path] if path in wanted else []
    found = [topmost(child, wanted, (*path, key)) for key, child in inside]
    if path and all(each == [(*path, key)] for each, (key, _) in zip(found, inside, strict=True)):
        return [path]
    return [each for more in found for each in more]
