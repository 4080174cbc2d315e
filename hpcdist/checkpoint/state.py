"""A state as plain data: what its containers are, with the arrays taken out and named.

A state is made of dicts, lists and tuples, nested in each other, with arrays, `Shard`s, numbers,
strings, bytes and None in them. `describe_state` takes it apart; `build_state` makes it anew from
the description, and `fill_state` fills one that is there. An array is named by its path, joined by
dots: ``model.layers.0.weight``.
"""

from __future__ import annotations

import base64
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdist.arrays.libraries import library_of
from hpcdist.checkpoint.dtensor import is_dtensor, shard_of
from hpcdist.checkpoint.shard import Shard
from hpcdist.errors import MismatchError, UsageError

Node = Any
"""A part of a description, in what JSON has: a dict with the kind of the part and its contents."""

_ALONE = "state"
"""Name of an array that is the whole state."""

_ARRAYS = ("array", "scalar")
_CONTAINERS = ("dict", "list", "tuple")

_KEYS = (str, bool, int, float, type(None))


class _Opened(NamedTuple):
    """A container: `rebuild` returns it with other contents, itself where it can change."""

    kind: str
    items: list[tuple[Any, Any]]
    rebuild: Callable[[list[Any]], Any]


def describe_state(state: Any) -> tuple[Node, dict[str, Any]]:
    """Return the description of `state`, and its arrays and shards by name.

    Raises:
        UsageError: something in it cannot be saved, or two arrays would have one name.

    """
    arrays: dict[str, Any] = {}
    return _describe(state, (), arrays), arrays


def _describe(value: Any, path: tuple[Any, ...], arrays: dict[str, Any]) -> Node:
    if (
        value is None
        or isinstance(value, (bool, str))
        or type(value) in (int, float, complex, bytes)
    ):
        return _encode(value)
    if is_dtensor(value):
        value = shard_of(value, _name(path))
    if isinstance(value, Shard) or is_array(value):
        name = _name(path)
        if name in arrays:
            raise UsageError(f"two arrays of the state have the name {name!r}; rename one of them")
        arrays[name] = value
        return {"scalar" if isinstance(value, np.generic) else "array": name}
    opened = _open(value)
    if opened is None:
        raise UsageError(
            f"{_name(path)!r} is a {type(value).__name__}, which cannot be saved; a state has "
            "arrays, numbers, strings, bytes and None, in dicts, lists and tuples: convert it, or "
            "leave it out"
        )
    contents = []
    for key, child in opened.items:
        if not isinstance(key, _KEYS):
            raise UsageError(f"a key of {_name(path)!r} is {key!r}; use strings or numbers as keys")
        contents.append([key, _describe(child, (*path, key), arrays)])
    return {opened.kind: contents if opened.kind == "dict" else [node for _, node in contents]}


def build_state(node: Node, array: Callable[[str], Any]) -> Any:
    """Return a new state as described, with ``array(name)`` for every array."""
    ((kind, content),) = node.items()
    if kind in _ARRAYS:
        got = array(content)
        return got[()] if kind == "scalar" and got is not None else got
    if kind == "dict":
        return {key: build_state(child, array) for key, child in content}
    if kind in ("list", "tuple"):
        made = [build_state(child, array) for child in content]
        return made if kind == "list" else tuple(made)
    return _decode(kind, content)


class Match(NamedTuple):
    """How a state fits a description.

    `given` are its arrays and shards that the description has; `problems` say what does not fit;
    `new` are arrays of the description for which the state has an empty place.
    """

    given: dict[str, Any]
    problems: list[str]
    new: list[str]


def match_state(state: Any, node: Node) -> Match:
    """Compare `state` with a description.

    What is None in `state` fits everything. Keys that only the description has are left alone.
    """
    match = Match({}, [], [])
    _match(state, node, (), match)
    return match


def _match(value: Any, node: Node, path: tuple[Any, ...], match: Match) -> None:
    ((kind, content),) = node.items()
    if value is None:
        build_state(node, match.new.append)
        return
    if isinstance(value, Shard) or is_array(value):
        if kind in _ARRAYS:
            match.given[content] = shard_of(value, content) if is_dtensor(value) else value
        else:
            match.problems.append(
                f"{_name(path)!r} is {_noun(node)} in the checkpoint, not an array"
            )
        return
    opened = _open(value)
    here = type(value).__name__ if opened is None else opened.kind
    if opened is None and kind not in (*_ARRAYS, *_CONTAINERS):
        return
    if opened is None or (kind != here and {kind, here} != {"list", "tuple"}):
        match.problems.append(f"{_name(path)!r} is {_noun(node)} in the checkpoint, a {here} here")
        return
    _match_items(opened, dict(content) if kind == "dict" else dict(enumerate(content)), path, match)


