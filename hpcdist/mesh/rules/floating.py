"""Floating-point errors that `np.errstate` says to raise: on all ranks, whichever has the values.

[Note: errstate] What a rank alone raises would leave the others behind, in whatever they do next.
So a function runs with such errors noted only, and when it is done the ranks tell each other
what they have noted. Where nothing is to be raised, which is NumPy's default, that is one look
at a variable. A function that is called by another one notes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import numpy as np

from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.basis import arrays_in, combined, cutting
from hpcdist.transport.call.reduction import ReduceOp

F = TypeVar("F", bound=Callable[..., Any])

KINDS = {
    "divide by zero": "divide",
    "overflow": "over",
    "underflow": "under",
    "invalid value": "invalid",
}
"""What NumPy calls an error, and its keyword; the order is that in which NumPy looks for them."""


# ---- what is to be raised


@lru_cache(maxsize=16)
def _raises(_state: Any) -> bool:
    return "raise" in np.geterr().values()


_variable: Any = getattr(
    getattr(getattr(np, "_core", None), "umath", None), "_extobj_contextvar", None
)


def _raises_here() -> bool:
    """Return whether an error is to be raised: NumPy's own variable tells it in no time."""
    state = _variable.get(None)
    return state is not None and _raises(state)


raises_errors: Callable[[], bool] = (
    _raises_here if _variable is not None else lambda: "raise" in np.geterr().values()
)


# ---- raised on all ranks


def checked(function: F, name: str | None = None) -> F:
    """Return the function, which raises floating-point errors on all ranks, see [Note: errstate].

    Args:
        function: computes something of arrays across ranks; called on all ranks of their mesh.
        name: of what is computed, for the message; that of the function by default.

    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not raises_errors():
            return function(*args, **kwargs)
        return _alike(lambda: function(*args, **kwargs), name or function.__name__, (args, kwargs))

    return cast("F", call)


def _alike(compute: Callable[[], Any], name: str, args: Any) -> Any:
    mesh, axes = _whereabouts(args)
    if mesh is None or not axes:  # all ranks have the same values
        return compute()
    modes, call = np.geterr(), np.geterrcall()
    noted: set[str] = set()

    def note(what: str, flags: int) -> None:
        if modes[KINDS[what]] == "raise":  # type: ignore[literal-required]
            noted.add(what)
        elif callable(call):
            call(what, flags)

    quiet: Any = {kind: "call" if mode == "raise" else mode for kind, mode in modes.items()}
    with np.errstate(**quiet, call=note):
        result = compute()
    flags = combined(np.array([kind in noted for kind in KINDS], "u1"), mesh, axes, ReduceOp.MAX)
    for kind, flag in zip(KINDS, flags, strict=True):
        if flag:
            raise FloatingPointError(f"{kind} encountered in {name}")
    return result


def _whereabouts(args: Any) -> tuple[ProcessMesh | None, tuple[int, ...]]:
    """Return the mesh of the arrays among some arguments, and the axes along which they differ."""
    mesh: ProcessMesh | None = None
    axes: set[int] = set()
    for array in arrays_in(args):
        layout = array.layout
        mesh = layout.mesh if mesh is None else mesh
        axes.update(cutting(layout, range(len(layout.shape))))
        axes.update(axis for axis, op in enumerate(layout.partial) if op is not None)
    return mesh, tuple(sorted(axes))
