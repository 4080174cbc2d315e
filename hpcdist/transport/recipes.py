"""How a reduction is computed, for every operator and dtype: the table behind `ReduceOp`.

A `Recipe` says in which dtype the numbers travel and are combined, and how they get there and
back. It is pure NumPy and shared by all transports, so that they agree to the bit:

- float16 and bfloat16 sums and products are accumulated in float32 and rounded once.
- Sums of 8- and 16-bit integers are accumulated in int32 and wrap at the end, because Open MPI's
  own ones saturate on processors with AVX.
- MAX and MIN of floats travel as integers in the same order, because MPI's MAX drops NaN and
  leaves the sign of zero to chance: NaN becomes the largest (smallest) key and wins, and -0.0
  is below 0.0. The result has the same bits on every rank.
- AVG is SUM, divided at the end; bool is reduced by the logical operators.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hpcdist.arrays.bfloat16 import narrowed, widened
from hpcdist.arrays.buffer import typed
from hpcdist.arrays.dtypes import Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import UsageError


class ReduceOp(IntEnum):
    """Reduction operators, with Paddle's numbers."""

    __hash__ = int.__hash__

    SUM = 0
    MAX = 1
    MIN = 2
    PROD = 3
    AVG = 4


class BitwiseOp(IntEnum):
    """Operators on the bits of integers and on bool, which torch has besides; numbered on."""

    __hash__ = int.__hash__

    BAND = 5
    BOR = 6
    BXOR = 7


Op = ReduceOp | BitwiseOp


class Combine(IntEnum):
    """The elementary operators a transport must know."""

    __hash__ = int.__hash__

    ADD = 0
    MULTIPLY = 1
    MAXIMUM = 2
    MINIMUM = 3
    OR = 4
    AND = 5
    XOR = 6
    BIT_AND = 7
    BIT_OR = 8
    BIT_XOR = 9


UFUNCS: dict[Combine, Any] = {
    Combine.ADD: np.add,
    Combine.MULTIPLY: np.multiply,
    Combine.MAXIMUM: np.maximum,
    Combine.MINIMUM: np.minimum,
    Combine.OR: np.logical_or,
    Combine.AND: np.logical_and,
    Combine.XOR: np.logical_xor,
    Combine.BIT_AND: np.bitwise_and,
    Combine.BIT_OR: np.bitwise_or,
    Combine.BIT_XOR: np.bitwise_xor,
}

Encode = Callable[[NumpyArray], NumpyArray]
Decode = Callable[[NumpyArray, NumpyArray, int], None]


class Recipe(NamedTuple):
    """`encode(data)` gives what travels as `wire`; `decode(wire, out, n)` writes the result.

    Both work on memory as a `Buffer` keeps it. Without `encode` the data travels as it is.
    """

    combine: Combine
    wire: np.dtype
    encode: Encode | None = None
    decode: Decode | None = None


def check_op(op: Any) -> Op:
    """Return `op` as a `ReduceOp`, or raise `UsageError`."""
    if type(op) is ReduceOp or type(op) is BitwiseOp:
        return op
    if isinstance(op, int) and not isinstance(op, bool) and 0 <= op < len(ReduceOp):
        return ReduceOp(op)
    names = ", ".join(f"ReduceOp.{each.name}" for each in ReduceOp)
    raise UsageError(
        f"Unknown reduce_op type for {op!r}; use one of {names}, and give what is no operator by "
        "keyword (group=, sync_op=)"
    )


def recipe_for(op: Op, dtype: Dtype) -> Recipe:
    """Return how `op` is computed on `dtype`; raise `UsageError` where it has no meaning."""
    return _RECIPES[op].get(dtype.code) or _make_recipe(op, dtype)


_RECIPES: list[dict[int, Recipe]] = [{} for _ in (*ReduceOp, *BitwiseOp)]
"""Per operator, by dtype code: made when first used."""


def _make_recipe(op: Op, dtype: Dtype) -> Recipe:
    make = _FAMILIES[dtype.family].get(op)
    if make is None:
        family = _FAMILIES[dtype.family]
        allowed = ", ".join(each.name for each in family if type(each) is type(op)) or "none"
        remedy = _REMEDIES.get(dtype.family, "use another operator")
        raise UsageError(
            f"ReduceOp.{op.name} is not defined for {dtype.name}; operators for it: {allowed}; "
            f"{remedy}"
        )
    return _RECIPES[op].setdefault(dtype.code, make(dtype))


def _direct(combine: Combine) -> Callable[[Dtype], Recipe]:
    return lambda dtype: Recipe(combine, dtype.numpy)


