"""Sums of products that have the same bits however the arrays are cut.

[Note: sliced products] Each array is cut into slices of so few bits that every sum of products of
two slices is exact, whoever adds them, in whatever order: BLAS, other ranks, one after the other.
The products of the slices are then added in one order. (Ozaki, Ogita, Oishi and Rump, "Error-free
transformations of matrix multiplication by using fast routines of matrix multiplication and its
applications", Numerical Algorithms 59, 2012.)

Bits of an element count down to ``2**-60`` of the largest one of its row of the first array, or of
its column of the second (``2**-36`` for float32 and below).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.device import on_host, where_is
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.rules.basis import combined, result_array
from hpcdist.mesh.sums import Everywhere, check_summable, largest
from hpcdist.transport.call.reduction import ReduceOp

_BITS, _SHORT_BITS = 60, 36
_LOWEST = 400
"""A row is as if its largest element were at least ``2**-400`` of that of the array: else products
of slices would leave the range of their exponents."""


def sliced_product(
    function: Callable[..., Any],
    parts: Sequence[Any],
    over: Sequence[tuple[int, ...]],
    length: int,
    mesh: ProcessMesh,
    axes: tuple[int, ...],
) -> Any:
    """Return `function` of two arrays, which adds products, added over axes of a mesh.

    Args:
        function: linear in both arrays, or in the conjugate of one.
        parts: the arrays, or this rank's parts of them.
        over: the dimensions of each that are summed.
        length: how many products are added, of all ranks.
        mesh: the ranks.
        axes: the axes over whose ranks the results are added. Collective over them.

    """
    if len(parts) != 2:
        raise UsageError(
            f"there are no reproducible products of {len(parts)} arrays at once; multiply two at a "
            "time, or leave array_policy(sums='reproducible')"
        )
    dtype = np.result_type(*parts)
    check_summable(dtype)
    is_short = dtype.itemsize <= (8 if dtype.kind == "c" else 4)
    terms = max(1, length) * (2 if dtype.kind == "c" else 1)
    bits = (53 - math.ceil(math.log2(terms))) // 2
    count = -(-(_SHORT_BITS if is_short else _BITS) // bits)
    scales, is_finite = _scales(parts, over, mesh, axes)
    slices = [
        _slices(part if is_finite else _finite(part), scale, bits, count)
        for part, scale in zip(parts, scales, strict=True)
    ]
    pairs = [(p, total - p) for total in range(count) for p in range(total + 1)]
    products = [_product(function, slices[0][p], slices[1][q]) for p, q in pairs]
    found = combined(np.stack(products), mesh, axes, ReduceOp.SUM)
    value = found[-1].copy()
    for each in reversed(found[:-1]):
        value += each
    if not is_finite:
        value = _with_infinities(function, parts, value, mesh, axes)
    with np.errstate(over="ignore"):
        return value.astype(dtype, copy=False)


def everywhere(mesh: ProcessMesh, axes: tuple[int, ...]) -> Everywhere | None:
    """Return the ranks along axes of a mesh; None if one rank has all."""
    ranks = math.prod([mesh.sizes[axis] for axis in axes])
    if ranks == 1:
        return None
    rank, place = 0, mesh.coordinate or (0,) * len(mesh.sizes)
    for axis in axes:
        rank = rank * mesh.sizes[axis] + place[axis]
    return Everywhere(ranks, rank, lambda words, op: combined(words, mesh, axes, op))


def _product(function: Callable[..., Any], x: Any, y: Any) -> Any:
    return result_array(function(x, y))


def _scales(
    parts: Sequence[Any], over: Sequence[tuple[int, ...]], mesh: ProcessMesh, axes: tuple[int, ...]
) -> tuple[list[Any], bool]:
    """Return powers of two above the rows of each array, and whether all is finite."""
    exponents, is_finite = [], True
    for part, dims in zip(parts, over, strict=True):
        size = np.maximum(np.abs(part.real), np.abs(part.imag)).astype(np.float64)
        is_finite = is_finite and bool(np.isfinite(size).all())
        size[~np.isfinite(size)] = 0
        exponents.append(on_host(np.frexp(largest(size, dims))[1]).astype(np.int64))
    told = np.concatenate([*(each.reshape(-1) for each in exponents), [not is_finite]])
    told = combined(told.astype(np.int64), mesh, axes, ReduceOp.MAX)
    cut = exponents[0].size
    agreed = told[:cut], told[cut:-1]
    return [
        where_is(part, np.ldexp(1.0, _raised(each)).reshape(like.shape))
        for part, each, like in zip(parts, agreed, exponents, strict=True)
    ], not told[-1]


def _raised(exponents: Any) -> Any:
    return np.maximum(exponents, exponents.max(initial=-_LOWEST) - _LOWEST)


def _slices(part: Any, scale: Any, bits: int, count: int) -> list[Any]:
    """Return the slices of an array, whose elements are smaller than `scale`, in their places."""
    if part.dtype.kind == "c":
        real, imaginary = (_slices(each, scale, bits, count) for each in (part.real, part.imag))
        return [x + 1j * y for x, y in zip(real, imaginary, strict=True)]
    rest, found = part / scale, []
    for number in range(1, count + 1):
        unit = 2.0 ** (-bits * number)
        cut = np.rint(rest / unit) * unit
        rest = rest - cut
        found.append(cut * scale)
    return found


def _finite(part: Any) -> Any:
    return np.where(np.isfinite(part), part, part.dtype.type(0))


def _with_infinities(
    function: Callable[..., Any],
    parts: Sequence[Any],
    value: Any,
    mesh: ProcessMesh,
    axes: tuple[int, ...],
) -> Any:
    """Return the products of finite numbers, but where an infinity or NaN comes in, theirs."""
    x, y = parts
    odd = [(~np.isfinite(each)).astype(np.float64) for each in parts]
    ones = [np.ones_like(each, dtype=np.float64) for each in parts]
    touched = _product(function, odd[0], ones[1]) + _product(function, ones[0], odd[1])
    touched = combined(touched.real.copy(), mesh, axes, ReduceOp.MAX)
    with np.errstate(invalid="ignore", over="ignore"):
        plain = combined(
            _product(function, x, y).astype(value.dtype, order="C"), mesh, axes, ReduceOp.SUM
        )
    return np.where(touched > 0, plain, value)
