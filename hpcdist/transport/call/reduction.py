"""How a reduction is computed, for every operator and dtype: the table behind `ReduceOp`.

A `ReductionRule` says in which dtype the numbers travel and are combined, and how they get there
and back. It is pure NumPy and shared by all transports, so that they agree to the bit:

- float16 and bfloat16 sums and products are accumulated in float32 and rounded once.
- Sums of 8- and 16-bit integers are accumulated in int32 and wrap at the end, because Open MPI's
  own ones saturate on processors with AVX.
- MAX and MIN of floats travel as integers in the same order, because MPI's MAX drops NaN and
  leaves the sign of zero to chance: NaN becomes the largest (smallest) key and wins, and -0.0
  is below 0.0. The result has the same bits on every rank.
- REPRODUCIBLE_SUM is the sum of all contributions at once, exact until it is rounded (`exact.py`),
  so it has no order.
- AVG is SUM, divided at the end; bool is reduced by the logical operators.
- What MPI has no operator for is a `Combine` of its own, and a function here: MAXLOC and MINLOC,
  and the extrema of long double, whose bits no integer holds. They are evaluated in the order of
  the ranks, so that the bits are the same on every rank all the same.
- The extrema of times travel as integers, moved by one for MAX: NaT, the smallest, is the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import EnumMeta, IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.arrays.bfloat16 import narrowed, widened
from hpcdist.arrays.buffer import typed
from hpcdist.arrays.dtypes import Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple


class _Operators(EnumMeta):
    if not TYPE_CHECKING:  # or no checker would find a misspelt name

        def __getattr__(cls, name: str) -> Any:
            known = {} if name[:1] == "_" else cls.__members__
            if name in known:  # before Python 3.12 it is asked for these, too
                return known[name]
            mean = " (AVG is the mean)" if name in ("MEAN", "AVERAGE") else ""
            raise AttributeError(f"{cls.__name__} has no {name!r}, but {', '.join(known)}{mean}")


class ReduceOp(IntEnum, metaclass=_Operators):
    """Reduction operators. The first five are those of Paddle, whose numbers are accepted, too.

    `BAND`, `BOR` and `BXOR` combine the bits of integers. `LAND`, `LOR` and `LXOR` ask of each
    integer whether it is other than 0, and give 0 or 1. `MAXLOC` and `MINLOC` work on arrays of
    pairs, a structured dtype of two fields such as ``[("value", "f8"), ("index", "i8")]``: the
    pair with the largest (smallest) value wins, of equal values the one with the smallest index.
    `REPRODUCIBLE_SUM` is the exact sum, rounded once to the nearest number: of floats and complex
    numbers it has the same bits in whatever order the ranks stand, and whatever carries it. It is
    SUM for integers and bool, and is not there for long doubles.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.array([3, 1])
        >>> _ = dist.all_reduce(x, dist.ReduceOp.MAX)
        >>> x.tolist()
        [3, 1]

    """

    __hash__ = int.__hash__

    SUM = 0
    MAX = 1
    MIN = 2
    PROD = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    LAND = 8
    LOR = 9
    LXOR = 10
    MAXLOC = 11
    MINLOC = 12
    REPRODUCIBLE_SUM = 13


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
    LARGER = 10
    SMALLER = 11
    MAXLOC = 12
    MINLOC = 13
    EXACT_SUM = 14
    """Of all contributions at once, not of two: by `local_result`, and by nothing else."""


@np.errstate(invalid="ignore")
def _larger(left: NumpyArray, right: NumpyArray, out: NumpyArray) -> None:
    """Write the maximum of long doubles to `out`: NaN wins, and 0.0 is above -0.0."""
    best = np.maximum(left, right)
    np.copyto(best, left + right, where=(left == 0) & (right == 0))
    out[...] = best


def _smaller(left: NumpyArray, right: NumpyArray, out: NumpyArray) -> None:
    """Write the minimum of long doubles to `out`: NaN wins, and -0.0 is below 0.0."""
    _larger(-left, -right, out)
    np.negative(out, out=out)


def _located(better: Callable[[NumpyArray, NumpyArray], NumpyArray]) -> Callable[..., None]:
    """Return what combines pairs: the better value wins (NaN the most), then the lower index."""

    @np.errstate(invalid="ignore")
    def combine(left: NumpyArray, right: NumpyArray, out: NumpyArray) -> None:
        assert left.dtype.names is not None
        value, index = left.dtype.names
        x, y = left[value], right[value]
        wins, ties = better(y, x), x == y
        if x.dtype.kind == "f":
            x_nan, y_nan = np.isnan(x), np.isnan(y)
            wins, ties = wins | (y_nan & ~x_nan), ties | (x_nan & y_nan)
        wins |= ties & (right[index] < left[index])
        out[...] = np.where(wins, right, left)

    return combine


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
    Combine.LARGER: _larger,
    Combine.SMALLER: _smaller,
    Combine.MAXLOC: _located(np.greater),
    Combine.MINLOC: _located(np.less),
}
OWN = frozenset({Combine.LARGER, Combine.SMALLER, Combine.MAXLOC, Combine.MINLOC})
"""Those that are functions of this module, which neither MPI nor a device's library has."""

