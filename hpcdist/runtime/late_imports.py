"""Changes to modules of others, made when somebody imports them: torch takes a second to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, final

_Change = Callable[[ModuleType], None]


def when_imported(name: str, change: _Change) -> None:
    """Change a module now, or as soon as somebody imports it."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Changing(name, change))


def leave_to_python(rules: ModuleType) -> None:
    """Let Dynamo run what communicates as it is, as it does torch's process groups, which are C++.

    It compiles what calls a collective up to the call, and `hpcdist.torch`, which has layers.

    Args:
        rules: the module ``torch._dynamo.trace_rules``.

    """
    import pkgutil

    package = str(Path(__file__).parents[1])
    for each in pkgutil.iter_modules([package]):
        if each.name != "torch":
            rules.add(f"hpcdist.{each.name}")


@final
class _Changing:
    """Lets the others find one module, and changes it when it has been executed."""

    def __init__(self, name: str, change: _Change) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module; a caller that only asks for its spec need not import it."""
        if fullname != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another may change it, too
        found = (
            each.find_spec(fullname, path, target) for each in behind if hasattr(each, "find_spec")
        )
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_change(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._change(module)

            spec.loader.exec_module = then_change  # type: ignore[method-assign]
        return spec
