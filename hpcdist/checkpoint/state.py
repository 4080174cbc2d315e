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
from typing import Any

from hpcdist.checkpoint.holdings import Views, is_held, views_of
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
from hpcdist.comm.alarms import is_alarm
from hpcdist.errors import MismatchError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an


class Opened(NamedTuple):
    """A container: `rebuild` returns it with other contents, itself where it can change."""

    kind: str
    items: list[tuple[Any, Any]]
    rebuild: Callable[[list[Any]], Any]


class _Found(NamedTuple):
    views: Views
    problems: list[str]


def describe_state(state: Any) -> tuple[Node, Views]:
    """Return the description of `state`, and by name what this rank has of its arrays.

    It goes through all of it even if there is a problem: taking the state of an object can be
    collective.

    Raises:
        UsageError: something in it cannot be saved, or two arrays would have one name.

    """
    found = _Found({}, [])
    node = _describe(state, (), found)
    if found.problems:
        raise UsageError(found.problems[0])
    return node, found.views


def _describe(value: Any, path: Path, found: _Found) -> Node:
    if is_value(value):
        return encode(value)
    try:
        if is_held(value):
            return _note(value, name_of(path), found.views)
    except UsageError as error:
        found.problems.append(str(error))
        return NOWHERE
    opened = open_container(value)
    if opened is not None:
        return _describe_items(opened, path, found)
    if is_object(value):
        return _describe_object(value, path, found)
    found.problems.append(
        f"{name_of(path)!r} is {an(type(value).__name__)}, which cannot be saved; a state has "
        "arrays, numbers, strings, bytes and None, in dicts, lists and tuples, and objects with "
        "state_dict and load_state_dict: convert it, or leave it out"
    )
    return NOWHERE


def _note(value: Any, name: str, views: Views) -> Node:
    """Put what this rank has of an array under its name; return its leaf."""
    found = views_of(value, name)
    if name in views:
        raise UsageError(f"two arrays of the state have the name {name!r}; rename one of them")
    views[name] = found
    return {kind_of(found[0].array, found[0].held.dtype): name}


def _describe_items(opened: Opened, path: Path, found: _Found) -> Node:
    if len(path) >= DEPTH:
        found.problems.append(
            f"{name_of(path[:5])!r} ... has more than {DEPTH} dicts, lists and tuples nested in "
            "each other; a state must not contain itself, or be so deep"
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
        if is_alarm(error):
            raise
        found.problems.append(
            f"{name_of(path)!r} is {an(type(value).__name__)} whose state cannot be taken: "
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


# ---- containers


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
