"""Norms, diagonals and cross products: `numpy.linalg` on the elements of vectors and matrices.

Norms are reductions, but for those made of singular values. A diagonal is known to every rank along
what cuts the matrix; vectors that are multiplied are made whole, of 3 elements each.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np

from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import make_layout
from hpcdist.mesh.rules.along import pencils
from hpcdist.mesh.rules.basis import (
    as_dist,
    cutting,
    detached,
    dimension,
    dimensions,
    make,
    mesh_of,
    own_box,
    resharded,
    settled,
    uncut,
)
from hpcdist.mesh.rules.matrices import united
from hpcdist.mesh.rules.pointwise import pointwise
from hpcdist.mesh.rules.products import trace
from hpcdist.mesh.rules.reductions import max as largest, min as smallest, sum as total
from hpcdist.mesh.rules.shapes import expand_dims, moveaxis, squeeze, stack
from hpcdist.mesh.rules.table import rule
from hpcdist.mesh.rules.tall import singular_values


@rule("linalg.norm")
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the norm of vectors, or of matrices."""
    if axis is None and ord is not None and x.ndim not in (1, 2):
        raise ValueError("Improper number of dimensions to norm.")
    given = range(x.ndim) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    dims = [dimension(each, x.ndim) for each in given]
    if len(dims) == 2 and ord is not None:
        return _matrix_norm(x, dims[0], dims[1], ord, keepdims)
    if axis is not None and len(dims) > 2:
        raise ValueError("Improper number of dimensions to norm.")
    return _vector_norm(x, 2 if ord is None else ord, dimensions(axis, x.ndim), keepdims)


@rule("linalg.vector_norm")
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """Return the norm of the elements along dimensions."""
    return _vector_norm(x, ord, dimensions(axis, x.ndim), keepdims)


@rule("linalg.matrix_norm")
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Return the norm of matrices."""
    return _matrix_norm(x, x.ndim - 2, x.ndim - 1, ord, keepdims)


def _sizes(x: Any) -> Any:
    sizes = pointwise(np.abs, x)
    return sizes if sizes.dtype.kind == "f" else sizes.astype(float)


def _vector_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdims: bool) -> Any:
    if isinstance(ord, str):
        raise ValueError(f"Invalid norm order {ord!r} for vectors")
    if ord == 2:
        return pointwise(np.sqrt, total(pointwise(_squares, x), dims, keepdims=keepdims))
    sizes = _sizes(x)
    if ord in (np.inf, -np.inf):
        return (largest if ord > 0 else smallest)(sizes, dims, keepdims=keepdims)
    if ord == 0:
        counted = pointwise(lambda part: (part != 0).astype(part.dtype), sizes)
        return total(counted, dims, keepdims=keepdims)
    if ord == 1:
        return total(sizes, dims, keepdims=keepdims)
    added = total(pointwise(lambda part: part**ord, sizes), dims, keepdims=keepdims)
    return pointwise(lambda part: part ** (1 / ord), added)


def _squares(part: Any) -> Any:
    """Return the squares of the sizes of numbers."""
    if part.dtype.kind == "c":
        return (part.conj() * part).real
    part = part if part.dtype.kind == "f" else part.astype(float)
    return part * part


def _matrix_norm(x: Any, row: int, column: int, ord: Any, keepdims: bool) -> Any:
    if row == column:
        raise ValueError("Duplicate axes given.")
    both = (min(row, column), max(row, column))
    if ord in (None, "fro", "f"):
        return _vector_norm(x, 2, both, keepdims)
    if ord in (1, -1, np.inf, -np.inf):
        first, second = (row, column) if abs(ord) == 1 else (column, row)
        added = total(_sizes(x), first, keepdims=True)
        found = (largest if ord > 0 else smallest)(added, second, keepdims=True)
        return found if keepdims else squeeze(found, both)
    if ord not in (2, -2, "nuc"):
        raise ValueError("Invalid norm order for matrices.")
    values = singular_values(moveaxis(x, (row, column), (-2, -1)), "norm")
    reduction: Any = {"nuc": total, 2: largest, -2: smallest}[ord]
    found = reduction(values, -1)
    return expand_dims(found, both) if keepdims else found


# ---- diagonals and cross products


@rule("diagonal", method=True)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return the diagonal of two dimensions; all ranks along the axes that cut them have it.

    Args:
        a: the array.
        offset: which diagonal: above the main one if positive, below if negative.
        axis1: the dimension of the rows.
        axis2: that of the columns.

    """
    if dimension(axis1, a.ndim) == dimension(axis2, a.ndim):
        raise ValueError("axis1 and axis2 cannot be the same")
    x = settled(moveaxis(a, (axis1, axis2), (-2, -1)))
    layout, (rows, columns) = x.layout, x.shape[-2:]
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    final = make_layout(
        layout.mesh,
        (*x.shape[:-2], length),
        (*layout.axes[:-2], ()),
        (*layout.cuts[:-2], None),
    )
    (row, _), (column, _) = own_box(layout)[-2:]
    found = np.diagonal(x.local, offset + row - column, -2, -1)
    axes = cutting(layout, (x.ndim - 2, x.ndim - 1))
    if not axes or layout.mesh.coordinate is None:
        return make(found, final)
    part = np.zeros((*found.shape[:-1], length), x.dtype)
    start = max(row, column - offset) + min(offset, 0)
    part[..., start : start + found.shape[-1]] = found
    return detached(make(united(part, layout.mesh, axes), final), a)


@rule("linalg.diagonal")
def matrix_diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """Return the diagonals of matrices."""
    return diagonal(x, offset, -2, -1)


@rule("linalg.trace")
def matrix_trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """Return the sums along the diagonals of matrices."""
    return trace(x, offset, -2, -1, dtype)


@rule("cross")
def cross(
    a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Any:
    """Return the cross products of vectors."""
    if axis is not None:
        axisa = axisb = axisc = axis
    mesh = mesh_of(a, b)
    x, y = as_dist(a, mesh), as_dist(b, mesh)
    lengths = x.shape[dimension(axisa, x.ndim)], y.shape[dimension(axisb, y.ndim)]
    if not {*lengths} <= {2, 3}:
        raise ValueError(
            f"cross products are for vectors of 2 or 3 elements, got {x.shape}, {y.shape}"
        )
    (x0, x1, *x2), (y0, y1, *y2) = _components(x, axisa), _components(y, axisb)
    across = x0 * y1 - x1 * y0
    if not x2 and not y2:
        return across
    # A vector of 2 elements has 0 for the third one.
    products = [
        reduce(add, [*[x1 * each for each in y2], *[-(each * y1) for each in x2]]),
        reduce(add, [*[each * y0 for each in x2], *[-(x0 * each) for each in y2]]),
        across,
    ]
    return moveaxis(stack(products, -1), -1, axisc)


def _components(x: DistArray, axis: int) -> list[Any]:
    first = moveaxis(x, axis, 0)
    whole = resharded(first, pencils(first.layout, (0,)) or uncut(first.layout))
    return [whole[number] for number in range(whole.shape[0])]


@rule("linalg.cross")
def matrix_cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return the cross products of vectors of 3 elements."""
    if any(each.shape[axis] != 3 for each in (x1, x2)):
        raise ValueError(f"linalg.cross needs 3 elements along {axis}: {x1.shape}, {x2.shape}")
    return cross(x1, x2, axis=axis)
