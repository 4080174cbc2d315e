"""Functions of words: `numpy.strings`, element by element.

How long the longest word of a result is, which NumPy's dtype says, the ranks tell each other, and
so they do if a word has no such result, as of `index`. NumPy 1 cuts words off at the largest width
that `center` and the like are given, here the largest of a rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.rules.basis import combined, cutting, failing_alike, make, own_box
from hpcdist.mesh.rules.pointwise import aligned
from hpcdist.mesh.rules.table import rule
from hpcdist.transport.call.reduction import ReduceOp

ROOM = "strings" if hasattr(np, "strings") else "char"
"""Where NumPy has them: since 2.0 in `numpy.strings`."""

_NAMES = """
capitalize center count decode encode endswith expandtabs find index ljust lower lstrip mod
multiply partition replace rfind rindex rjust rpartition rstrip startswith strip swapcase title
translate upper zfill
"""
_NO_UFUNCS = """
add isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle isupper str_len
"""
"""What NumPy 2 has ufuncs for, which need no rule."""
_CONSTANT = ("encoding", "errors", "table", "deletechars")
"""Arguments that are no arrays."""
_KINDS = {"encode": "S", "decode": "U"}
"""Of words that become others."""


def _row(name: str) -> None:
    numpys = getattr(getattr(np, ROOM), name)
    signature = inspect.signature(numpys)
    several = 3 if "partition" in name else 1
    in_columns = several > 1 and ROOM == "char"  # NumPy 1 makes an array of the three

    def computed(*args: Any, **kwargs: Any) -> Any:
        given = {
            key: value
            for key, value in signature.bind(*args, **kwargs).arguments.items()
            if value is not None
        }
        constant = {key: given.pop(key) for key in _CONSTANT if key in given}
        layout, parts = aligned(tuple(given.values()))
        if in_columns:
            shape, axes, cuts = (*layout.shape, several), (*layout.axes, ()), (*layout.cuts, None)
            layout = make_layout(layout.mesh, shape, axes, cuts)
        found = _on_parts(
            lambda: numpys(**dict(zip(given, parts, strict=True)), **constant),
            layout,
            _KINDS.get(name) or np.asarray(parts[0]).dtype.kind,
            1 if in_columns else several,
        )
        made = tuple(make(part, layout) for part in _as_long(found, layout))
        return made if len(made) > 1 else made[0]

    computed.__name__, computed.__doc__ = name, numpys.__doc__
    rule(f"{ROOM}.{name}")(computed)


def _on_parts(compute: Callable[[], Any], layout: Layout, kind: str, several: int) -> list[Any]:
    """Return the results of this rank's words; NumPy refuses to compute some of no words."""
    shape = tuple([hi - lo for lo, hi in own_box(layout)])
    one = np.dtype(f"{kind}1")

    def computed() -> Any:
        try:
            result = compute()
        except ValueError:
            if 0 not in shape:
                raise
        else:
            if getattr(result, "dtype", one).kind != "f":  # which NumPy 1 makes of no words
                return result
        return (np.empty(shape, one),) * several

    error = ValueError("an element of another rank was refused, see the error there")
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


for _name in (_NAMES + _NO_UFUNCS * (ROOM == "char")).split():
    _row(_name)
