"""The table of rules: which function computes what of NumPy's on arrays that are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hpcdist.mesh.rules.floating import checked

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""By the function of NumPy."""
UFUNCS: dict[Any, Callable[..., Any]] = {}
"""By a ufunc that is not computed element by element."""
NAMES: dict[str, Callable[..., Any]] = {}
"""By the name in `hpcdist.array`."""
METHODS: dict[str, Callable[..., Any]] = {}
"""By the name of a method of `DistArray`."""


def rule(*names: str, method: bool = False) -> Callable[[F], F]:
    """Enter a rule under names of NumPy's, and as a method of arrays if so marked.

    The first name is that of the array API standard. Names of `linalg` and `fft` have a
    dot. A name that this NumPy lacks is entered all the same: `hpcdist.array` has it.
    """

    def enter(function: F) -> F:
        function = checked(function, names[0])
        for name in names:
            NAMES[name] = function
            numpys: Any = np
            for part in name.split("."):
                numpys = getattr(numpys, part, None)
            if isinstance(numpys, np.ufunc):
                UFUNCS[numpys] = function
            elif numpys is not None:
                FUNCTIONS[numpys] = function
        if method:
            METHODS[names[0]] = function
        return function

    return enter
