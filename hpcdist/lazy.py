"""What is imported when somebody asks for it: `load` one thing, names of a module `lazily`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

_NONE: Mapping[str, str] = {}


def load(where: str) -> Any:
    """Return what ``"module:name"`` names, or the module where there is no name."""
    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    return attrgetter(name)(found) if name else found


def lazily(
    namespace: dict[str, Any], rows: Mapping[str, str], elsewhere: Mapping[str, str] = _NONE
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's ``__getattr__`` and ``__dir__``, for names that other modules have.

    Args:
        namespace: the module's ``globals()``.
        rows: for each name the module that has it, or is it.
        elsewhere: for names that users of other libraries look for, what to use here.

    """
    module = namespace["__name__"]

    def find(name: str) -> Any:
        if name not in rows:
            words = f"module {module!r} has no attribute {name!r}{advice(name)}"
            raise AttributeError(words, name=name, obj=None)  # or Python suggests another name
        found = importlib.import_module(rows[name])
        # A package may have the name of its function.
        own = rows[name] == f"{module}.{name}"
        value = namespace[name] = found if own else getattr(found, name, found)
        return value

    def advice(name: str) -> str:
        if name in elsewhere:
            return f"; use {elsewhere[name]}"
        import difflib

        near = difflib.get_close_matches(name, public(), 1, 0.8) if name[:1] != "_" else []
        return f"; did you mean {near[0]!r}?" if near else ""

    def public() -> list[str]:
        return sorted({*namespace.get("__all__", namespace), *rows})

    return find, lambda: sorted({*public(), *(name for name in namespace if name[:2] == "__")})
