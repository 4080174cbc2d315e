"""How a `ReduceType` is computed on a dtype: its operator, and its neutral element. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import Dtype, dtype_row
from hpcdist.errors import UsageError
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.placements import ReduceType
from hpcdist.mesh.process_mesh import Coordinate
from hpcdist.transport.call.reduction import ReduceOp, rule_for

OPERATORS = {
    ReduceType.kRedSum: ReduceOp.SUM,
    ReduceType.kRedMax: ReduceOp.MAX,
    ReduceType.kRedMin: ReduceOp.MIN,
    ReduceType.kRedProd: ReduceOp.PROD,
    ReduceType.kRedAvg: ReduceOp.AVG,
    ReduceType.kRedAny: ReduceOp.LOR,
    ReduceType.kRedAll: ReduceOp.LAND,
}


def reduce_type_of(layout: Layout) -> ReduceType | None:
    """Return how the contributions of an array are reduced; None where there are none."""
    return next((kind for kind in layout.partial if kind is not None), None)


def check_reducible(layout: Layout, dtype: Any) -> None:
    """Raise `UsageError` where contributions of a dtype cannot be reduced as the layout says."""
    kind = reduce_type_of(layout)
    if kind is None:
        return
    row = dtype_row(np.dtype(dtype))
    try:
        if kind in _OF_TRUTH and row.family != "bool":
            raise UsageError("it is for arrays of bool; x != 0 makes one")
        rule_for(OPERATORS[kind], row)
    except UsageError as error:
        raise UsageError(
            f"an array of {row.name} cannot be Partial({kind.name}): {error}"
        ) from None


_OF_TRUTH = (ReduceType.kRedAny, ReduceType.kRedAll)


def has_the_value(layout: Layout, place: Coordinate) -> bool:
    """Return whether a rank has the value itself, where contributions are made of a whole one.

    Of the ranks along a partial axis that is the first one; the others have what is neutral.
    """
    return all(
        kind is None or kind is ReduceType.kRedAvg or at == 0
        for kind, at in zip(layout.partial, place, strict=True)
    )


def neutral_of(layout: Layout, dtype: Any) -> Any:
    """Return the number that changes nothing where it is reduced with other contributions.

    An average has none: whoever has nothing to say gives the value itself.
    """
    kind, row = reduce_type_of(layout), dtype_row(np.dtype(dtype))
    if kind in _CONSTANTS:
        return row.numpy.type(_CONSTANTS[kind])
    lowest, highest = _ends(row)
    return lowest if kind is ReduceType.kRedMax else highest


_CONSTANTS = {
    ReduceType.kRedSum: 0,
    ReduceType.kRedProd: 1,
    ReduceType.kRedAny: 0,
    ReduceType.kRedAll: 1,
}


def _ends(row: Dtype) -> tuple[Any, Any]:
    """Return the lowest and the highest value of a dtype that has an order."""
    dtype = row.numpy
    if row.family == "bool":
        return np.False_, np.True_
    if row.family == "float":
        return dtype.type(-np.inf), dtype.type(np.inf)
    limits = np.iinfo(np.int64 if row.family == "time" else dtype)
    if row.family == "time":  # below the earliest is NaT
        lowest, highest = np.array([limits.min + 1, limits.max]).view(dtype)
        return lowest, highest
    return dtype.type(limits.min), dtype.type(limits.max)
