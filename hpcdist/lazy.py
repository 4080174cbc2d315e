"""What is imported when somebody asks for it: `load` one thing, names of a module `lazily`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any


def load(where: str) -> Any:
    """Return what ``"module:name"`` names, or the module where there is no name."""
    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    return attrgetter(name)(found) if name else found


def lazily(
    namespace: dict[str, Any], rows: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's ``__getattr__`` and ``__dir__``, for names that other modules have.

    Args:
        namespace: the module's ``globals()``.
        rows: for each name the module that has it, or is it.

    """
    module = namespace["__name__"]

    def find(name: str) -> Any:
        if name not in rows:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = importlib.import_module(rows[name])
        # A package may have the name of its function.
        own = rows[name] == f"{module}.{name}"
        value = namespace[name] = found if own else getattr(found, name, found)
        return value

    return find, lambda: sorted({*namespace, *rows})
