"""The table of rules: which function computes what of NumPy's on arrays that are cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from hpcdist.mesh.rules.basis import detached
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


def rule(
    *names: str, method: bool = False, moved: Callable[..., bool] | None = None
) -> Callable[[F], F]:
    """Enter a rule under names of NumPy's, and as a method of arrays if so marked.

    The first name is that of the array API standard. Names of `linalg` and `fft` have a
    dot. A name that this NumPy lacks is entered all the same: `hpcdist.array` has it.

    Where NumPy's result is a view of the first argument, `moved` tells of the arguments whether
    elements have to be moved for it, see [Note: moved views]. That is for users; other rules get
    what the function returns.
    """

    def enter(function: F) -> F:
        function = checked(function, names[0])
        entered = function if moved is None else _shown(function, moved)
        for name in names:
            NAMES[name] = entered
            numpys: Any = np
            for part in name.split("."):
                numpys = getattr(numpys, part, None)
            if isinstance(numpys, np.ufunc):
                UFUNCS[numpys] = entered
            elif numpys is not None:
                FUNCTIONS[numpys] = entered
        if method:
            METHODS[names[0]] = entered
        return function

    return enter


def _shown(function: F, moved: Callable[..., bool]) -> F:
    @wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return detached(result, args[0]) if moved(*args, **kwargs) else result

    return cast("F", shown)
