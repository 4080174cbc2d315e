"""Products and sums of products: `matmul`, `einsum` and what can be said with letters.

[Note: letters] Each dimension of the arrays has a letter, as in `einsum`. An axis of the mesh that
cuts any of them is given one letter: the arrays with this letter are cut along it, the others are
whole along this axis of the mesh, and so is the result if it lacks the letter, from sums over the
ranks. Of the letters that the axis cuts anywhere, it is given the one for which the least has to
travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.policy import reproducible_sums
from hpcdist.mesh.rules import panels
from hpcdist.mesh.rules.basis import (
    as_dist,
    broadcast,
    combined,
    delivered,
    dimension,
    make,
    mesh_of,
    resharded,
    result_array,
)
from hpcdist.mesh.rules.creation import diagonal_mask
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.reductions import sum as total
from hpcdist.mesh.rules.shapes import moveaxis, ravel, without_cuts
from hpcdist.mesh.rules.sliced import everywhere, sliced_product
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.sums import is_floating, reproducible_sum
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import ReduceOp

Letters = tuple["int | None", ...]
"""Of an array: a number for each dimension; None where it is of length 1 and broadcast."""


class Plan(NamedTuple):
    """How a product is computed."""

    wanted: tuple[Layout, ...]
    """The layouts in which the arrays are wanted."""
    layout: Layout
    """Of the result."""
    axes: tuple[int, ...]
    """The axes of the mesh over whose ranks the results are added."""


def product(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    letters: Sequence[Letters],
    result: Letters,
    multiply: Callable[[Any, Any], Any] = np.multiply,
) -> Any:
    """Return `function` of arrays, whose dimensions have letters, and which adds products.

    `multiply` returns the products of elements, where both arrays have the same letters.
    """
    given, plan = _planned(arrays, letters, result)
    parts = [resharded(each, want).local for each, want in zip(given, plan.wanted, strict=True)]
    if reproducible_sums() and is_floating(np.result_type(*parts)):
        over = [_places(own, result) for own in letters]
        if any(over):
            return make(_reproducible(function, parts, plan, letters, over, multiply), plan.layout)
    part = result_array(function(*parts))
    op = ReduceOp.MAX if part.dtype.kind == "b" else ReduceOp.SUM
    if plan.axes:
        part = np.ascontiguousarray(part).reshape(part.shape)
        part = combined(part, plan.layout.mesh, plan.axes, op)
    return make(part, plan.layout)


def _places(own: Letters, result: Letters) -> tuple[int, ...]:
    """Return the dimensions of an array that are summed."""
    return tuple(
        [dim for dim, letter in enumerate(own) if letter is not None and letter not in result]
    )


def _reproducible(
    function: Callable[..., Any],
    parts: Sequence[Any],
    plan: Plan,
    letters: Sequence[Letters],
    over: Sequence[tuple[int, ...]],
    multiply: Callable[[Any, Any], Any],
) -> Any:
    """Return the product, with the same bits for every cut of the arrays."""
    mesh = plan.layout.mesh
    if len(parts) == 2 and letters[0] == letters[1] and None not in letters[0]:
        return reproducible_sum(multiply(*parts), over[0], everywhere(mesh, plan.axes))
    lengths = {
        letter: length
        for own, layout in zip(letters, plan.wanted, strict=True)
        for letter, length in zip(own, layout.shape, strict=True)
    }
    summed = {own[dim] for own, dims in zip(letters, over, strict=True) for dim in dims}
    length = math.prod(lengths[letter] for letter in summed)
    return sliced_product(function, parts, over, length, mesh, plan.axes)


def _planned(
    arrays: Sequence[Any], letters: Sequence[Letters], result: Letters
) -> tuple[list[DistArray], Plan]:
    """Return the arrays as DistArrays, and how to compute their product."""
    mesh = mesh_of(*arrays)
    given = [as_dist(each, mesh) for each in arrays]
    layouts = tuple(each.layout for each in given)
    key = "product", layouts, tuple(letters), result
    plan = layouts[0].memo.get(key)
    if plan is None:
        plan = layouts[0].remember(key, plan_product(layouts, letters, result))
    return given, plan


def plan_product(layouts: Sequence[Layout], letters: Sequence[Letters], result: Letters) -> Plan:
    """Return how to compute a product, see [Note: letters]."""
    mesh = layouts[0].mesh
    lengths = {
        letter: length
        for layout, own in zip(layouts, letters, strict=True)
        for letter, length in zip(own, layout.shape, strict=True)
        if letter is not None
    }
    given: dict[int, int] = {}
    for axis in range(mesh.ndim):
        candidates = {
            letter
            for layout, own in zip(layouts, letters, strict=True)
            for letter, cutting in zip(own, layout.axes, strict=True)
            if letter is not None and axis in cutting
        }
        if candidates:
            given[axis] = min(
                sorted(candidates),
                key=lambda letter: _travels(axis, letter, layouts, letters, result, lengths),
            )
    axes = {
        letter: tuple(
            axis for axis in _order(layouts, letters, letter) if given.get(axis) == letter
        )
        for letter in lengths
    }
    cuts = {letter: _cuts(layouts, letters, letter, axes[letter]) for letter in lengths}

    def arranged(own: Letters, shape: Sequence[int]) -> Layout:
        return make_layout(
            mesh,
            shape,
            [() if letter is None else axes[letter] for letter in own],
            [None if letter is None else cuts[letter] for letter in own],
        )

    wanted = [arranged(own, layout.shape) for layout, own in zip(layouts, letters, strict=True)]
    final = arranged(result, [1 if letter is None else lengths[letter] for letter in result])
    added = tuple(axis for axis, letter in given.items() if letter not in result)
    return Plan(tuple(wanted), final, added)


def _travels(
    axis: int,
    letter: int,
    layouts: Sequence[Layout],
    letters: Sequence[Letters],
    result: Letters,
    lengths: dict[int, int],
) -> float:
    """Return how many elements a rank receives if an axis of the mesh cuts along a letter."""
    ranks = layouts[0].mesh.sizes[axis]
    total = 0.0
    for layout, own in zip(layouts, letters, strict=True):
        size = math.prod(layout.shape)
        cut = next((dim for dim, axes in enumerate(layout.axes) if axis in axes), None)
        if letter not in own:
            total += size * (ranks - 1) / ranks if cut is not None else 0
        elif cut is not None and own[cut] != letter:
            total += size / ranks
    if letter not in result:
        total += 2 * math.prod(lengths[each] for each in result if each is not None)
    return total


def _order(layouts: Sequence[Layout], letters: Sequence[Letters], letter: int) -> list[int]:
    """Return the axes of the mesh that cut a letter, as the first array that they cut has them."""
    found: list[int] = []
    for layout, own in zip(layouts, letters, strict=True):
        for each, axes in zip(own, layout.axes, strict=True):
            if each == letter:
                found += [axis for axis in axes if axis not in found]
    return found


def _cuts(
    layouts: Sequence[Layout], letters: Sequence[Letters], letter: int, axes: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the boundaries of the largest array that these axes cut along a letter."""
    found = [
        (math.prod(layout.shape), cut)
        for layout, own in zip(layouts, letters, strict=True)
        for each, cutting, cut in zip(own, layout.axes, layout.cuts, strict=True)
        if each == letter and cutting == axes
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


# ---- the table


@rule("matmul", "linalg.matmul")
def matmul(x1: Any, x2: Any, /, out: Any = None, **options: Any) -> Any:
    """Return the product of matrices, over leading dimensions that broadcast."""
    a, b = np.shape(x1), np.shape(x2)
    if not a or not b:
        raise ValueError("matmul: an operand has no dimensions")
    if a[-1] != b[-2 if len(b) > 1 else 0]:
        raise ValueError(f"matmul: dimensions do not fit: {a} and {b} (n?,k),(k,m?)->(n?,m?)")
    batch = broadcast(a[:-2], b[:-2])
    m, k, n = -1, -2, -3
    left = (*_batch(a[:-2], batch), *((m, k) if len(a) > 1 else (k,)))
    right = (*_batch(b[:-2], batch), *((k, n) if len(b) > 1 else (k,)))
    result = (*range(len(batch)), *((m,) if len(a) > 1 else ()), *((n,) if len(b) > 1 else ()))

    if len(a) == len(b) == 2 and not options:
        (x, y), plan = _planned((x1, x2), (left, right), result)
        if not reproducible_sums() and panels.fit(x, y, plan.wanted):
            return delivered(panels.multiplied(x, y, plan.layout), out)

    def function(x: Any, y: Any) -> Any:
        return np.matmul(x, y, **options)

    return delivered(product(function, (x1, x2), (left, right), result), out)


def _batch(own: tuple[int, ...], shape: tuple[int, ...]) -> Letters:
    first = len(shape) - len(own)
    return tuple(
        letter if length == shape[letter] else None for letter, length in enumerate(own, first)
    )


@rule("dot", method=True)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    """Return the sum of products over the last dimension of `a` and the last but one of `b`.

    Args:
        a: the array.
        b: an array, across ranks or NumPy's and the same on all; or a number.
        out: a `DistArray` of the result's shape, which takes it and is returned.

    """
    if not np.ndim(a) or not np.ndim(b):
        return delivered(pointwise(np.multiply, a, b), out)
    return delivered(tensordot(a, b, ([-1], [-2 if np.ndim(b) > 1 else 0])), out)


@rule("inner")
def inner(a: Any, b: Any, /) -> Any:
    """Return the sum of products over the last dimensions."""
    if not np.ndim(a) or not np.ndim(b):
        return pointwise(np.multiply, a, b)
    return tensordot(a, b, ([-1], [-1]))


@rule("tensordot", "linalg.tensordot")
def tensordot(x1: Any, x2: Any, /, axes: Any = 2) -> Any:
    """Return the sum of products over some dimensions of two arrays."""
    first, second = np.ndim(x1), np.ndim(x2)
    if hasattr(axes, "__index__"):
        count = int(axes)
        if count > min(first, second):
            raise IndexError(f"tensordot: axes={axes} for {first} and {second} dimensions")
        over = [*range(first - count, first)], [*range(count)]
    else:
        one, two = (list(each) if hasattr(each, "__len__") else [each] for each in axes)
        over = [dimension(each, first) for each in one], [dimension(each, second) for each in two]
    left: list[int] = [*range(first)]
    right: list[int] = [*range(first, first + second)]
    if len(over[0]) != len(over[1]) or any(
        np.shape(x1)[i] != np.shape(x2)[j] for i, j in zip(*over, strict=False)
    ):
        raise ValueError("shape-mismatch for sum")
    for i, j in zip(*over, strict=True):
        right[j] = i
    result = [letter for letter in left if letter not in right] + [
        letter for letter in right if letter >= first
    ]

    def function(x: Any, y: Any) -> Any:
        return np.tensordot(x, y, over)

    return product(function, (x1, x2), (tuple(left), tuple(right)), tuple(result))


@rule("outer", "linalg.outer")
def outer(a: Any, b: Any, out: Any = None) -> Any:
    """Return all products of an element of one array and one of another."""
    mesh = mesh_of(a, b)
    vectors = [ravel(as_dist(each, mesh)) for each in (a, b)]
    return delivered(product(np.multiply.outer, vectors, ((0,), (1,)), (0, 1)), out)


@rule("vecdot", "linalg.vecdot")
def vecdot(x1: Any, x2: Any, /, out: Any = None, *, axis: int = -1) -> Any:
    """Return the sum of products over one dimension, the first array's elements conjugated."""
    mesh = mesh_of(x1, x2)
    x, y = (as_dist(each, mesh) for each in (x1, x2))
    if x.shape[axis] != y.shape[axis]:
        raise ValueError(f"vecdot: dimensions do not fit: {x.shape} and {y.shape} along {axis}")
    x, y = moveaxis(x, axis, -1), moveaxis(y, axis, -1)
    batch = broadcast(x.shape[:-1], y.shape[:-1])
    letters = [(*_batch(each.shape[:-1], batch), len(batch)) for each in (x, y)]

    def function(one: Any, two: Any) -> Any:
        return np.einsum("...i,...i->...", one.conj(), two)

    def multiply(one: Any, two: Any) -> Any:
        return one.conj() * two

    result = product(function, (x, y), letters, tuple(range(len(batch))), multiply)
    return delivered(result, out)


@rule("vdot")
def vdot(a: Any, b: Any, /) -> Any:
    """Return the sum of the products of all elements, the first array's conjugated."""
    mesh = mesh_of(a, b)
    return vecdot(ravel(as_dist(a, mesh)), ravel(as_dist(b, mesh)))


@rule("einsum")
def einsum(*operands: Any, out: Any = None, **options: Any) -> Any:
    """Return the sum of products that letters tell, or lists of numbers behind the arrays."""
    subscripts, *given = operands if isinstance(operands[0], str) else _lettered(operands)
    mesh = mesh_of(*given)
    arrays = [as_dist(each, mesh) for each in given]
    inputs, output = _parsed(subscripts, [each.ndim for each in arrays])
    lengths: dict[str, int] = {}
    for own, array in zip(inputs, arrays, strict=True):
        for letter, length in zip(own, array.shape, strict=True):
            if lengths.setdefault(letter, length) == 1:
                lengths[letter] = length
            if length not in (1, lengths[letter]):
                raise ValueError(f"einsum: {letter!r} is {lengths[letter]} and {length} long")
    order = {letter: number for number, letter in enumerate(lengths)}
    arrays = [_diagonal(array, own) for array, own in zip(arrays, inputs, strict=True)]
    letters = [
        tuple(
            order[letter] if length == lengths[letter] else None
            for letter, length in zip(own, array.shape, strict=True)
        )
        for own, array in zip(inputs, arrays, strict=True)
    ]
    told = f"{','.join(inputs)}->{output}"
    is_plain = len(arrays) > 1 and not {"optimize", "dtype"} & options.keys()

    def function(*parts: Any) -> Any:
        if is_plain:  # sums that are computed first are of the result's dtype, as NumPy's are
            dtype = np.result_type(*parts)
            parts = tuple([part.astype(dtype, copy=False) for part in parts])
        return np.array(np.einsum(told, *parts, **{"optimize": is_plain, **options}))

    return delivered(product(function, arrays, letters, tuple(order[each] for each in output)), out)


def _lettered(operands: Sequence[Any]) -> list[Any]:
    """Return letters and arrays of arrays with lists of numbers, the last one of the result."""
    told = [
        "".join("..." if number is Ellipsis else _NUMBERED[number] for number in numbers)
        for numbers in [*operands[1::2], *operands[-1:][: len(operands) % 2]]
    ]
    arrays = operands[: len(operands) - len(operands) % 2 : 2]
    inputs, output = told[: len(arrays)], told[len(arrays) :]
    return ["->".join([",".join(inputs), *output]), *arrays]


def _diagonal(array: Any, letters: str) -> Any:
    """Return the array, not cut along dimensions that share their letter."""
    twice = [dim for dim, letter in enumerate(letters) if letters.count(letter) > 1]
    return without_cuts(array, twice) if twice else array


def _parsed(subscripts: str, ndims: list[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, those of an ellipsis written out."""
    told, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = told.split(",")
    if len(inputs) != len(ndims):
        raise ValueError(f"einsum: {subscripts!r} names {len(inputs)} operands, got {len(ndims)}")
    spare = [letter for letter in _ALPHABET if letter not in subscripts]
    hidden = max(
        [ndim - len(own) + 3 for own, ndim in zip(inputs, ndims, strict=True) if "..." in own]
        or [0]
    )
    filled = []
    for own, ndim in zip(inputs, ndims, strict=True):
        count = ndim - len(own) + 3 if "..." in own else 0
        filled.append(own.replace("...", "".join(spare[hidden - count : hidden])))
        if len(filled[-1]) != ndim:
            raise ValueError(f"einsum: {own!r} does not fit an array of {ndim} dimensions")
    letters = "".join(filled)
    if arrow:
        result = output.replace("...", "".join(spare[:hidden]))
        if not {*spare[:hidden]} <= {*result} <= {*letters}:
            raise ValueError(
                f"einsum: the result of {subscripts!r} must have the dimensions of '...', and no "
                "letters that the operands lack"
            )
        return filled, result
    single = sorted({letter for letter in told if letter.isalpha() and letters.count(letter) == 1})
    return filled, "".join(spare[:hidden] if "..." in told else "") + "".join(single)


_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUMBERED = _ALPHABET[26:] + _ALPHABET[:26]
"""In the order of the numbers, as in that of the letters."""


@rule("trace", method=True)
def trace(
    a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None
) -> Any:
    """Return the sum along the diagonal of two dimensions.

    Args:
        a: the array.
        offset: which diagonal: above the main one if positive, below if negative.
        axis1: the dimension of the rows.
        axis2: that of the columns.
        dtype: of the computation and the result; None: NumPy's choice.
        out: a `DistArray` of the result's shape, which takes it and is returned.

    """
    x = moveaxis(a, (axis1, axis2), (-2, -1))
    mask = diagonal_mask(x.layout, offset)
    zero = x.dtype.type(0)
    return total(make(np.where(mask, x.local, zero), x.layout), (-2, -1), dtype, out)