Encode = Callable[[NumpyArray], NumpyArray]
Decode = Callable[[NumpyArray, NumpyArray, int], None]


class ReductionRule(NamedTuple):
    """`encode(data)` gives what travels as `wire`; `decode(wire, out, n)` writes the result.

    Both work on memory as a `Buffer` keeps it. Without `encode` the data travels as it is.
    """

    combine: Combine
    wire: np.dtype
    encode: Encode | None = None
    decode: Decode | None = None


def check_op(op: Any) -> ReduceOp:
    """Return `op` as a `ReduceOp`, or raise `UsageError`."""
    if type(op) is ReduceOp:
        return op
    if isinstance(op, int) and not isinstance(op, bool) and op in _NUMBERED:
        return ReduceOp(op)
    names = ", ".join(f"ReduceOp.{each.name}" for each in ReduceOp)
    raise UsageError(
        f"Unknown reduce_op type for {op!r}; use one of {names}, and pass other arguments by "
        "keyword (group=, sync_op=)"
    )


_NUMBERED = range(5)
"""Those of Paddle, which may be given as numbers."""


def rule_for(op: ReduceOp, dtype: Dtype) -> ReductionRule:
    """Return how `op` is computed on `dtype`; raise `UsageError` where it has no meaning."""
    return _RULES[op].get(dtype.code) or _make_rule(op, dtype)


_RULES: list[dict[int, ReductionRule]] = [{} for _ in ReduceOp]
"""Per operator, by dtype code: made when first used."""


def _make_rule(op: ReduceOp, dtype: Dtype) -> ReductionRule:
    family = _FAMILIES[dtype.family]
    make = family.get(op)
    if make is None:
        allowed = ", ".join(each.name for each in family) or "none"
        raise UsageError(
            f"ReduceOp.{op.name} is not defined for {dtype.name}; operators for it: {allowed}; "
            f"{_remedy(op, dtype)}"
        )
    return _RULES[op].setdefault(dtype.code, make(dtype))


def _remedy(op: ReduceOp, dtype: Dtype) -> str:
    if op in (ReduceOp.MAXLOC, ReduceOp.MINLOC) and dtype.family != "bytes":
        return (
            "it needs pairs of a number and an index, an array of a dtype such as "
            "[('value', 'f8'), ('index', 'i8')]"
        )
    if dtype.family == "bytes":
        kind = dtype.numpy.char if dtype.numpy.names is None else "fields"
        return _OF_BYTES.get(kind, "convert it first, for example x.astype(numpy.float32)")
    return _REMEDIES.get(dtype.family, "use another operator")


def _direct(combine: Combine) -> Callable[[Dtype], ReductionRule]:
    return lambda dtype: ReductionRule(combine, dtype.numpy)


def _arithmetic(combine: Combine, *, mean: bool = False) -> Callable[[Dtype], ReductionRule]:
    def make(dtype: Dtype) -> ReductionRule:
        if dtype.wide is None:
            return ReductionRule(combine, dtype.numpy, None, _divide if mean else None)
        return ReductionRule(combine, dtype.wide, _widen(dtype), _narrow(dtype, mean))

    return make


def _exact(dtype: Dtype) -> ReductionRule:
    if dtype.wide is None:
        if np.empty(0, dtype.numpy).real.itemsize > 8:
            raise UsageError(
                f"ReduceOp.REPRODUCIBLE_SUM is not defined for {dtype.name}; reduce it with "
                "ReduceOp.SUM, which has one order with HPCDIST_REDUCTIONS=ordered"
            )
        return ReductionRule(Combine.EXACT_SUM, dtype.numpy)
    return ReductionRule(Combine.EXACT_SUM, dtype.wide, _widen(dtype), _narrow(dtype, False))


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
    """Return whether numbers are bfloat16 on a device, whose library may not know that dtype."""
    return type(data) is not np.ndarray and dtype.name == "bfloat16"


def _truth(combine: Combine) -> Callable[[Dtype], ReductionRule]:
    def encode(data: NumpyArray) -> NumpyArray:
        truth: NumpyArray = data != 0
        return truth

    def decode(wire: NumpyArray, out: NumpyArray, ranks: int) -> None:
        out[...] = wire.reshape(out.shape)

    return lambda dtype: ReductionRule(combine, np.dtype(bool), encode, decode)


def _latest(dtype: Dtype) -> ReductionRule:
    def encode(data: NumpyArray) -> NumpyArray:
        shifted: NumpyArray = data - 1
        return shifted

    def decode(wire: NumpyArray, out: NumpyArray, ranks: int) -> None:
        np.add(wire, 1, out=out)

    return ReductionRule(Combine.MAXIMUM, np.dtype("i8"), encode, decode)


