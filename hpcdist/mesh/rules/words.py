"""Functions of words: `numpy.strings`, element by element.

How long the longest word of a result is, which NumPy's dtype says, the ranks tell each other, and
so they do if a word has no such result, as of `index`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.layout import Layout
from hpcdist.mesh.rules.basis import combined, cutting, failing_alike, make, own_box
from hpcdist.mesh.rules.pointwise import aligned
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.reduction import ReduceOp

ROOM = "strings" if hasattr(np, "strings") else "char"
"""Where NumPy has them: since 2.0 in `numpy.strings`."""

_NAMES = """
capitalize center count decode encode endswith expandtabs find index ljust lower lstrip mod
multiply partition replace rfind rindex rjust rpartition rstrip startswith strip swapcase title
translate upper zfill
"""
_CONSTANT = ("encoding", "errors", "table", "deletechars")
"""Arguments that are no arrays."""


def _row(name: str) -> None:
    numpys = getattr(getattr(np, ROOM), name)
    signature = inspect.signature(numpys)

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = {
            key: value
            for key, value in signature.bind(*args, **kwargs).arguments.items()
            if value is not None
        }
        constant = {key: given.pop(key) for key in _CONSTANT if key in given}
        layout, parts = aligned(tuple(given.values()))
        several = 3 if "partition" in name else 1
        found = _on_parts(
            lambda: numpys(**dict(zip(given, parts, strict=True)), **constant),
            layout,
            np.asarray(parts[0]).dtype.kind,
            several,
        )
        made = tuple(make(part, layout) for part in _as_long(found, layout))
        return made if several > 1 else made[0]

    computed.__name__, computed.__doc__ = name, numpys.__doc__
    rule(f"{ROOM}.{name}")(computed)


def _on_parts(compute: Callable[[], Any], layout: Layout, kind: str, several: int) -> list[Any]:
    """Return the results of this rank's words; NumPy refuses to compute some of no words."""
    shape = tuple([hi - lo for lo, hi in own_box(layout)])

    def computed() -> Any:
        try:
            return compute()
        except ValueError:
            if 0 not in shape:
                raise
            nothing = np.empty(shape, f"{kind}1")
            return (nothing,) * several

    error = ValueError("a word that another rank has is refused, see the error there")
    result = failing_alike(computed, layout.mesh, cutting(layout, range(len(shape))), error)
    return [*map(np.asarray, result if isinstance(result, tuple) else (result,))]


def _as_long(parts: list[Any], layout: Layout) -> list[Any]:
    """Return words in the dtype of the longest of all ranks."""
    if parts[0].dtype.kind not in "SU" or 0 in layout.shape:
        return parts
    one = np.dtype(f"{parts[0].dtype.kind}1")
    lengths = [part.dtype.itemsize // one.itemsize if part.size else 1 for part in parts]
    axes = cutting(layout, range(len(layout.shape)))
    longest = combined(np.array(lengths), layout.mesh, axes, ReduceOp.MAX)
    return [
        part.astype(f"{one.kind}{max(length, 1)}", copy=False)
        for part, length in zip(parts, longest.tolist(), strict=True)
    ]


for _name in _NAMES.split():
    _row(_name)
