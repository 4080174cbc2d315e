"""`lazily`: names of a module that are imported from elsewhere when somebody asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


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
