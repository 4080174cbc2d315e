"""`load`: the compiled parts of packages, each of which is optional.

The C of a package is in its `native/`, and made into one or two extension modules (`setup.py`).
Where one is missing, NumPy and Python do the same, to the bit, and slower.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

PARTS = {
    "hpcdist.transport._kernel": "collectives and messages in shared memory",
    "hpcdist.transport._arrays": "NumPy's own arrays in shared memory",
    "hpcdist.transport._recorder": "the flight recorder",
    "hpcdist.mesh._native": "merging of sorted arrays, and reproducible sums",
    "hpcdist.data._native": "rows of datasets",
    "hpcdist.ps._native": "rows of the parameter server",
    "hpcdist.jax._handler": "operations inside of jax.jit",
}
"""The extension modules, and what is slower without each; `setup.py` makes them."""

NOT_COMPILED = "not compiled"


def load(name: str) -> Any:
    """Return an extension module of `PARTS`, or None where it is missing."""
    try:
        return import_module(name)
    except ImportError:  # no compiler where hpcdist was installed, or it does not fit this Python
        return None


def expect(module: Any, **numbers: int) -> None:
    """Refuse an extension module that was compiled for other numbers than these.

    Python and C both have them written down, because they are part of how memory is laid out.

    Args:
        module: what `load` returned; None is not asked.
        numbers: what Python has, by the names in `NUMBERS` of the module.

    Raises:
        ImportError: one differs; the message names it and the remedy.

    """
    for name, number in numbers.items():
        there = number if module is None else getattr(module, "NUMBERS", {}).get(name)
        if there != number:
            raise ImportError(
                f"{module.__name__} was compiled with {name} = {there}, and Python has {number}: "
                "compile it again, with `pip install --force-reinstall --no-deps hpcdist`, or in a "
                "checkout with `python setup.py build_ext --inplace`",
                name=module.__name__,
                path=module.__file__,
            )


def missing() -> dict[str, str]:
    """Return why each extension module that is missing is so. Imports no package for it."""
    found = {name: _why_missing(name) for name in PARTS}
    return {name: why for name, why in found.items() if why is not None}


def what_is_missing() -> list[str]:
    """Return what `missing` found, a sentence for each reason; nothing where all parts are there.

    Example:
        >>> all(sentence.startswith("without ") for sentence in what_is_missing())
        True

    """
    parts: dict[str, list[str]] = {}
    for name, why in missing().items():
        parts.setdefault(why, []).append(f"{name} ({PARTS[name]})")
    return [
        f"without {'any compiled part' if len(names) == len(PARTS) else ', '.join(names)}: {why}"
        for why, names in parts.items()
    ]


def _why_missing(name: str) -> str | None:
    if name in sys.modules:
        return None
    folder = Path(__file__).parents[1].joinpath(*name.split(".")[:-1])
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        return NOT_COMPILED
    try:
        spec.loader.exec_module(module_from_spec(spec))
    except ImportError as error:
        return f"does not load: {error}"
    return None
