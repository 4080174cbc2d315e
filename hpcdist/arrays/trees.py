"""Trees: dicts, lists and tuples, nested in each other, with arrays as leaves.

Every leaf has a path, written as in Python: ``tree['layers'][0].weight``. The keys of a dict are
visited in sorted order where they can be sorted, so that ranks may insert them in any order.
None is an empty place. Where jax is in use, the containers registered with it are understood,
too.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hpcdist.arrays.libraries import library_of
from hpcdist.errors import UsageError

Visit = Callable[[str, Any], Any]


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return path and value of every leaf."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda path, leaf: found.append((path, leaf)), tree)
    return found


def with_leaves(tree: Any, replacements: Iterable[Any]) -> Any:
    """Return `tree` with other leaves, in the order of `leaves`; containers are new."""
    remaining = iter(replacements)
    return map_leaves(lambda path, leaf: next(remaining), tree)


def map_leaves(visit: Visit, tree: Any, path: str = "tree") -> Any:
    """Return `tree` with every leaf replaced by ``visit(path, leaf)``."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        new = copy.copy(tree)
        for key in _in_order(tree):
            new[key] = map_leaves(visit, tree[key], f"{path}[{key!r}]")
        return new
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = zip(tree._fields, tree, strict=True)
        return type(tree)(*(map_leaves(visit, leaf, f"{path}.{name}") for name, leaf in fields))
    if isinstance(tree, (list, tuple)):
        return type(tree)(
            map_leaves(visit, leaf, f"{path}[{index}]") for index, leaf in enumerate(tree)
        )
    opened = None if _is_array(tree) else _open_registered(tree)
    if opened is None:
        return visit(path, tree)
    children, rebuild = opened
    return rebuild([map_leaves(visit, child, path + step) for step, child in children])


def _in_order(tree: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:
        return list(tree)


def _is_array(value: Any) -> bool:
    try:
        library_of(value)
    except UsageError:
        return False
    return True


def _open_registered(node: Any) -> Any:
    """Return children and rebuilding of a container that is registered with jax, or None."""
    if "jax" not in sys.modules:
        return None
    return importlib.import_module("hpcdist.arrays.jax").open_container(node)
