"""What a manifest must look like: its form, a table of entries, and what no table can say.

A manifest comes from a file, which anybody can have written. What passes here can be read without
further care: every name, number and node in it is what the rest of the package takes it for.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.checkpoint.blocks import BLOCK, Piece
from hpcdist.checkpoint.boxes import lies_in
from hpcdist.checkpoint.cover import flaw_of
from hpcdist.checkpoint.formats import dtype_of_name, is_tensor_dtype
from hpcdist.checkpoint.nodes import ARRAYS, CONTAINERS, DEPTH, Node, decode, leaves
from hpcdist.checkpoint.plan import Array
from hpcdist.errors import CheckpointError

DATA_FILE = re.compile(r"([0-9a-f]{12})-[0-9]{1,9}\.safetensors")
"""Names of data files; the first part is the token of a save."""

_LARGEST = (1 << 63) - 1
_DIMENSIONS = getattr(np, "MAXDIMS", 64)
"""An array of NumPy has at most so many dimensions; the constant went with NumPy 1."""


class Wrong(ValueError):
    """Something in a manifest is not as it must be."""


Check = Callable[[Any, str], None]
"""Raises `Wrong` unless a value, which is found at the place it is told, is right."""


def _need(right: bool, where: str, what: str, value: Any = None) -> None:
    if not right:
        text = "" if value is None else f", not {value!r:.80}"
        raise Wrong(f"{where} must be {what}{text}")


# ---- the table


def _integer(least: int = 0, most: int = _LARGEST) -> Check:
    def check(value: Any, where: str) -> None:
        right = type(value) is int and least <= value <= most
        _need(right, where, f"an integer from {least} to {most}", value)

    return check


def _optional(rule: Check) -> Check:
    return lambda value, where: None if value is None else rule(value, where)


def _text(value: Any, where: str) -> None:
    _need(type(value) is str, where, "text", value)


def _file_name(value: Any, where: str) -> None:
    right = type(value) is str and DATA_FILE.fullmatch(value) is not None
    _need(right, where, "the name of a data file in this folder", value)


def _checksums(value: Any, where: str) -> None:
    _text(value, where)
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        _need(False, where, "base64", value)


def _dtype(value: Any, where: str) -> None:
    try:
        dtype = dtype_of_name(value)
    except CheckpointError:
        dtype = None
    right = dtype is not None and dtype.itemsize > 0 and not dtype.hasobject
    _need(right, where, "a dtype", value)


def _shape(value: Any, where: str) -> None:
    _counts(value, where)
    _need(len(value) <= _DIMENSIONS, where, _MANY)


def _counts(value: Any, where: str) -> None:
    if type(value) is list:
        for each in value:
            if type(each) is not int or not 0 <= each <= _LARGEST:
                break
        else:
            return
    _COUNTS(value, where)  # says which of them is wrong


def _items(rule: Check) -> Check:
    def check(value: Any, where: str) -> None:
        _need(type(value) is list, where, "a list", value)
        for number, each in enumerate(value):
            rule(each, f"{where}[{number}]")

    return check


_COUNTS = _items(_integer())
_MANY = f"of at most {_DIMENSIONS} dimensions"


def _row(*rules: Check) -> Check:
    def check(value: Any, where: str) -> None:
        right = type(value) is list and len(value) == len(rules)
        _need(right, where, f"a list of {len(rules)}", value)
        for number, (rule, each) in enumerate(zip(rules, value, strict=True)):
            rule(each, f"{where}[{number}]")

    return check


def _entries(rule: Check) -> Check:
    def check(value: Any, where: str) -> None:
        _need(type(value) is dict, where, "an object", value)
        for name, each in value.items():
            rule(each, f"{where}[{name!r:.80}]")

    return check


def _fields(**rules: Check) -> Check:
    def check(value: Any, where: str) -> None:
        right = type(value) is dict and value.keys() == rules.keys()
        got = sorted(value) if type(value) is dict else value
        _need(right, where, f"an object with {', '.join(rules)}", got)
        for name, rule in rules.items():
            rule(value[name], f"{where}.{name}")

    return check


def _node(value: Any, where: str, depth: int = 0) -> None:
    _need(type(value) is dict and len(value) == 1, where, "a node", value)
    ((kind, content),) = value.items()
    if kind in ARRAYS:
        _text(content, where)
    elif kind in CONTAINERS:
        _need(depth < DEPTH, where, f"in at most {DEPTH} containers")
        _need(type(content) is list, where, "a list", content)
        children = _pairs(content, where) if kind == "dict" else content
        for each in children:
            _node(each, where, depth + 1)
    else:
        try:
            decode(kind, content)
        except (ValueError, OverflowError) as error:
            raise Wrong(f"{where} has a wrong value, {value!r:.80}") from error


def _pairs(content: list[Any], where: str) -> Iterator[Any]:
    """Give the nodes of a dict, whose keys must be different."""
    keys = set()
    for pair in content:
        _need(type(pair) is list and len(pair) == 2, where, "pairs", pair)
        key, child = pair
        _need(key is None or type(key) in (str, bool, int, float), where, "a key", key)
        keys.add(key)
        yield child
    _need(len(keys) == len(content), where, "without equal keys")


def _piece(value: Any, where: str) -> None:
    right = type(value) is list and len(value) >= 5 and len(value) % 2 == 1
    _need(right, where, "a list of file, offset, box and checksums", value)
    _counts(value[:-1], where)
    _checksums(value[-1], where)


_MANIFEST = _fields(
    format=_text,
    version=_integer(1),
    step=_optional(_integer()),
    ranks=_integer(1),
    block=_integer(BLOCK, BLOCK),
    files=_items(_row(_file_name, _integer())),
    structure=_node,
    arrays=_entries(_fields(dtype=_dtype, shape=_shape, pieces=_items(_piece))),
)


def check_form(found: Any) -> None:
    """Check that a manifest, as it comes from JSON, has all entries, each of its kind.

    Raises:
        Wrong: something is missing, or not what it must be.

    """
    _MANIFEST(found, "it")


# ---- what the table cannot say


def check_contents(
    structure: Node,
    arrays: Mapping[str, Array],
    pieces: Mapping[str, Sequence[Piece]],
    files: Sequence[tuple[str, int]],
) -> None:
    """Check that what a manifest has in its entries fits each other.

    Every array of the structure is there, and its pieces cover it: each byte of it once, each from
    another place in a file. So what is read into memory is never larger than the files.

    Raises:
        Wrong: they do not.

    """
    twice = [name for name, count in Counter(name for name, _ in files).items() if count > 1]
    _need(not twice, "it.files", "different", twice)
    _check_names(structure, arrays)
    places: list[tuple[int, int, int]] = []
    for name, array in arrays.items():
        places += _places(array, pieces[name], files, f"it.arrays[{name!r:.80}]")
    for (file, _, end), (other, begin, _) in pairwise(sorted(places)):
        _need(file != other or end <= begin, "it.arrays", "in places of their own")


def _check_names(structure: Node, arrays: Mapping[str, Array]) -> None:
    named = [(kind, leaf[kind]) for _, leaf in leaves(structure) for kind in leaf if kind in ARRAYS]
    names = {name for _, name in named}
    _need(names == arrays.keys() and len(named) == len(names), "it.structure", "of these arrays")
    for kind, name in named:
        where = f"it.arrays[{name!r:.80}]"
        dtype, shape = arrays[name]
        if ARRAYS[kind].module is not None:
            _need(is_tensor_dtype(dtype), where, f"of a dtype of {kind}", dtype)
        _need(kind != "scalar" or shape == (), where, "a scalar", shape)


def _places(
    array: Array, pieces: Sequence[Piece], files: Sequence[tuple[str, int]], where: str
) -> Iterator[tuple[int, int, int]]:
    """Give file, first byte, and the one after the last, of all pieces, which cover the array."""
    shape, itemsize = array.shape, dtype_of_name(array.dtype).itemsize
    # of an array without elements, too, NumPy counts the other dimensions
    possible = math.prod(max(1, each) for each in shape) * itemsize <= _LARGEST
    _need(possible, where, "of a possible size", shape)
    for file, offset, box, checksums in pieces:
        if not lies_in(box, shape):
            _need(False, where, f"divided inside of its shape, {shape}", str(box))
        nbytes = box.size * itemsize
        _need(nbytes > 0 or 0 in shape, where, "without an empty piece", box)
        _need(file < len(files), where, "in the files", file)
        _need(offset + nbytes <= files[file][1], where, "inside of its file", offset)
        blocks = -(-nbytes // BLOCK)
        if len(checksums) != 8 * blocks:
            _need(False, where, f"of {blocks} checksums")
        if nbytes:
            yield file, offset, offset + nbytes
    flaw = flaw_of([piece.box for piece in pieces], shape)
    if flaw is not None:
        number = "two pieces" if flaw.is_double else "no piece"
        raise Wrong(f"{where} must be covered once, but the elements {flaw.box} are in {number}")