def _arithmetic(combine: Combine, *, mean: bool = False) -> Callable[[Dtype], Recipe]:
    def make(dtype: Dtype) -> Recipe:
        if dtype.wide is None:
            return Recipe(combine, dtype.numpy, None, _divide if mean else None)
        return Recipe(combine, dtype.wide, _widen(dtype), _narrow(dtype, mean))

    return make


def _divide(wire: NumpyArray, out: NumpyArray, ranks: int) -> None:
    np.divide(wire, ranks, out=out)


def _widen(dtype: Dtype) -> Encode:
    def encode(data: Any) -> Any:
        if _by_bits(data, dtype):
            return widened(data)
        return typed(data, dtype).astype(dtype.wide)

    return encode


def _narrow(dtype: Dtype, mean: bool) -> Decode:
    def decode(wire: NumpyArray, out: NumpyArray, ranks: int) -> None:
        if mean:
            wire /= ranks
        if _by_bits(out, dtype):
            out[...] = narrowed(wire).reshape(out.shape)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            typed(out, dtype)[...] = wire.reshape(out.shape)

    return decode


def _by_bits(data: Any, dtype: Dtype) -> bool:
    """Say whether numbers are bfloat16 on a device, whose library may not know that dtype."""
    return type(data) is not np.ndarray and dtype.name == "bfloat16"


def _extremum(combine: Combine) -> Callable[[Dtype], Recipe]:
    def make(dtype: Dtype) -> Recipe:
        key = np.dtype(f"i{dtype.numpy.itemsize}")
        limits = np.iinfo(key)
        infinity = np.array(np.inf, dtype.numpy).view(key)[()]
        nan_key = limits.max if combine is Combine.MAXIMUM else limits.min
        shift = key.type(key.itemsize * 8 - 1)

        def flip(bits: NumpyArray) -> NumpyArray:
            mask: NumpyArray = bits >> shift
            mask &= key.type(limits.max)
            mask ^= bits
            return mask

        def encode(data: NumpyArray) -> NumpyArray:
            bits = data.reshape(-1).view(key)
            keys = flip(bits)
            keys[(bits & key.type(limits.max)) > infinity] = nan_key
            return keys

        def decode(wire: NumpyArray, out: NumpyArray, ranks: int) -> None:
            out.reshape(-1).view(key)[...] = flip(wire)

        return Recipe(combine, key, encode, decode)

    return make


_FAMILIES: dict[str, dict[Op, Callable[[Dtype], Recipe]]] = {
    "bool": {
        ReduceOp.SUM: _direct(Combine.OR),
        ReduceOp.MAX: _direct(Combine.OR),
        ReduceOp.MIN: _direct(Combine.AND),
        ReduceOp.PROD: _direct(Combine.AND),
        BitwiseOp.BAND: _direct(Combine.AND),
        BitwiseOp.BOR: _direct(Combine.OR),
        BitwiseOp.BXOR: _direct(Combine.XOR),
    },
    "int": {
        ReduceOp.SUM: _arithmetic(Combine.ADD),
        ReduceOp.MAX: _direct(Combine.MAXIMUM),
        ReduceOp.MIN: _direct(Combine.MINIMUM),
        ReduceOp.PROD: _direct(Combine.MULTIPLY),
        BitwiseOp.BAND: _direct(Combine.BIT_AND),
        BitwiseOp.BOR: _direct(Combine.BIT_OR),
        BitwiseOp.BXOR: _direct(Combine.BIT_XOR),
    },
    "float": {
        ReduceOp.SUM: _arithmetic(Combine.ADD),
        ReduceOp.MAX: _extremum(Combine.MAXIMUM),
        ReduceOp.MIN: _extremum(Combine.MINIMUM),
        ReduceOp.PROD: _arithmetic(Combine.MULTIPLY),
        ReduceOp.AVG: _arithmetic(Combine.ADD, mean=True),
    },
    "complex": {
        ReduceOp.SUM: _arithmetic(Combine.ADD),
        ReduceOp.PROD: _arithmetic(Combine.MULTIPLY),
        ReduceOp.AVG: _arithmetic(Combine.ADD, mean=True),
    },
    "bytes": {},
}
_REMEDIES = {
    "bytes": "convert it first, for example x.astype(numpy.float32)",
    "int": "reduce x.astype(numpy.float64) for a mean",
    "bool": "reduce x.astype(numpy.int64) to count",
    "complex": "complex numbers have no order; reduce numpy.abs(x)",
}


@np.errstate(over="ignore", invalid="ignore")
def local_result(recipe: Recipe, inputs: list[NumpyArray]) -> NumpyArray:
    """Combine wire arrays in rank order."""
    ufunc = UFUNCS[recipe.combine]
    total: NumpyArray = inputs[0].copy()
    for each in inputs[1:]:
        ufunc(total, each, out=total)
    return total
