"""`combine`: reduce memory of several ranks that one process can see.

The compiled part (`shm/native/combine.c`) carries the common dtypes and operators; NumPy carries
the rest, and everything where it was not compiled. Both follow the call's `ReductionRule` to the
bit, except that one NaN may be another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import Dtype
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import expect, load
from hpcdist.transport.call.call import Exchange, Reduction
from hpcdist.transport.call.reduction import ReduceOp, ReductionRule, local_result

compiled = load("hpcdist.transport._kernel")

MOST = 256
"""Ranks whose memory the compiled loops combine at once; NumPy does it for more."""

expect(compiled, MOST=MOST)

BLOCK_ITEMS = 32 << 10
"""Elements that NumPy combines at a time: they stay in the cache."""


class Code:
    """A row of the compiled table: which loop, and how many of its numbers make an element."""

    __slots__ = ("number", "per_item")

    def __init__(self, number: int, per_item: int) -> None:
        self.number = number
        self.per_item = per_item


def code_of(call: Reduction | Exchange) -> Code | None:
    """Return the compiled loop for a reduction, or None: NumPy does it."""
    assert call.op is not None
    key = call.op, call.dtype.code
    try:
        return CODES[key]
    except KeyError:
        return CODES.setdefault(key, _find_code(call))


CODES: dict[tuple[int, int], Code | None] = {}
"""What `code_of` has found, by operator and code of the dtype; for who is in a hurry."""


def _find_code(call: Reduction | Exchange) -> Code | None:
    assert call.op is not None
    assert call.rule is not None
    number = loop_number(call.op, call.dtype, call.rule)
    return None if number is None else Code(number, 1 + (call.dtype.family == "complex"))


def loop_number(op: ReduceOp, dtype: Dtype, rule: ReductionRule) -> int | None:
    """Return which compiled loop reduces a dtype by an operator, None where there is none."""
    if compiled is None or (dtype.family == "complex" and op is ReduceOp.AVG):
        return None
    number: int | None = compiled.CODES.get(f"{rule.combine.name.lower()}_{dtype.name}")
    return number


def divisor_of(call: Reduction, ranks: int) -> float:
    """Return by what the compiled loop divides the sum."""
    return float(ranks) if call.op is ReduceOp.AVG else 1.0


def accumulate(rule: ReductionRule, sources: Sequence[NumpyArray]) -> NumpyArray:
    """Combine `sources`, in their order, into new memory of the dtype that travels."""
    return local_result(rule, sources if rule.encode is None else map(rule.encode, sources))


def write_out(rule: ReductionRule, total: NumpyArray, out: NumpyArray, ranks: int) -> None:
    """Write what was accumulated over `ranks` ranks to `out`, in its own dtype."""
    if rule.decode is None:
        out[...] = total
    else:
        rule.decode(total, out, ranks)


@np.errstate(over="ignore", invalid="ignore")
def combine(
    rule: ReductionRule, sources: Sequence[NumpyArray], outs: Sequence[NumpyArray], ranks: int
) -> None:
    """Combine flat `sources`, in their order, and write the result to every array of `outs`.

    An output may be one of the sources; `ranks` is what a mean divides by.
    """
    for start in range(0, sources[0].size, BLOCK_ITEMS):
        part = slice(start, start + BLOCK_ITEMS)
        total = accumulate(rule, [source[part] for source in sources])
        result = outs[0][part]
        write_out(rule, total, result, ranks)
        for out in outs[1:]:
            out[part] = result


def combine_rows(call: Reduction, rows: NumpyArray, out: NumpyArray, *, compiles: bool) -> None:
    """Combine the rows of ranks, in their order, into a flat array, which may be one of them.

    Without `compiles` NumPy does it, or the library of a device.
    """
    code = code_of(call) if compiles and len(rows) <= MOST else None
    if code is None:
        combine(call.rule, list(rows), [out], len(rows))
        return
    sources = tuple(address_of(row) for row in rows)
    compiled.combine(
        code.number, sources, out, out.size * code.per_item, divisor_of(call, len(rows))
    )


def address_of(data: Any) -> int:
    """Return where the memory of a contiguous array begins."""
    if compiled is not None:
        begin: int = compiled.address(data)
        return begin
    return int(np.asarray(data).__array_interface__["data"][0])


def copy_bytes(to: NumpyArray, data: NumpyArray) -> None:
    """Copy contiguous `data` from or to memory that other ranks use, too."""
    if compiled is None:
        np.copyto(to, data)
    else:
        compiled.copy(to, data)