def _match_items(
    opened: _Opened, saved: dict[Any, Node], path: tuple[Any, ...], match: Match
) -> None:
    if opened.kind != "dict" and len(saved) != len(opened.items):
        match.problems.append(
            f"{_name(path)!r} has {len(saved)} entries in the checkpoint, {len(opened.items)} here"
        )
        return
    for key, child in opened.items:
        if key in saved:
            _match(child, saved[key], (*path, key), match)
        else:
            match.problems.append(f"{_name((*path, key))!r} is not in the checkpoint")


def fill_state(state: Any, node: Node, array: Callable[[str], Any]) -> Any:
    """Put what the checkpoint has into `state`, which matches it; return the state.

    Dicts and lists are changed where they are; what cannot change is replaced.
    """
    ((kind, content),) = node.items()
    if state is None:
        return build_state(node, array)
    if isinstance(state, Shard):
        return state._replace(data=array(content))
    if is_dtensor(state):
        array(content)
        return state
    if is_array(state):
        return array(content)[()] if isinstance(state, np.generic) else array(content)
    opened = _open(state)
    if opened is None:
        return build_state(node, array)
    known = dict(content) if kind == "dict" else dict(enumerate(content))
    return opened.rebuild([fill_state(child, known[key], array) for key, child in opened.items])


def merge_nodes(nodes: list[Node], ranks: list[int]) -> Node:
    """Return the description of what several ranks have together.

    Dicts are united; everything else must be equal.

    Raises:
        MismatchError: two ranks have different things at one place.

    """
    merged = nodes[0]
    for node, rank in zip(nodes[1:], ranks[1:], strict=True):
        if node != merged:
            merged = _merge(merged, node, (), ranks[0], rank)
    return merged


def _merge(one: Node, other: Node, path: tuple[Any, ...], first: int, rank: int) -> Node:
    ((kind, content),), ((other_kind, others),) = one.items(), other.items()
    if kind == other_kind == "dict":
        united = dict(content)
        for key, child in others:
            known = united.get(key)
            same = known is None or known == child
            united[key] = child if same else _merge(known, child, (*path, key), first, rank)
        return {kind: [[key, child] for key, child in united.items()]}
    if kind == other_kind and kind in ("list", "tuple") and len(content) == len(others):
        pairs = enumerate(zip(content, others, strict=True))
        return {kind: [_merge(a, b, (*path, key), first, rank) for key, (a, b) in pairs]}
    if one != other:
        raise MismatchError(
            f"the ranks have different things to save at {_name(path)!r}: rank {first} has "
            f"{_shown(one)}, but rank {rank} has {_shown(other)}. Give what differs between ranks "
            "a key of its own on each of them"
        )
    return one


# ---- containers and values


def is_array(value: Any) -> bool:
    """Say whether `value` is an array of some library."""
    if isinstance(value, (str, bytes, dict, list, tuple)) or type(value) in (int, float, complex):
        return False
    try:
        library_of(value)
    except UsageError:
        return False
    return True


def _open(value: Any) -> _Opened | None:
    if isinstance(value, dict):

        def update(children: list[Any]) -> Any:
            value.update(zip(list(value), children, strict=True))
            return value

        return _Opened("dict", list(value.items()), update)
    if isinstance(value, list):

        def replace(children: list[Any]) -> Any:
            value[:] = children
            return value

        return _Opened("list", list(enumerate(value)), replace)
    if isinstance(value, tuple):
        cls = type(value)
        made = (lambda new: cls(*new)) if hasattr(cls, "_fields") else cls
        return _Opened("tuple", list(enumerate(value)), made)
    return _open_registered(value)


def _open_registered(value: Any) -> _Opened | None:
    """Open a container that is registered with JAX, where that is in use."""
    if "jax" not in sys.modules:
        return None
    opened = importlib.import_module("hpcdist.arrays.jax").open_container(value)
    return opened and _Opened(
        "dict", [(key.strip("[].'\""), child) for key, child in opened[0]], opened[1]
    )


def _encode(value: Any) -> Node:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return {"value": str(value) if isinstance(value, str) else value}


def _decode(kind: str, content: Any) -> Any:
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*map(float, content))
    return float(content) if kind == "float" else content


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or _ALONE


def _noun(node: Node) -> str:
    (kind,) = node
    return "an array" if kind in _ARRAYS else f"a {kind}"


def _shown(node: Node) -> str:
    ((kind, content),) = node.items()
    text = f"{kind} {content!r}"
    return text if len(text) < 60 else f"{text[:57]}..."
