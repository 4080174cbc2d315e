"""What NCCL can reduce, and as what: a pure table of dtypes and operators.

NCCL knows no 16-bit integers, no bool and no complex numbers (nccl.h, ncclDataType_t), its
extrema drop NaN, and its sums of 16-bit floats are rounded at every step. Numbers it does not
know travel as others that give the same result; `plan_reduction` says how, or that there is no way.
"""

from __future__ import annotations

import numpy as np

from hpcdist.arrays.dtypes import Dtype
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import Combine, ReduceOp, ReductionRule

BYTES = 1
"""ncclUint8: how everything moves that is not reduced."""

_CODES = {
    "int8": 0,
    "uint8": BYTES,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_SUM, _PROD, _MAX, _MIN, _AVG = range(5)
_OPS = {
    Combine.ADD: _SUM,
    Combine.MULTIPLY: _PROD,
    Combine.MAXIMUM: _MAX,
    Combine.MINIMUM: _MIN,
    Combine.OR: _MAX,
    Combine.AND: _MIN,
}
"""bool travels as uint8, of which all values are 0 or 1: their maximum is OR, their minimum AND."""

_WIDEST = {"complex": 16}
"""Bytes of the widest numbers: long doubles are unknown to NCCL."""

_STAND_INS = {"bool": "uint8", "int16": "int32", "uint16": "uint32"}


class Reduction(NamedTuple):
    """How a reduction is handed to NCCL.

    Each element of the array that travels is `per_element` numbers of NCCL's type `code`.
    Before, the array is encoded by the rule if `encoded`, then seen as or converted to `wire`;
    after, it is converted back and decoded by the rule if `decoded`.
    """

    code: int
    op: int
    wire: np.dtype
    per_element: int = 1
    encoded: bool = False
    decoded: bool = False


def plan_reduction(
    op: ReduceOp, dtype: Dtype, rule: ReductionRule, ranks: int, *, native: bool
) -> Reduction | None:
    """Return how NCCL computes `op` on `dtype`; None where it cannot. Equal on all ranks.

    Args:
        op: the operator.
        dtype: that of the array.
        rule: how hpcdist computes it elsewhere, whose results NCCL's equal to rounding.
        ranks: size of the group; two numbers have one sum, however they are rounded.
        native: let NCCL add 16-bit floats as it does, rounding at each step.

    """
    is_short_sum = rule.combine is Combine.ADD and dtype.name in ("float16", "bfloat16")
    if is_short_sum and (native or ranks <= 2):
        return Reduction(_CODES[dtype.name], _AVG if op is ReduceOp.AVG else _SUM, dtype.numpy)
    number = _OPS.get(rule.combine)
    if number is None or dtype.numpy.itemsize > _WIDEST.get(dtype.family, 8):
        return None
    if dtype.family == "complex":
        return _complex(op, dtype) if rule.combine is Combine.ADD else None
    if op is ReduceOp.AVG and rule.encode is None:
        return Reduction(_CODES[dtype.name], _AVG, dtype.numpy)
    name = _STAND_INS.get(rule.wire.name, rule.wire.name)
    encoded, decoded = rule.encode is not None, rule.decode is not None
    return Reduction(_CODES[name], number, np.dtype(name), 1, encoded, decoded)


def _complex(op: ReduceOp, dtype: Dtype) -> Reduction:
    part = np.dtype(f"f{dtype.numpy.itemsize // 2}")
    return Reduction(_CODES[part.name], _AVG if op is ReduceOp.AVG else _SUM, dtype.numpy, 2)