def _earliest(dtype: Dtype) -> ReductionRule:
    return ReductionRule(Combine.MINIMUM, np.dtype("i8"))


def _extremum(combine: Combine) -> Callable[[Dtype], ReductionRule]:
    def make(dtype: Dtype) -> ReductionRule:
        if dtype.numpy.itemsize > 8:
            own = Combine.LARGER if combine is Combine.MAXIMUM else Combine.SMALLER
            return ReductionRule(own, dtype.numpy)
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

        return ReductionRule(combine, key, encode, decode)

    return make


_FAMILIES: dict[str, dict[ReduceOp, Callable[[Dtype], ReductionRule]]] = {
    "bool": {
        ReduceOp.SUM: _direct(Combine.OR),
        ReduceOp.MAX: _direct(Combine.OR),
        ReduceOp.MIN: _direct(Combine.AND),
        ReduceOp.PROD: _direct(Combine.AND),
        ReduceOp.BAND: _direct(Combine.AND),
        ReduceOp.BOR: _direct(Combine.OR),
        ReduceOp.BXOR: _direct(Combine.XOR),
        ReduceOp.LAND: _direct(Combine.AND),
        ReduceOp.LOR: _direct(Combine.OR),
        ReduceOp.LXOR: _direct(Combine.XOR),
        ReduceOp.REPRODUCIBLE_SUM: _direct(Combine.OR),
    },
    "int": {
        ReduceOp.SUM: _arithmetic(Combine.ADD),
        ReduceOp.MAX: _direct(Combine.MAXIMUM),
        ReduceOp.MIN: _direct(Combine.MINIMUM),
        ReduceOp.PROD: _direct(Combine.MULTIPLY),
        ReduceOp.BAND: _direct(Combine.BIT_AND),
        ReduceOp.BOR: _direct(Combine.BIT_OR),
        ReduceOp.BXOR: _direct(Combine.BIT_XOR),
        ReduceOp.LAND: _truth(Combine.AND),
        ReduceOp.LOR: _truth(Combine.OR),
        ReduceOp.LXOR: _truth(Combine.XOR),
        ReduceOp.REPRODUCIBLE_SUM: _arithmetic(Combine.ADD),
    },
    "float": {
        ReduceOp.SUM: _arithmetic(Combine.ADD),
        ReduceOp.MAX: _extremum(Combine.MAXIMUM),
        ReduceOp.MIN: _extremum(Combine.MINIMUM),
        ReduceOp.PROD: _arithmetic(Combine.MULTIPLY),
        ReduceOp.AVG: _arithmetic(Combine.ADD, mean=True),
        ReduceOp.REPRODUCIBLE_SUM: _exact,
    },
    "complex": {
        ReduceOp.SUM: _arithmetic(Combine.ADD),
        ReduceOp.PROD: _arithmetic(Combine.MULTIPLY),
        ReduceOp.AVG: _arithmetic(Combine.ADD, mean=True),
        ReduceOp.REPRODUCIBLE_SUM: _exact,
    },
    "time": {ReduceOp.MAX: _latest, ReduceOp.MIN: _earliest},
    "pair": {
        ReduceOp.MAXLOC: _direct(Combine.MAXLOC),
        ReduceOp.MINLOC: _direct(Combine.MINLOC),
    },
    "bytes": {},
}
_REMEDIES = {
    "float": "reduce x != 0, or the bits in a view of integers such as x.view(numpy.int64)",
    "time": "reduce the integers behind it, x.view(numpy.int64)",
    "pair": "reduce one field at a time, numpy.ascontiguousarray(x['name'])",
    "int": "reduce x.astype(numpy.float64) for a mean",
    "bool": "reduce x.astype(numpy.int64) to count",
    "complex": "complex numbers have no order; reduce numpy.abs(x)",
}
_OF_BYTES = {
    "fields": "reduce one field at a time, numpy.ascontiguousarray(x['name'])",
    "S": "collect it with all_gather and combine it there",
    "U": "collect it with all_gather and combine it there",
    "V": "view it as numbers, for example x.view(numpy.uint8)",
}


@np.errstate(over="ignore", invalid="ignore")
def local_result(rule: ReductionRule, inputs: Iterable[NumpyArray]) -> NumpyArray:
    """Combine wire arrays in rank order, into new memory."""
    if rule.combine is Combine.EXACT_SUM:
        from hpcdist.transport.call.exact import exact_sum  # which needs fractions

        return exact_sum([*inputs], to_odd=rule.decode is not None)  # type: ignore[no-any-return]
    ufunc, inputs = UFUNCS[rule.combine], iter(inputs)
    total: NumpyArray = next(inputs).copy()
    for each in inputs:
        ufunc(total, each, out=total)
    return total
