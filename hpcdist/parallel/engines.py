"""Which engine trains a model: found by the class of the model, and loaded when one appears.

A table has, by package and name of a class, the engine's ``"module:name"``. The modules know the
tables' owners, which know them by name only: torch is not imported where no module of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.arrays.libraries import row_of
from hpcdist.errors import UsageError
from hpcdist.lazy import load

ARRAYS = "hpcdist", "Parameter"
"""The row of models that give `Parameter`s, of whatever class they are."""

Table = Mapping[tuple[str, str], str]


def engine_for(model: Any, table: Table, caller: str) -> Any:
    """Return what `table` has for `model`.

    Raises:
        UsageError: there is nothing, and the model has no ``named_parameters()`` either.

    """
    if isinstance(model, type):
        name = model.__name__
        raise UsageError(f"{caller} got the class {name}; make an instance of it: {name}(...)")
    row = row_of(type(model), table)
    if row is None and callable(getattr(model, "named_parameters", None)):
        row = table[ARRAYS]
    if row is None:
        raise UsageError(
            f"{caller} got {model!r}, which is neither a torch.nn.Module nor an object whose "
            "named_parameters() yields pairs of a name and an hpcdist.Parameter; give the model one"
        )
    return load(row)
