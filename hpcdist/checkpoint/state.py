"""A state taken apart: what its containers are, with the arrays taken out and named.

A state is made of dicts, lists and tuples, nested in each other, with arrays, `LocalSlice`s,
numbers, strings, bytes and None in them, and objects that have a state. `describe_state` takes it
apart; `merge_nodes` joins what several ranks have. How a state takes what was saved is in
`matching`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdist.arrays.libraries import library_of
from hpcdist.checkpoint.boxes import Box, Shape, simplest, whole
from hpcdist.checkpoint.dist_arrays import is_dist_array, slices_of as slices_of_dist_array
from hpcdist.checkpoint.dtensor import is_dtensor, slices_of as slices_of_dtensor
from hpcdist.checkpoint.formats import DtypeName, name_of_dtype
from hpcdist.checkpoint.host_copies import look
from hpcdist.checkpoint.local_slice import LocalSlice, box_of
from hpcdist.checkpoint.nodes import (
    CONTAINERS,
    DEPTH,
    NOWHERE,
    Node,
    Path,
    encode,
    is_value,
    kind_of,
    name_of,
    shown,
)
from hpcdist.checkpoint.objects import ELSEWHERE, is_object, state_of
from hpcdist.checkpoint.sharded_weight import (
    is_sharded_weight,
    slices_of as slices_of_sharded_weight,
)
from hpcdist.errors import MismatchError, UsageError


class Opened(NamedTuple):
    """A container: `rebuild` returns it with other contents, itself where it can change."""

    kind: str
    items: list[tuple[Any, Any]]
    rebuild: Callable[[list[Any]], Any]


class _Found(NamedTuple):
    arrays: dict[str, list[Any]]
    problems: list[str]


def describe_state(state: Any) -> tuple[Node, dict[str, list[Any]]]:
    """Return the description of `state`, and by name its arrays, whole or in slices.

    It goes through all of it even if there is a problem: taking the state of an object can be
    collective.

    Raises:
        UsageError: something in it cannot be saved, or two arrays would have one name.

    """
    found = _Found({}, [])
    node = _describe(state, (), found)
    if found.problems:
        raise UsageError(found.problems[0])
    return node, found.arrays


def _describe(value: Any, path: Path, found: _Found) -> Node:
    if is_value(value):
        return encode(value)
    try:
        if is_array(value) or isinstance(value, LocalSlice):
            return _note(value, name_of(path), found.arrays)
    except UsageError as error:
        found.problems.append(str(error))
        return NOWHERE
    opened = open_container(value)
    if opened is not None:
        return _describe_items(opened, path, found)
    if is_object(value):
        return _describe_object(value, path, found)
    found.problems.append(
        f"{name_of(path)!r} is a {type(value).__name__}, which cannot be saved; a state has "
        "arrays, numbers, strings, bytes and None, in dicts, lists and tuples, and objects with "
        "state_dict and load_state_dict: convert it, or leave it out"
    )
    return NOWHERE


def _note(value: Any, name: str, arrays: dict[str, list[Any]]) -> Node:
    """Put an array or a slice of one under its name; return its leaf."""
    parts = parts_of(value, name)
    if name in arrays:
        raise UsageError(f"two arrays of the state have the name {name!r}; rename one of them")
    arrays[name] = parts
    data = data_of(parts[0])
    return {kind_of(data, name_of_dtype(look(data, name)[0])): name}


def _describe_items(opened: Opened, path: Path, found: _Found) -> Node:
    if len(path) >= DEPTH:
        found.problems.append(
            f"{name_of(path[:5])!r} ... has more than {DEPTH} dicts, lists and tuples in each "
            "other; a state must not contain itself, or be so deep"
        )
        return NOWHERE
    contents = []
    for key, child in opened.items:
        if not _is_key(key):
            found.problems.append(
                f"a key of {name_of(path)!r} is {key!r}; use strings or numbers as keys"
            )
        contents.append([key, _describe(child, (*path, key), found)])
    return {opened.kind: contents if opened.kind == "dict" else [node for _, node in contents]}


def _is_key(key: Any) -> bool:
    """Return whether JSON has such a key."""
    if isinstance(key, (int, float)):
        return abs(key) < _LARGEST
    return key is None or isinstance(key, str)


_LARGEST = 1 << 63


def _describe_object(value: Any, path: Path, found: _Found) -> Node:
    try:
        state = state_of(value)
    except Exception as error:
        found.problems.append(
            f"{name_of(path)!r} is a {type(value).__name__} whose state cannot be taken: "
            f"{type(error).__name__}: {error}"
        )
        return NOWHERE
    return NOWHERE if state is ELSEWHERE else _describe(state, path, found)


def merge_nodes(nodes: list[Node], ranks: list[int]) -> Node:
    """Merge the descriptions of a state from several ranks.

    Dicts are united; everything else must be equal.

    Raises:
        MismatchError: two ranks have different things at one place.

    """
    merged = nodes[0]
    for node, rank in zip(nodes[1:], ranks[1:], strict=True):
        if node != merged:
            merged = _merge(merged, node, (), ranks[0], rank)
    return merged


def _merge(one: Node, other: Node, path: Path, first: int, rank: int) -> Node:
    if NOWHERE in (one, other):
        return other if one == NOWHERE else one
    ((kind, content),), ((other_kind, others),) = one.items(), other.items()
    if kind == other_kind == "dict":
        united = dict(content)
        for key, child in others:
            known = united.get(key)
            same = known is None or known == child
            united[key] = child if same else _merge(known, child, (*path, key), first, rank)
        return {kind: [[key, child] for key, child in united.items()]}
    if kind == other_kind and kind in CONTAINERS and len(content) == len(others):
        pairs = enumerate(zip(content, others, strict=True))
        return {kind: [_merge(a, b, (*path, key), first, rank) for key, (a, b) in pairs]}
    if one != other:
        raise MismatchError(
            f"the ranks have different things to save at {name_of(path)!r}: rank {first} has "
            f"{shown(one)}, but rank {rank} has {shown(other)}. Give what differs between ranks "
            "a key of its own on each of them"
        )
    return one


# ---- arrays


_SPREAD: tuple[tuple[Callable[[Any], bool], Callable[[Any, str], list[LocalSlice]]], ...] = (
    (is_dtensor, slices_of_dtensor),
    (is_dist_array, slices_of_dist_array),
    (is_sharded_weight, slices_of_sharded_weight),
)
"""Arrays that know which part of a whole this rank has: how they are told, and their slices."""


def parts_of(value: Any, name: str) -> list[Any]:
    """Return an array or a slice alone, and an array that is spread over ranks as slices."""
    slices_of = next((slices for is_one, slices in _SPREAD if is_one(value)), None)
    return [value] if slices_of is None else list(slices_of(value, name))


def data_of(part: Any) -> Any:
    """Return the memory of an array or a slice."""
    return part.data if isinstance(part, LocalSlice) else part


class Extent(NamedTuple):
    """Dtype and shape of a whole array, and the part of it that an array or a slice is."""

    dtype: DtypeName
    shape: Shape
    box: Box


def extent_of(part: Any, name: str) -> Extent:
    """Return the extent of an array or a slice, without reading it.

    Raises:
        UsageError: a slice is wrong.

    """
    dtype, shape = look(data_of(part), name)
    if not isinstance(part, LocalSlice):
        return Extent(name_of_dtype(dtype), shape, whole(shape))
    shape, box = box_of(part, name, shape)
    return Extent(name_of_dtype(dtype), shape, simplest(box, shape))


# ---- containers


def is_array(value: Any) -> bool:
    """Return whether `value` is an array of some library, or a scalar of NumPy's."""
    if isinstance(value, np.generic) or is_dist_array(value) or is_sharded_weight(value):
        return True
    if isinstance(value, (str, bytes, dict, list, tuple)) or type(value) in (int, float, complex):
        return False
    try:
        library_of(value)
    except UsageError:
        return False
    return True


def open_container(value: Any) -> Opened | None:
    """Return what is in a dict, list or tuple, or in a container known to JAX; None for others."""
    if isinstance(value, dict):

        def update(children: list[Any]) -> Any:
            for key, child in zip(list(value), children, strict=True):
                value[key] = child
            return value

        return Opened("dict", list(value.items()), update)
    if isinstance(value, list):

        def replace(children: list[Any]) -> Any:
            value[:] = children
            return value

        return Opened("list", list(enumerate(value)), replace)
    if isinstance(value, tuple):
        cls = type(value)
        made = (lambda new: cls(*new)) if hasattr(cls, "_fields") else cls
        return Opened("tuple", list(enumerate(value)), made)
    return _open_registered(value)


def _open_registered(value: Any) -> Opened | None:
    """Open a container that is registered with JAX, where that is in use."""
    if "jax" not in sys.modules:
        return None
    opened = importlib.import_module("hpcdist.arrays.jax").open_container(value)
    return opened and Opened(
        "dict", [(key.strip("[].'\""), child) for key, child in opened[0]], opened[1]
    )
